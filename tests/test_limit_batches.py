"""``run(data, limit_batches=n)``: at most n batches of each pass over the data."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader
from training import BATCH, LOADERS, WORKER_LOADERS, Samples, assert_equal_to_the_bit, terminate

from pellucid.engine import Engine, Events, LimitError


def collecting(**options: Any) -> tuple[Engine, list[list[int]]]:
    seen: list[list[int]] = []
    engine = Engine(lambda engine, batch: seen.append(batch[2].tolist()), **options)
    return engine, seen


@pytest.mark.parametrize("limit", [1, 3, 5, 9])
@pytest.mark.parametrize("loader", [*LOADERS, "two workers", "persistent workers"])
def test_each_epoch_is_the_first_batches_of_its_pass(loader, limit):
    make = (LOADERS | WORKER_LOADERS)[loader]
    torch.manual_seed(0)
    data = make()
    plain = [batch[2].tolist() for _ in range(3) for batch in islice(data, limit)]
    torch.manual_seed(0)
    engine, seen = collecting()
    lengths = []
    engine.add_event_handler(Events.EPOCH_STARTED, lambda engine, batch: lengths.append(engine.state.epoch_length))
    result = engine.run(make(), max_epochs=3, limit_batches=limit)
    assert seen == plain
    assert lengths == [min(limit, 5)] * 3
    assert (result.epoch, result.iteration) == (3, 3 * min(limit, 5))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    "make", [lambda: [1, 2, 3], lambda: iter([1, 2, 3]), lambda: lambda state: (n for n in (1, 2, 3))]
)
def test_any_data_is_limited_in_any_mode(make, mode):
    seen: list[int] = []
    Engine(lambda engine, batch: seen.append(batch), mode=mode).run(make(), limit_batches=2)
    assert seen == [1, 2]


def test_only_the_run_it_is_given_to_is_limited():
    engine, seen = collecting()
    loader = DataLoader(Samples(), BATCH)
    engine.run(loader, max_epochs=1, limit_batches=2)
    engine.run(loader, max_epochs=2)
    assert len(seen) == 2 + 5
    evaluator, looked_at = collecting(mode="eval")
    evaluator.run(loader, limit_batches=1)
    evaluator.run(loader)
    assert len(looked_at) == 1 + 5


@pytest.mark.parametrize("loader", ["shuffled", "numpy sampler", "global noise"])
def test_a_limited_run_that_is_stopped_goes_on_as_if_it_had_not(loader):
    def run(stops: bool, **limits: Any) -> list[Any]:
        torch.manual_seed(0)
        engine, seen = collecting()
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: stops and terminate(engine))
        data = LOADERS[loader]()
        while engine.state.iteration < 9:
            engine.run(data, max_epochs=3, limit_batches=3)
        return [seen, torch.get_rng_state()]

    assert_equal_to_the_bit(run(stops=False), run(stops=True))


@pytest.mark.parametrize("loader", ["shuffled", "numpy sampler", "global noise"])
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_limited_run_goes_on_in_new_objects(loader, stop):
    torch.manual_seed(0)
    whole, wanted = collecting()
    whole.run(LOADERS[loader](), max_epochs=3, limit_batches=3)
    wanted_next = torch.rand(())
    torch.manual_seed(0)
    stopped, seen = collecting()
    stopped.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda engine, batch: terminate(engine))
    stopped.run(LOADERS[loader](), max_epochs=3, limit_batches=3)
    torch.manual_seed(1)
    resumed, rest = collecting()
    resumed.load_state_dict(stopped.state_dict())
    resumed.run(LOADERS[loader](), max_epochs=3, limit_batches=3)
    assert_equal_to_the_bit([wanted, wanted_next], [seen + rest, torch.rand(())])


@pytest.mark.parametrize(("first", "then", "wanted"), [
    ({"limit_batches": 2}, {}, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]),  # the epoch that was stopped goes on to its end
    ({"limit_batches": 2}, {"limit_batches": 3}, [0, 1, 2, 0, 1, 2]),
    ({}, {"limit_batches": 1}, [0, 1, 0]),  # it has had its batch
    ({"limit_batches": 2}, {"max_iters": 6}, [0, 1, 2, 3, 4, 0]),
    ({"epoch_length": 3}, {"limit_batches": 2}, [0, 1, 0, 1]),
])  # fmt: skip
def test_a_run_that_goes_on_from_a_stop_has_a_limit_of_its_own(first, then, wanted):
    seen: list[int] = []
    engine = Engine(lambda engine, batch: seen.append(batch))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: terminate(engine))
    engine.run(range(5), max_epochs=2, **first)
    engine.run(range(5), **({"max_epochs": 2} | then if "max_iters" not in then else then))
    assert seen == wanted


def test_nothing_beyond_the_limit_is_drawn():
    drawn: list[int] = []

    def numbers() -> Any:
        for number in range(100):
            drawn.append(number)
            yield number

    Engine(lambda engine, batch: None).run(lambda state: numbers(), max_epochs=2, limit_batches=3)
    Engine(lambda engine, batch: None).run(numbers(), limit_batches=2)
    assert drawn == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("is_length_known", [True, False])
def test_a_window_ends_with_the_limited_epoch(is_length_known):
    model = nn.Linear(1, 1, bias=False)

    def step(engine: Engine, batch: torch.Tensor) -> None:
        engine.backward(engine.model(batch).sum())
        engine.update()

    engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), gradient_accumulation_steps=2)
    with torch.no_grad():
        model.weight.zero_()
    batches = [torch.tensor([[float(n)]]) for n in (1, 3, 5, 7, 9)]
    engine.run(batches if is_length_known else lambda state: iter(batches), max_epochs=2, limit_batches=3)
    assert engine.state.updates == 4
    assert model.weight.item() == -2 * (2 + 5)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"limit_batches": 0}, "limit_batches must be a whole number of at least 1, got 0"),
        ({"limit_batches": 1.5}, "limit_batches must be a whole number of at least 1, got 1.5"),
        ({"limit_batches": 2, "epoch_length": 3}, "give epoch_length=3, .* or limit_batches=2"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    engine, _ = collecting()
    with pytest.raises(LimitError, match=message):
        engine.run(DataLoader(Samples(), BATCH), **limits)


def test_without_data_there_are_no_batches_to_limit():
    with pytest.raises(LimitError, match="run\\(\\) needs data"):
        Engine(lambda engine, batch: None).run(limit_batches=2)


def _on_a_rank(limit: int) -> tuple[list[int], list[int]]:
    trained: list[int] = []
    looked_at: list[int] = []
    evaluator = Engine(lambda engine, batch: looked_at.append(batch), mode="eval")
    trainer = Engine(lambda engine, batch: trained.append(batch))
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine, batch: evaluator.run(list(range(7)), limit_batches=limit)
    )
    trainer.run(list(range(10)), max_epochs=1, limit_batches=limit)
    return trained, looked_at


@pytest.mark.parametrize(("limit", "trained", "looked_at"), [
    (2, [[0, 2], [1, 3]], [[0, 2], [1, 3]]),
    (4, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 2, 4, 6], [1, 3, 5]]),
])  # fmt: skip
def test_on_ranks_each_takes_so_many(limit, trained, looked_at):
    assert run_on_ranks(_on_a_rank, 2, limit) == list(zip(trained, looked_at, strict=True))
