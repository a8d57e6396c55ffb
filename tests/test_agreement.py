"""Stops on ranks: whichever rank asks, all stop at one iteration; ranks that come apart, or fail, end in seconds."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch.distributed as dist
from parallel import Case, equal_to_the_bit, make_loader, make_net, make_optimizer, train_step
from ranks import RankError, run_on_ranks

from pellucid.engine import Engine, Events, already_sharded
from pellucid.engine.strategies import Peers
from pellucid.handlers import EarlyStopping

ASK_IN = {
    "STARTED": (Events.STARTED, 0, 0),
    "EPOCH_STARTED": (Events.EPOCH_STARTED(once=2), 4, 2),
    "GET_BATCH_STARTED": (Events.GET_BATCH_STARTED(once=2), 3, 1),
    "ITERATION_STARTED": (Events.ITERATION_STARTED(once=2), 3, 1),
    "ITERATION_COMPLETED": (Events.ITERATION_COMPLETED(once=2), 3, 1),
    "the last iteration": (Events.ITERATION_COMPLETED(once=4), 4, 1),
    "UPDATE_COMPLETED": (Events.UPDATE_COMPLETED(once=2), 3, 1),
    "EPOCH_COMPLETED": (Events.EPOCH_COMPLETED(once=1), 4, 1),
}


def _engine(**options: Any) -> Engine:
    net = make_net()
    return Engine(train_step(Case()), net, optimizer=make_optimizer(net), **options)


def _outcome(engine: Engine) -> dict[str, Any]:
    state = engine.state
    names = ("epoch", "iteration", "updates", "stop_reason")
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    return {name: getattr(state, name) for name in names} | {"weights": weights}


def _ask(where: str, verb: str, on_rank: int) -> Any:
    engine = _engine()
    event = ASK_IN[where][0]

    @engine.on(event)
    def ask(engine: Engine, batch: Any) -> None:
        if engine.state.rank == on_rank:
            getattr(engine, verb)()

    engine.run(make_loader(24), max_epochs=3)
    stopped = _outcome(engine)
    engine.remove_event_handler(ask, event)
    engine.run(make_loader(24), max_epochs=3)
    return stopped, _outcome(engine)


@pytest.mark.parametrize("where", ASK_IN)
@pytest.mark.parametrize("on_rank", [0, 1])
def test_what_one_rank_asks_for_takes_effect_on_all_at_one_iteration(where, on_rank):
    _, iteration, epoch = ASK_IN[where]
    (first, first_end), (second, second_end) = run_on_ranks(_ask, 2, where, "terminate", on_rank)
    assert [(one["iteration"], one["epoch"], one["stop_reason"]) for one in (first, second)] == [
        (iteration, epoch, "terminated")
    ] * 2
    assert equal_to_the_bit(first["weights"], second["weights"])
    # and the next run goes on to where a run that was never stopped ends
    assert first_end["iteration"] == second_end["iteration"] == 12
    undisturbed = run_on_ranks(_undisturbed, 2)[0]
    assert equal_to_the_bit(first_end["weights"], undisturbed["weights"])


def _undisturbed() -> Any:
    engine = _engine()
    engine.run(make_loader(24), max_epochs=3)
    return _outcome(engine)


@pytest.mark.parametrize(
    ("verb", "iterations", "reason"), [("terminate_epoch", 11, "completed"), ("interrupt", 3, "interrupted")]
)
def test_every_stopping_verb_is_agreed_on(verb, iterations, reason):
    for stopped, _ in run_on_ranks(_ask, 2, "ITERATION_COMPLETED", verb, 1):
        assert (stopped["iteration"], stopped["stop_reason"]) == (iterations, reason)


def _early_stopping() -> Any:
    engine = _engine()
    scores = {0: [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 1: [1.0, 1.0, 1.0, 0.7, 0.6, 0.5]}[dist.get_rank()]

    @engine.on(Events.EPOCH_COMPLETED)
    def record(engine: Engine, batch: Any) -> None:
        engine.record({"score": scores[engine.state.epoch - 1]})

    EarlyStopping("score", mode="min", patience=2).attach(engine)
    engine.run(make_loader(24), max_epochs=6)
    return engine.state.epoch, engine.state.stop_reason


def test_early_stopping_on_one_rank_stops_all():
    assert run_on_ranks(_early_stopping, 2) == [(3, "terminated")] * 2


def _ask_at(iteration: int, pause_sec: float) -> Any:
    engine = _engine()

    @engine.on(Events.ITERATION_COMPLETED)
    def ask(engine: Engine, batch: Any) -> None:
        time.sleep(pause_sec)
        if engine.state.iteration == iteration and engine.state.rank == 1:
            engine.terminate()

    engine.run(make_loader(6 * 30), max_epochs=2)
    return _outcome(engine)


@pytest.mark.parametrize(
    ("iteration", "pause_sec", "earliest", "latest"),
    [(10, 0.0, 11, 11), (20, 0.0, 21, 37), (20, 0.025, 21, 21), (50, 0.0, 51, 60)],
)
def test_a_fast_run_hears_of_a_stop_within_sixteen_iterations_and_a_slow_one_at_the_next(
    iteration, pause_sec, earliest, latest
):
    first, second = run_on_ranks(_ask_at, 2, iteration, pause_sec)
    assert first["iteration"] == second["iteration"]
    assert earliest <= first["iteration"] <= latest
    assert first["stop_reason"] == second["stop_reason"] == "terminated"
    assert equal_to_the_bit(first["weights"], second["weights"])


# ---------------------------------------------------------------------- data that ends at different lengths


def _uneven(batches: tuple[int, ...], steps: int, unknown: bool) -> Any:
    net = make_net()
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net), gradient_accumulation_steps=steps)
    mine = list(make_loader(24))[: batches[dist.get_rank()]]
    data = already_sharded(_Stream(mine) if unknown else mine)
    engine.run(data, max_epochs=2)
    return _outcome(engine)


class _Stream:
    """Does not say how long it is."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("batches", [(5, 4), (4, 5), (2, 7)])
def test_uneven_training_data_ends_together(batches, steps, unknown):
    first, second = run_on_ranks(_uneven, 2, batches, steps, unknown)
    assert first["iteration"] == second["iteration"] == 2 * min(batches)
    assert first["updates"] == second["updates"] == 2 * -(-min(batches) // steps)
    assert equal_to_the_bit(first["weights"], second["weights"])


# ---------------------------------------------------------------------- ranks that come apart, and errors


def _runs_alone() -> Any:
    engine = _engine()
    evaluator = Engine(lambda engine, batch: engine.model(batch[0]), engine.model, mode="eval")

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def look(_: Engine, batch: Any) -> None:
        if dist.get_rank() == 0:
            evaluator.run(make_loader(6))

    engine.run(make_loader(24))


def test_an_evaluation_of_one_rank_that_is_not_declared_so_is_an_error_and_no_hang():
    with pytest.raises(RankError, match=r'ranks have come apart.*strategy="single"') as error:
        run_on_ranks(_runs_alone, 2, timeout_sec=40)
    assert error.value.kind == "StrategyError"


def _skips_an_update(at: int, strategy: str, everywhere: bool) -> int:
    net = make_net()
    train = train_step(Case())

    def step(engine: Engine, batch: Any) -> Any:
        if not ((everywhere or dist.get_rank() == 1) and engine.state.iteration == at):
            return train(engine, batch)

    engine = Engine(step, net, optimizer=make_optimizer(net), strategy=strategy)
    assert engine.strategy.peers is not None
    engine.strategy.peers._tell_after_sec = 1.0  # of which 30 would be waited for
    return engine.run(make_loader(48)).updates


@pytest.mark.parametrize(
    ("at", "strategy", "says"),
    [
        (4, "ddp", r"the ranks have come apart.*make an update where the others do"),
        (8, "ddp", r"rank 1 made no update in its last batch, and has waited 1 s at .* multiply its loss by 0"),
        (4, "fsdp", r"rank 1 made no update in its last batch, and has waited 1 s at .* multiply its loss by 0"),
    ],
)
def test_a_rank_that_leaves_an_update_out_is_an_error_and_no_hang(at, strategy, says):
    with pytest.raises(RankError, match=says) as error:
        run_on_ranks(_skips_an_update, 2, at, strategy, False, timeout_sec=40)
    assert error.value.kind == "StrategyError"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_may_leave_an_update_out(strategy):
    assert run_on_ranks(_skips_an_update, 2, 8, strategy, True, timeout_sec=40) == [7, 7]


def _meet(late: bool) -> list[str]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pellucid.engine")
    logger.addHandler(handler)
    peers = Peers(tell_after_sec=0.4)
    try:
        if late and dist.get_rank() == 1:
            time.sleep(1.0)
        peers.barrier("the start of a run")
    finally:
        logger.removeHandler(handler)
    return told


@pytest.mark.parametrize("late", [False, True])
def test_who_waits_long_for_another_rank_is_told_what_may_be_wrong(late):
    first, second = run_on_ranks(_meet, 2, late)
    assert second == [] and len(first) == late
    if late:
        assert "rank 0 has waited 0.4 s at the start of a run" in first[0] and 'strategy="single"' in first[0]


def _fails(where: str) -> Any:
    engine = _engine()

    def fail(engine: Engine, batch: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("the data of rank 1 is broken")

    engine.add_event_handler(getattr(Events, where), fail)
    started = time.monotonic()
    try:
        engine.run(make_loader(24), max_epochs=2)
    except ValueError:
        if not engine.state.stop_reason == "failed":
            raise AssertionError("not marked as failed") from None
        if time.monotonic() - started > 10:
            raise AssertionError("the clean-up took too long") from None
        raise


@pytest.mark.parametrize("where", ["STARTED", "ITERATION_STARTED", "BACKWARD_COMPLETED", "EPOCH_COMPLETED"])
def test_an_error_on_one_rank_leaves_that_rank_at_once_and_ends_the_others(where):
    with pytest.raises(RankError, match="the data of rank 1 is broken") as error:
        run_on_ranks(_fails, 2, where, timeout_sec=40)
    assert error.value.rank == 1 and error.value.kind == "ValueError"


# ---------------------------------------------------------------------- cost


def _counts_waits() -> int:
    """How often the host asked the others and waited, in ten iterations of known length."""
    engine = _engine()
    peers = engine.strategy.peers
    assert peers is not None
    waits = 0
    largest = type(peers).largest

    def counted(self: Any, *args: Any) -> Any:
        nonlocal waits
        waits += 1
        return largest(self, *args)

    type(peers).largest = counted  # type: ignore[method-assign]
    try:

        @engine.on(Events.ITERATION_COMPLETED(every=1))
        def look(engine: Engine, batch: Any) -> None:
            nonlocal waits
            if engine.state.iteration in (1, 9):
                seen.append(waits)

        seen: list[int] = []
        engine.run(make_loader(60))
    finally:
        type(peers).largest = largest  # type: ignore[method-assign]
    return seen[1] - seen[0]


def test_inside_an_epoch_no_rank_waits_for_the_others_to_agree():
    assert run_on_ranks(_counts_waits, 2) == [0, 0]
