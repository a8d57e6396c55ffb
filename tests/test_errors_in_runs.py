"""Errors and Ctrl-C in runs: everybody is told once, the first error leaves, and the engine is usable afterwards."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from typing import ClassVar

import pytest
import torch
from ranks import RANK_OF_THE_POOL
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from traces import DATA_OF_THREE, make_engine, names_of, seen_by, trace_of

from pellucid.engine import DataError, Engine, Events, RunError

STEP = "the step"
PLACES = [STEP, *Events]


class Failure(Exception):
    """An error of the user's."""


def make_trainer(place, error):
    """An engine that fires every event there is; the ``error`` comes once, at ``place``."""
    model = nn.Linear(1, 1)
    left = [error]

    def raise_once():
        if left:
            raise left.pop()

    def step(engine, batch):
        engine.record({"half": 0.5})
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        if place == STEP:
            raise_once()

    engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    lead = {
        Events.TERMINATE_SINGLE_EPOCH: lambda engine: engine.terminate_epoch(),
        Events.TERMINATE: lambda engine: engine.terminate(),
        Events.INTERRUPT: lambda engine: engine.interrupt(),
        Events.EXCEPTION_RAISED: lambda engine: engine.fire_event("no such event"),
    }.get(place)
    if lead:
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: lead(engine))
    if place != STEP:
        engine.add_event_handler(place, lambda engine, batch: raise_once())
    return engine


def chain_of(error):
    """The error and those it is shown with, the way a traceback walks them."""
    chain = []
    while error is not None:
        assert error not in chain, "a ring"
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


# ---------------------------------------------------------------------- one error


@pytest.mark.parametrize("place", [place for place in PLACES if place is not Events.EXCEPTION_RAISED], ids=str)
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_run_after_every_handler_of_it_has_run_once(place, kind):
    error = kind("once")
    engine = make_trainer(place, error)
    told = []
    for name in ("first", "second"):
        engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch, n=name: told.append((n, engine.state.exception)))
    names = trace_of(engine)
    with pytest.raises(kind) as caught:
        engine.run(DATA_OF_THREE, max_epochs=2)
    assert caught.value is error
    assert told == [("first", error), ("second", error)]
    assert names_of(names).count("EXCEPTION_RAISED") == 1
    assert chain_of(error) == [error]
    assert names_of(names)[-1] == "EXCEPTION_RAISED"


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt])
def test_the_engine_is_usable_after_an_error(place, kind):
    engine = make_trainer(place, kind("once"))
    with pytest.raises((Failure, KeyboardInterrupt, ValueError)):
        engine.run(DATA_OF_THREE, max_epochs=2)
    state = engine.state
    assert (state.is_running, state.exception, state.output, state.depth) == (False, None, None, 0)
    assert state.stop_reason in ("failed", "interrupted")
    result = engine.run(DATA_OF_THREE, max_epochs=2)
    assert (result.stop_reason, result.epoch) == ("completed", 2)
    assert result.updates == result.iteration == (5 if place is Events.TERMINATE_SINGLE_EPOCH else 6)


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt])
def test_an_error_in_an_inner_run_leaves_both_runs_and_is_told_once_in_each(kind):
    error, told = kind("inner"), []
    evaluator, trainer = make_trainer(STEP, error), make_engine(name="outer")
    trainer.on(Events.ITERATION_COMPLETED)(lambda engine, batch: evaluator.run(DATA_OF_THREE))
    for engine in (evaluator, trainer):
        engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch: told.append((engine.name, engine.state.exception)))
    with pytest.raises(kind) as caught:
        trainer.run(DATA_OF_THREE)
    assert caught.value is error
    assert told == [("train", error), ("outer", error)]
    assert trainer.run(DATA_OF_THREE).iteration == 3


def test_an_error_of_an_inner_run_that_is_caught_is_none_of_the_outer_run():
    evaluator, trainer = make_trainer(STEP, Failure()), make_engine()
    trace = trace_of(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def look(engine, batch):
        with pytest.raises(Failure):
            evaluator.run(DATA_OF_THREE)

    assert trainer.run(DATA_OF_THREE).stop_reason == "completed"
    assert "EXCEPTION_RAISED" not in names_of(trace)


# ---------------------------------------------------------------------- more errors


def failing_handlers(engine, *errors):
    """Attach a handler of EXCEPTION_RAISED for each error, which raises it, and count those that ran."""
    ran = []
    for error in errors:

        @engine.on(Events.EXCEPTION_RAISED)
        def handler(engine, batch, error=error):
            ran.append(error)
            raise error

    return ran


def test_errors_of_the_handlers_of_an_error_are_chained_to_it_in_order():
    errors = [Failure("first"), ValueError("second"), KeyboardInterrupt("third")]
    engine = make_trainer(STEP, errors[0])
    ran = failing_handlers(engine, *errors[1:])
    with pytest.raises(Failure, match="first") as caught:
        engine.run(DATA_OF_THREE)
    assert ran == errors[1:]
    assert chain_of(caught.value) == errors
    text = "".join(traceback.format_exception(caught.value))
    assert [text.count(f"{word}\n") for word in ("first", "second", "third")] == [1, 1, 1]


def test_a_handler_that_raises_the_error_again_doubles_nothing():
    error = Failure("once")
    engine = make_trainer(STEP, error)

    @engine.on(Events.EXCEPTION_RAISED)
    def again(engine, batch):
        raise engine.state.exception

    with pytest.raises(Failure) as caught:
        engine.run(DATA_OF_THREE)
    assert (caught.value, chain_of(error)) == (error, [error])


def test_an_error_raised_from_the_first_or_while_another_was_handled_makes_no_ring():
    first, inner, second, third = Failure("first"), KeyError("inner"), ValueError("second"), TypeError("third")
    engine = make_trainer(STEP, first)

    @engine.on(Events.EXCEPTION_RAISED)
    def from_the_first(engine, batch):
        raise second from engine.state.exception

    @engine.on(Events.EXCEPTION_RAISED)
    def while_another_was_handled(engine, batch):
        try:
            raise inner
        except KeyError:
            raise third  # noqa: B904

    with pytest.raises(Failure) as caught:
        engine.run(DATA_OF_THREE)
    assert caught.value is first
    assert chain_of(first) == [first, second, third, inner]


def test_a_later_error_is_shown_also_where_the_first_hides_what_came_before_it():
    later = ValueError("later")
    hidden = []

    def step(engine, batch):
        try:
            raise KeyError("hidden")
        except KeyError as error:
            hidden.append(error)
            raise Failure("first") from None

    engine = make_engine(step)
    failing_handlers(engine, later)
    with pytest.raises(Failure) as caught:
        engine.run(DATA_OF_THREE)
    assert chain_of(caught.value) == [caught.value, later]


def test_the_cause_that_the_first_error_was_raised_from_stays():
    cause, first, later = KeyError("cause"), Failure("first"), ValueError("later")

    def step(engine, batch):
        raise first from cause

    engine = make_engine(step)
    failing_handlers(engine, later)
    with pytest.raises(Failure):
        engine.run(DATA_OF_THREE)
    assert (first.__cause__, chain_of(first)) == (cause, [first, cause, later])


def test_a_filter_of_an_error_handler_that_fails_is_chained_too():
    later = ValueError("filter")

    def fails(engine, count):
        raise later

    engine = make_trainer(STEP, Failure("first"))
    told = []
    engine.add_event_handler(Events.EXCEPTION_RAISED(event_filter=fails), lambda engine, batch: None)
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch: told.append(batch))
    with pytest.raises(Failure) as caught:
        engine.run(DATA_OF_THREE)
    assert (chain_of(caught.value)[1:], told) == ([later], ["a"])


# ---------------------------------------------------------------------- Ctrl-C (B31)


def test_a_real_ctrl_c_leaves_the_run_and_the_next_one_does_all_that_is_left():
    def step(engine, batch):
        if batch == "b" and not pressed:
            pressed.append(batch)
            signal.raise_signal(signal.SIGINT)

    pressed = []
    engine, seen = seen_by(step)
    trace = trace_of(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.run(DATA_OF_THREE)
    assert (engine.state.stop_reason, names_of(trace)[-1]) == ("interrupted", "EXCEPTION_RAISED")
    assert engine.run(DATA_OF_THREE).stop_reason == "completed"
    assert seen == DATA_OF_THREE


def test_a_second_ctrl_c_in_the_clean_up_leaves_too_after_the_other_handlers_have_cleaned_up():
    engine = make_trainer(STEP, KeyboardInterrupt("first"))
    cleaned = []
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch: signal.raise_signal(signal.SIGINT))
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch: cleaned.append(batch))
    with pytest.raises(KeyboardInterrupt, match="first") as caught:
        engine.run(DATA_OF_THREE)
    assert [type(error) for error in chain_of(caught.value)] == [KeyboardInterrupt, KeyboardInterrupt]
    assert (cleaned, engine.state.is_running) == (["a"], False)
    assert engine.run(DATA_OF_THREE).iteration == 3


def test_a_ctrl_c_while_worker_processes_are_ended_leaves_a_usable_engine():
    class Iterator:
        def __init__(self):
            self.batches = iter(DATA_OF_THREE)

        def __next__(self):
            return next(self.batches)

        def __iter__(self):
            return self

        def _shutdown_workers(self):
            raise KeyboardInterrupt

    class Data:
        def __iter__(self):
            return Iterator()

    engine = make_trainer(STEP, Failure("first"))
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.run(Data())
    assert isinstance(caught.value.__context__, Failure)
    assert not engine.state.is_running
    assert engine.run(DATA_OF_THREE).iteration == 3


def children():  # but those of the pool, which other tests have started
    return [one for one in multiprocessing.active_children() if one.name != RANK_OF_THE_POOL]


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("place", [STEP, Events.GET_BATCH_COMPLETED, Events.ITERATION_COMPLETED], ids=str)
def test_no_worker_process_is_left_also_while_the_error_is_held(place, kind):
    engine = make_trainer(place, kind("once"))
    data = DataLoader(range(6), batch_size=2, num_workers=2)
    with pytest.raises(kind) as held:
        engine.run(data)
    assert children() == []
    engine.run(data)
    assert (engine.state.iteration, children(), held.value.__traceback__ is not None) == (3, [], True)


@pytest.mark.parametrize("verb", ["terminate", "interrupt", "terminate_epoch"])
def test_no_worker_process_is_left_after_a_stop(verb):
    engine = make_engine()
    engine.on(Events.ITERATION_COMPLETED(once=1))(lambda engine, batch: getattr(engine, verb)())
    engine.run(DataLoader(range(6), batch_size=2, num_workers=2))
    assert children() == []


# ---------------------------------------------------------------------- StopIteration


def take_from_nothing(*_):
    return next(iter(()))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_stop_iteration_out_of_a_step_or_a_handler_is_an_error(place):
    engine = make_trainer(place, StopIteration("bare next"))
    told = []
    engine.on(Events.EXCEPTION_RAISED)(lambda engine, batch: told.append(engine.state.exception))
    if place is Events.EXCEPTION_RAISED:
        with pytest.raises(ValueError, match="no such event") as caught:
            engine.run(DATA_OF_THREE, max_epochs=2)
        assert isinstance(chain_of(caught.value)[-1], StopIteration)
        return
    with pytest.raises(RunError, match="StopIteration came out of a step, a handler") as caught:
        engine.run(DATA_OF_THREE, max_epochs=2)
    assert told == [caught.value]
    assert isinstance(caught.value.__cause__, StopIteration)
    assert engine.state.stop_reason == "failed"


def test_stop_iteration_out_of_a_filter_or_a_callable_for_the_data_is_an_error():
    engine = make_engine()
    filtered = Events.ITERATION_STARTED(event_filter=take_from_nothing)
    with engine.add_event_handler(filtered, lambda engine, batch: None), pytest.raises(RunError, match="StopIteration"):
        engine.run(DATA_OF_THREE)
    with pytest.raises(RunError, match="StopIteration"):
        engine.run(take_from_nothing)


def test_stop_iteration_inside_a_generator_of_the_data_is_an_error_and_no_end():
    def batches():
        yield "a"
        yield take_from_nothing()

    engine, seen = seen_by()
    with pytest.raises(RunError, match="or the data's own code"):
        engine.run(batches())
    assert (seen, engine.state.stop_reason) == (["a"], "failed")


def test_an_error_that_a_user_raises_from_a_stop_iteration_leaves_as_it_is():
    def step(engine, batch):
        try:
            take_from_nothing()
        except StopIteration as stop:
            raise RuntimeError("the stream is gone") from stop

    with pytest.raises(RuntimeError, match="the stream is gone") as caught:
        make_engine(step).run(DATA_OF_THREE)
    assert type(caught.value) is RuntimeError


# ---------------------------------------------------------------------- errors in the data


class Broken(Dataset):
    """Six samples, of which those in ``broken`` cannot be read."""

    broken: ClassVar = {2}

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError(f"sample {index}")
        return index


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OSError])
def test_an_error_in_the_data_leaves_and_going_on_tries_that_batch_again(workers, kind, monkeypatch):
    engine, seen = seen_by()
    trace = trace_of(engine)
    data = DataLoader(Broken(), batch_size=2, num_workers=workers)
    for _ in range(2):
        with pytest.raises(kind, match="sample 2"):
            engine.run(data)
        assert trace[-1] == "EXCEPTION_RAISED:1/1"
        assert (engine.state.iteration, children()) == (1, [])
    monkeypatch.setattr(Broken, "broken", set())
    engine.run(data)
    assert [batch.tolist() for batch in seen] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, TypeError])
def test_an_error_in_iter_itself_leaves_with_the_epoch_open(kind):
    class Data(IterableDataset):
        def __iter__(self):
            if broken:
                raise broken.pop()
            return iter(DATA_OF_THREE)

    broken = [kind("cannot be opened")]
    engine, seen = seen_by()
    trace = trace_of(engine)
    with pytest.raises(kind, match="cannot be opened"):
        engine.run(Data())
    assert (engine.state.epoch, engine.state.iteration) == (1, 0)
    engine.run(Data())
    assert (seen, names_of(trace).count("EPOCH_STARTED")) == (DATA_OF_THREE, 1)


def test_an_error_in_a_callable_for_the_data_leaves_the_engine_where_it_was():
    engine, seen = seen_by()
    engine.run(DATA_OF_THREE, max_iters=2)

    def no_data(state):
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        engine.run(no_data, max_epochs=2)
    engine.run(lambda state: DATA_OF_THREE, max_epochs=2)
    assert seen == DATA_OF_THREE * 2


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_generator_that_an_error_has_ended_does_not_pass_for_the_end_of_the_data(kind):
    def batches():
        yield "a"
        yield "b"
        raise kind("gone")

    engine, seen = seen_by()
    data = batches()
    with pytest.raises(kind, match="gone"):
        engine.run(data)
    for _ in range(2):
        with pytest.raises(DataError, match=r"this generator was ended by .*gone.* go on with a new one"):
            engine.run(data)
    engine.run(iter(DATA_OF_THREE))
    assert (seen, engine.state.epoch) == (DATA_OF_THREE, 1)


def test_an_error_in_moving_a_batch_leaves_and_the_batch_comes_again():
    class Batch:
        def to(self, *args, **kwargs):
            if broken:
                raise broken.pop()
            return self

    broken = [Failure("out of memory")]
    engine, seen = seen_by()
    batches = [Batch()]
    with pytest.raises(Failure, match="out of memory"):
        engine.run(batches)
    engine.run(batches)
    assert seen == batches


# ---------------------------------------------------------------------- started inside itself (B08)


@pytest.mark.parametrize("place", PLACES[:6], ids=str)
def test_an_engine_started_inside_itself_is_refused_and_the_run_around_it_goes_on(place):
    def start(engine, batch):
        with pytest.raises(RunError, match=r"engine 'mine' is running already .* nothing was changed\. engine\.fork"):
            engine.run(["x", "y"], max_epochs=5)
        refused.append(engine.state.iteration)

    refused = []
    engine, seen = seen_by(start if place == STEP else lambda engine, batch: None, name="mine")
    trace = trace_of(engine)
    if place != STEP:
        engine.add_event_handler(place, start)
    result = engine.run(DATA_OF_THREE, max_epochs=2)
    assert (seen, result.iteration, result.stop_reason, result.max_epochs) == (DATA_OF_THREE * 2, 6, "completed", 2)
    assert refused
    assert names_of(trace).count("STARTED") == 1


def test_an_engine_started_inside_itself_through_another_is_refused():
    trainer, evaluator = make_engine(name="mine"), make_engine(mode="eval")
    evaluator.on(Events.STARTED)(lambda engine, batch: trainer.run(DATA_OF_THREE))
    trainer.on(Events.EPOCH_COMPLETED)(lambda engine, batch: evaluator.run(DATA_OF_THREE))
    with pytest.raises(RunError, match="engine 'mine' is running already"):
        trainer.run(DATA_OF_THREE)
    assert not trainer.state.is_running
    assert not evaluator.state.is_running


def test_a_refusal_that_nobody_catches_leaves_the_run_as_any_error_does():
    engine, seen = seen_by(name="mine")
    with engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: engine.run(["x"])):
        with pytest.raises(RunError, match="engine 'mine' is running already"):
            engine.run(DATA_OF_THREE)
        assert (engine.state.iteration, engine.state.stop_reason) == (2, "failed")
    engine.run(DATA_OF_THREE)
    assert seen == DATA_OF_THREE


def test_an_iterator_that_the_outer_run_consumes_is_refused_to_an_inner_one():
    trainer, seen = seen_by()
    evaluator = make_engine(mode="eval")
    batches = iter(DATA_OF_THREE)

    @trainer.on(Events.ITERATION_COMPLETED(once=1))
    def look(engine, batch):
        with pytest.raises(DataError, match="is being consumed by the run around this one"):
            evaluator.run(batches)

    trainer.run(batches)
    assert seen == DATA_OF_THREE
