"""``BatchSizeFinder``: the largest batch that fits, found on copies."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import Training, assert_equal_to_the_bit

from pellucid.engine import DDP, FSDP, DataError, Engine, Events, HandlerError
from pellucid.handlers import BatchSizeFinder, BatchSizeResult

DATA = TensorDataset(torch.zeros(1000, 2))


def loader(size: int) -> Any:
    return DataLoader(DATA, size, shuffle=True)


def fitting(room: int, error: Any = torch.OutOfMemoryError) -> Any:
    """Return a step that finds no memory for more than ``room`` samples."""

    def step(engine: Engine, batch: Any) -> None:
        if len(batch[0]) > room:
            raise error("out of memory")
        engine.backward(engine.model(batch[0]).sum())
        engine.update()

    return step


def trainer(room: int = 10**9, error: Any = torch.OutOfMemoryError, **options: Any) -> Engine:
    model = nn.Linear(2, 1)
    return Engine(fitting(room, error), model, optimizer=torch.optim.Adam(model.parameters()), **options)


def cudnn(text: str) -> RuntimeError:
    return RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError, cudnn])
def test_it_doubles_until_memory_runs_out_and_then_halves_the_gap(error):
    assert BatchSizeFinder(refine=3).run(trainer(45, error), loader) == BatchSizeResult(
        44, ((2, True), (4, True), (8, True), (16, True), (32, True), (64, False), (48, False),
             (40, True), (44, True)), "memory",
    )  # fmt: skip
    assert BatchSizeFinder(refine=0).run(trainer(45, error), loader).batch_size == 32


def test_memory_that_the_system_refuses_is_seen():
    def step(engine: Engine, batch: Any) -> None:
        torch.empty(10 ** (12 if len(batch[0]) < 4 else 18), device="meta" if len(batch[0]) < 4 else "cpu")
        engine.backward(engine.model(batch[0]).sum())
        engine.update()

    assert BatchSizeFinder(refine=0).run(trainer(), loader, step).batch_size == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"max_batch_size": 100}, (100, "max_batch_size")), ({}, (1000, "data")), ({"min_batch_size": 3}, (1000, "data"))],
)
def test_it_says_what_keeps_the_batch_from_being_larger(options, expected):
    result = BatchSizeFinder(**options).run(trainer(), loader)
    assert (result.batch_size, result.limited_by) == expected


def test_looking_for_it_changes_nothing_of_a_run():
    watched = Training()

    @watched.engine.on(Events.ITERATION_COMPLETED(every=3))
    def look(engine: Engine, batch: Any) -> None:
        assert BatchSizeFinder(max_batch_size=4).run(engine, lambda size: watched.loader).batch_size

    plain = Training().run(epochs=2).outcome()
    found = watched.run(epochs=2).outcome()
    for one in (plain, found):  # the step of the copy is the same function, and has noted what it saw
        one.pop("samples"), one.pop("losses")
    assert_equal_to_the_bit(plain, found)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyError])
def test_a_search_that_fails_inside_a_run_changes_nothing_of_it_either(error):
    watched, failed = Training(), []

    def step(engine: Engine, batch: Any) -> None:
        watched.step(engine, batch)
        if engine.state.iteration == 2:
            raise error("out of memory")

    @watched.engine.on(Events.ITERATION_COMPLETED(every=3))
    def look(engine: Engine, batch: Any) -> None:
        with pytest.raises((HandlerError, KeyError)) as caught:
            BatchSizeFinder().run(engine, lambda size: watched.loader, step)
        failed.append(caught.type)

    plain = Training().run(epochs=2).outcome()
    found = watched.run(epochs=2).outcome()
    assert failed == [HandlerError if error is torch.OutOfMemoryError else KeyError] * len(failed) != []
    for one in (plain, found):
        one.pop("samples"), one.pop("losses")
    assert_equal_to_the_bit(plain, found)


def test_a_size_that_the_data_has_no_batch_of_is_too_large():
    def whole_batches(size: int) -> Any:
        return DataLoader(DATA, size, drop_last=True)

    result = BatchSizeFinder(256, refine=1).run(trainer(), whole_batches)
    assert result == BatchSizeResult(768, ((256, True), (512, True), (1024, False), (768, True)), "data")
    assert BatchSizeFinder(256, refine=1).run(trainer(600), whole_batches).limited_by == "memory"
    with pytest.raises(DataError, match="the data gave no batch"):
        BatchSizeFinder(2000).run(trainer(), whole_batches)


def test_at_rest_it_leaves_nothing_behind():
    engine, copies = trainer(), []

    def step(engine: Engine, batch: Any) -> None:
        copies.append(weakref.ref(engine.model))
        fitting(10)(engine, batch)

    before = [value.clone() for value in engine.model.state_dict().values()], torch.get_rng_state()
    assert BatchSizeFinder(max_batch_size=64).run(engine, loader, step).batch_size == 10
    assert_equal_to_the_bit(before, ([*engine.model.state_dict().values()], torch.get_rng_state()))
    assert engine.state.iteration == 0 and not engine.optimizer.state
    gc.collect()
    assert not any(copy() for copy in copies)


def test_an_error_of_another_kind_leaves_as_it_is():
    with pytest.raises(KeyError, match="mine"):
        BatchSizeFinder().run(trainer(0, lambda text: KeyError("mine")), loader)


def test_a_smallest_size_that_does_not_fit_is_an_error():
    with pytest.raises(HandlerError, match="even a batch of 4 does not fit into memory: give a smaller min_batch_size"):
        BatchSizeFinder(4).run(trainer(3), loader)


def test_a_step_that_trains_the_outer_model_is_refused():
    outer = trainer()

    def step(engine: Engine, batch: Any) -> None:
        outer.model(batch[0]).sum().backward()
        outer.optimizer.step()

    with pytest.raises(HandlerError, match="was about to update the outer model"):
        BatchSizeFinder().run(outer, loader, step)


def _search_on_a_rank() -> Any:
    engine = trainer(strategy=DDP())
    return BatchSizeFinder(refine=2).run(engine, loader, fitting(20 if engine.state.rank else 50))


def test_all_ranks_take_the_smallest():
    one, other = run_on_ranks(_search_on_a_rank, 2)
    assert one == other and one.batch_size == 20


def _refused_on_a_rank() -> str:
    with pytest.raises(HandlerError) as caught:
        BatchSizeFinder().run(trainer(strategy=FSDP()), loader)
    return str(caught.value)


def test_a_model_that_ranks_share_is_refused_with_the_remedy():
    for message in run_on_ranks(_refused_on_a_rank, 2):
        assert "limit_batches=3" in message


def test_what_is_no_engine_and_no_function_is_refused():
    with pytest.raises(HandlerError, match="on the model of an Engine, got Linear"):
        BatchSizeFinder().run(nn.Linear(2, 1), loader)
    with pytest.raises(TypeError, match=r"make_data=.*: a function of the batch size was wanted"):
        BatchSizeFinder().run(trainer(), loader(2))


@pytest.mark.parametrize(
    "options", [{"min_batch_size": 0}, {"min_batch_size": 8, "max_batch_size": 4}, {"iterations": 0}, {"refine": -1}]
)
def test_arguments_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="was wanted"):
        BatchSizeFinder(**options)
