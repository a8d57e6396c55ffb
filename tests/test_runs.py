"""Runs: how far they go, what an epoch is, data of every kind, and engines that are saved, loaded and reset."""

from __future__ import annotations

import io
import logging
import math
import re

import numpy
import pytest
import torch
from ignite.metrics import Average
from torch import nn
from torch.utils.data import DataLoader
from traces import DATA_OF_THREE, Stated, make_engine, names_of, seen_by, trace_of

from pellucid.engine import CheckpointError, DataError, Engine, Events, LimitError, RunError


def counters(state):
    return state.epoch, state.iteration, state.epoch_iteration


def saved_and_loaded(engine, fresh):
    """Put the state of ``engine`` into ``fresh``, through a file that a weights-only loader reads."""
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["max_epochs", "max_iters", "epoch_length"])
@pytest.mark.parametrize(
    "value",
    [0, -1, 1.5, 2.0, True, False, "3", math.nan, math.inf, [1], numpy.float64(2), numpy.array(2.5), torch.tensor(2.5)],
)
def test_a_limit_that_is_no_positive_whole_number_is_refused(name, value):
    engine = make_engine()
    trace = trace_of(engine)
    message = f"{name} must be a whole number of at least 1, got {value!r}"
    with pytest.raises(LimitError, match=re.escape(message)):
        engine.run(DATA_OF_THREE, **{name: value})
    assert (trace, counters(engine.state), engine.state.stop_reason) == ([], (0, 0, 0), None)


@pytest.mark.parametrize("value", [numpy.int64(2), torch.tensor(2)])
def test_whole_numbers_of_other_kinds_are_limits_too(value):
    assert make_engine().run(DATA_OF_THREE, max_epochs=value).max_epochs == 2
    assert make_engine().run(DATA_OF_THREE, max_iters=value).iteration == 2
    assert make_engine().run(DATA_OF_THREE, epoch_length=value).iteration == 2


def test_two_limits_at_once_are_refused():
    with pytest.raises(LimitError, match="give max_epochs=2 or max_iters=3, not both"):
        make_engine().run(DATA_OF_THREE, max_epochs=2, max_iters=3)


@pytest.mark.parametrize(
    ("done", "asked", "message"),
    [
        ({"max_epochs": 3}, {"max_epochs": 2}, r"max_epochs=2 is below what is done already \(3\)"),
        ({"max_epochs": 3}, {"max_iters": 8}, r"max_iters=8 is below what is done already \(9\)"),
        ({"max_iters": 5}, {"max_epochs": 1}, r"max_epochs=1 is below what is done already \(2\)"),
        ({"max_iters": 5}, {"epoch_length": 1}, "epoch_length=1 is below the 2 batches done in the present epoch"),
    ],
)
def test_a_limit_below_what_is_done_is_refused_and_changes_nothing(done, asked, message):
    engine, seen = seen_by()
    engine.run(DATA_OF_THREE, **done)
    before = (counters(engine.state), engine.state.max_epochs, engine.state.max_iters, list(seen))
    with pytest.raises(LimitError, match=message):
        engine.run(DATA_OF_THREE, **asked)
    assert (counters(engine.state), engine.state.max_epochs, engine.state.max_iters, seen) == before
    assert engine.run(DATA_OF_THREE, max_epochs=4).iteration == 12


def test_the_open_epoch_may_be_the_last():
    engine, seen = seen_by()
    engine.run(DATA_OF_THREE, max_iters=5)
    assert engine.run(DATA_OF_THREE, max_epochs=2).iteration == 6
    assert seen == DATA_OF_THREE * 2


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 6}, {}])
def test_at_the_limit_already_a_run_makes_no_step_fires_no_event_and_says_so(limit, caplog):
    engine, seen = seen_by(name="mine")
    engine.run(DATA_OF_THREE, max_epochs=2)
    trace, before = trace_of(engine), list(seen)
    with caplog.at_level(logging.WARNING, logger="pellucid.engine"):
        result = engine.run(DATA_OF_THREE, **limit)
    assert (trace, seen, result.iteration, result.stop_reason) == ([], before, 6, "completed")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("pellucid.engine", "WARNING")
    assert "engine 'mine' is at its limit already (epoch 2, iteration 6): no step was made. Give" in record.message


def test_a_run_that_finds_nothing_left_has_completed_whatever_stopped_the_one_before():
    engine = make_engine()
    engine.on(Events.EPOCH_COMPLETED)(lambda engine, batch: engine.terminate())
    assert engine.run(DATA_OF_THREE).stop_reason == "terminated"
    assert engine.run(DATA_OF_THREE).stop_reason == "completed"


def test_without_a_limit_a_run_makes_one_epoch_and_later_ones_keep_the_limit_given_before():
    assert make_engine().run(DATA_OF_THREE).epoch == 1
    engine, seen = seen_by()
    engine.on(Events.ITERATION_COMPLETED(once=4))(lambda engine, batch: engine.terminate())
    engine.run(DATA_OF_THREE, max_epochs=3)
    assert (len(seen), engine.run(DATA_OF_THREE).epoch, len(seen)) == (4, 3, 9)


# ---------------------------------------------------------------------- accumulating


def test_training_goes_on_to_the_new_limit():
    engine, seen = seen_by()
    trace = trace_of(engine)
    assert engine.run(DATA_OF_THREE, max_epochs=2).iteration == 6
    second = len(trace)
    assert engine.run(DATA_OF_THREE, max_epochs=4).iteration == 12
    assert seen == DATA_OF_THREE * 4
    assert trace[second : second + 2] == ["STARTED:2/6", "EPOCH_STARTED:3/6"]


def test_max_iters_goes_on_in_the_middle_of_an_epoch():
    engine, seen = seen_by()
    trace = trace_of(engine)
    ends = [engine.run(DATA_OF_THREE, max_iters=limit).iteration for limit in (2, 3, 7)]
    assert (ends, seen) == ([2, 3, 7], [*DATA_OF_THREE * 2, "a"])
    assert [one for one in trace if one.startswith("EPOCH_")] == [
        "EPOCH_STARTED:1/0",
        "EPOCH_COMPLETED:1/3",
        "EPOCH_STARTED:2/3",
        "EPOCH_COMPLETED:2/6",
        "EPOCH_STARTED:3/6",
    ]


def test_an_evaluation_starts_afresh_at_each_run():
    engine = Engine(lambda engine, batch: batch, mode="eval", metrics={"mean": Average()})
    first = engine.run([1.0, 2.0], max_epochs=2)
    second = engine.run([5.0])
    assert (first.epoch, first.iteration, first.metrics["mean"]) == (2, 4, 1.5)
    assert (second.epoch, second.iteration, second.metrics["mean"]) == (1, 1, 5.0)


def test_reset_starts_afresh():
    engine, seen = seen_by(state={"best": 0.0})
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch: engine.record({"loss": 1.0}))
    engine.on(Events.COMPLETED)(lambda engine, batch: setattr(engine.state, "best", 1.0))
    for _ in range(2):
        engine.run(DATA_OF_THREE, max_iters=2)
        assert (engine.state.best, dict(engine.state.metrics)) == (1.0, {"loss": 1.0})
        engine.reset()
        assert (counters(engine.state), engine.state.best, dict(engine.state.metrics)) == ((0, 0, 0), 0.0, {})
        assert (engine.state.max_iters, engine.state.stop_reason, engine.state.last_record) == (None, None, None)
    engine.run(DATA_OF_THREE)
    assert seen == ["a", "b", "a", "b", *DATA_OF_THREE]


def test_reset_and_load_state_dict_are_refused_in_a_run():
    engine = make_engine(name="mine")
    saved = engine.state_dict()
    refused = []

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def change(engine, batch):
        for verb in (engine.reset, lambda: engine.load_state_dict(saved)):
            with pytest.raises(RunError, match="engine 'mine' is running"):
                verb()
            refused.append(verb)

    assert (engine.run(DATA_OF_THREE).iteration, len(refused)) == (3, 2)


# ---------------------------------------------------------------------- resuming (B20)


def finished():
    engine = make_engine()
    engine.run(DATA_OF_THREE, max_epochs=2)
    return engine


def test_a_finished_run_that_is_loaded_goes_on_with_the_next_epoch():
    engine, seen = seen_by()
    iterations = []
    saved_and_loaded(finished(), engine)
    engine.on(Events.ITERATION_COMPLETED)(lambda engine, batch: iterations.append(engine.state.iteration))
    engine.run(DATA_OF_THREE, max_epochs=4)
    assert (iterations, seen) == ([7, 8, 9, 10, 11, 12], DATA_OF_THREE * 2)


def test_a_finished_run_that_is_loaded_does_nothing_with_the_same_limit(caplog):
    engine, seen = seen_by()
    saved_and_loaded(finished(), engine)
    assert (engine.run(DATA_OF_THREE, max_epochs=2).iteration, seen) == (6, [])
    assert engine.run(DATA_OF_THREE).iteration == 6
    assert "at its limit already" in caplog.text


def test_a_finished_run_that_is_loaded_refuses_a_lower_limit():
    engine = saved_and_loaded(finished(), make_engine())
    with pytest.raises(LimitError, match=r"max_epochs=1 is below what is done already \(2\).*engine\.reset\(\)"):
        engine.run(DATA_OF_THREE, max_epochs=1)


# ---------------------------------------------------------------------- lengths (B29)


@pytest.mark.parametrize("stated", [10, 4, None])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_epoch_is_all_the_data_whatever_length_it_states(stated, mode):
    engine, seen = seen_by(mode=mode)
    ends = []
    engine.on(Events.EPOCH_COMPLETED)(lambda engine, batch: ends.append(engine.state.iteration))
    engine.run(Stated(stated, 6), max_epochs=2)
    assert (seen, ends) == ([*range(6), *range(6)], [6, 12])


@pytest.mark.parametrize("stated", [4, None])
def test_each_epoch_has_its_own_length(stated):
    engine, seen = seen_by()
    ends = []
    engine.on(Events.EPOCH_COMPLETED)(lambda engine, batch: ends.append(engine.state.epoch_iteration))
    engine.run(Stated(stated, 3, 5, 2), max_epochs=3)
    assert (seen, ends) == ([*range(3), *range(5), *range(2)], [3, 5, 2])


@pytest.mark.parametrize("stated", [10, 6, 4, 2, None])
@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_iters": 12}])
def test_a_stop_in_the_first_epoch_and_then_on(stated, limit):
    engine, seen = seen_by()
    trace = trace_of(engine)
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch: engine.terminate())
    engine.run(Stated(stated, 6), **limit)
    engine.run(Stated(stated, 6), **limit)
    assert seen == [*range(6), *range(6)]
    assert names_of(trace).count("EPOCH_STARTED") == 2


@pytest.mark.parametrize("stated", [10, 4, None])
def test_max_iters_at_a_length_that_is_only_stated_loses_no_batch(stated):
    for data in (lambda: Stated(stated, 6), lambda: iter(range(6))):
        engine, seen = seen_by()
        once = data()
        for limit in (4, 6):
            engine.run(once if hasattr(once, "__next__") else data(), max_iters=limit)
        assert seen == [*range(6)]


def test_the_hint_is_the_stated_length_and_then_the_length_of_the_last_epoch():
    hints = []
    engine = make_engine()
    engine.on(Events.EPOCH_STARTED)(lambda engine, batch: hints.append(engine.state.epoch_length))
    engine.run(Stated(10, 6), max_epochs=2)
    engine.reset()
    engine.run(lambda state: range(4), max_epochs=2)
    engine.reset()
    engine.run(range(4), max_epochs=2, epoch_length=3)
    assert hints == [10, 6, None, 4, 3, 3]


def test_an_epoch_length_makes_one_stream_of_the_data():
    engine, seen = seen_by()
    engine.run(range(5), max_epochs=3, epoch_length=3)
    engine.run(range(5), max_epochs=4)
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_an_epoch_length_given_later_counts_for_the_epochs_to_come():
    engine, seen = seen_by()
    engine.run(range(5), max_epochs=2)
    result = engine.run(range(5), max_epochs=4, epoch_length=2)
    assert (result.epoch, result.iteration, seen[10:]) == (4, 14, [0, 1, 2, 3])


def test_no_data_needs_an_epoch_length():
    with pytest.raises(LimitError, match=r"run\(\) needs data, or epoch_length"):
        make_engine().run(max_epochs=2)
    engine, seen = seen_by()
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch: engine.terminate())
    engine.run(max_epochs=2, epoch_length=3)
    assert engine.run().iteration == 6
    assert seen == [None] * 6


# ---------------------------------------------------------------------- empty data (B30)


class Nothing:
    """Iterable, without a length, and empty."""

    def __iter__(self):
        return iter(())


SMALL = [torch.zeros(1), torch.zeros(1)]
EMPTY = {
    "a list": (lambda: [], "list is empty"),
    "drop_last": (lambda: DataLoader(SMALL, batch_size=4, drop_last=True), "2 samples are fewer than batch_size=4"),
    "no samples": (lambda: DataLoader([], batch_size=4), "DataLoader is empty"),
    "a generator": (lambda: (batch for batch in ()), "an iterator can be gone through once"),
    "no length": (Nothing, "Nothing is empty"),
    "a callable": (lambda: lambda state: [], "list is empty"),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", EMPTY)
def test_empty_data_is_an_error_that_says_why(kind, mode):
    make_data, reason = EMPTY[kind]
    engine = make_engine(mode=mode)
    with pytest.raises(DataError, match=f"the data gave no batch: .*{reason}"):
        engine.run(make_data())
    assert (counters(engine.state), engine.state.is_running) == ((0, 0, 0), False)
    assert engine.run(DATA_OF_THREE).iteration == 3


@pytest.mark.parametrize("kind", EMPTY)
def test_a_training_stands_where_it_stood_after_empty_data(kind):
    engine, seen = seen_by()
    engine.run(DATA_OF_THREE, max_iters=5)
    before = counters(engine.state)
    with pytest.raises(DataError, match=r"the data gave no batch|data given to go on with has only 0"):
        engine.run(EMPTY[kind][0](), max_epochs=3)
    assert counters(engine.state) == before
    engine.run(DATA_OF_THREE, max_epochs=3)
    assert seen == DATA_OF_THREE * 3


@pytest.mark.parametrize("kind", EMPTY)
def test_an_evaluation_of_nothing_shows_no_metric_that_it_might_be_taken_for(kind):
    engine = Engine(lambda engine, batch: batch, mode="eval", metrics={"mean": Average()})
    engine.run([1.0])
    with pytest.raises(DataError):
        engine.run(EMPTY[kind][0]())
    assert dict(engine.state.metrics) in ({}, {"mean": 1.0})
    assert engine.run([3.0]).metrics["mean"] == 3.0


@pytest.mark.parametrize("make_data", [lambda: Stated(None, 3, 0), lambda: Stated(3, 3, 0), lambda: iter(range(3))])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_data_that_is_empty_from_the_second_epoch_on_is_an_error_and_the_epoch_is_not_counted(make_data, mode):
    engine, seen = seen_by(mode=mode)
    trace = trace_of(engine)
    with pytest.raises(DataError, match="the data gave no batch"):
        engine.run(make_data(), max_epochs=2)
    assert (counters(engine.state)[:2], engine.state.stop_reason) == ((1, 3), "failed")
    assert [one for one in trace if "EPOCH_" in one] == [
        "EPOCH_STARTED:1/0",
        "EPOCH_COMPLETED:1/3",
        "EPOCH_STARTED:2/3",
    ]
    if mode == "train":
        engine.run(range(3), max_epochs=2)
        assert seen == [*range(3), *range(3)]


def test_an_iterator_that_runs_dry_before_the_epoch_length_is_an_error():
    engine, seen = seen_by()
    with pytest.raises(DataError, match="an iterator can be gone through once, and this one is at its end"):
        engine.run(iter(range(5)), max_epochs=3, epoch_length=4)
    assert (seen, counters(engine.state)) == ([*range(5)], (2, 5, 1))
    engine.run(iter(range(50, 60)), max_epochs=2)
    assert (seen[5:], counters(engine.state)) == ([50, 51, 52], (2, 8, 4))


# ---------------------------------------------------------------------- kinds of data


@pytest.mark.parametrize("data", [7, 0.5, object()])
def test_data_that_cannot_be_iterated_is_refused(data):
    with pytest.raises(DataError, match="data must be an iterable of batches or a callable state -> iterable, got"):
        make_engine().run(data)


def test_what_a_callable_returns_is_looked_at_too():
    engine = make_engine()
    with pytest.raises(DataError, match="data must be an iterable of batches"):
        engine.run(lambda state: 7)
    assert (counters(engine.state), engine.state.stop_reason) == ((1, 0, 0), "failed")
    assert engine.run(DATA_OF_THREE).iteration == 3


def test_a_callable_is_asked_at_the_start_of_each_epoch():
    engine, seen = seen_by()
    engine.run(lambda state: range(state.epoch), max_epochs=3)
    assert seen == [0, 0, 1, 0, 1, 2]


def test_a_callable_is_asked_again_for_the_epoch_that_goes_on_and_gets_the_random_state_it_had():
    def train(*limits):
        torch.manual_seed(0)
        engine, seen = seen_by()
        for limit in limits:
            engine.run(lambda state: torch.randperm(5).tolist(), max_iters=limit)
            torch.rand(3)
        return seen

    assert train(3, 4, 9) == train(9)


def test_data_with_get_item_alone_is_iterated_as_python_does():
    class Old:
        def __getitem__(self, index):
            if index > 2:
                raise IndexError
            return index

    engine, seen = seen_by()
    engine.run(Old(), max_epochs=2)
    assert seen == [0, 1, 2, 0, 1, 2]


def test_going_on_with_data_that_is_shorter_than_what_is_done_is_an_error_and_changes_nothing():
    engine, seen = seen_by()
    engine.run(range(5), max_iters=4)
    for _ in range(2):
        with pytest.raises(
            DataError, match="4 batches of this epoch are done, but the data given to go on with has only"
        ):
            engine.run(range(2), max_epochs=1)
        assert counters(engine.state) == (1, 4, 4)
    engine.run(range(5), max_epochs=1)
    assert seen == [*range(5)]


def test_the_same_iterator_goes_on_where_it_is_and_another_is_taken_for_the_same_data_again():
    engine, seen = seen_by()
    batches = iter(range(5))
    engine.run(batches, max_iters=2)
    engine.run(batches, max_iters=3)
    engine.run(iter(range(5)), max_epochs=1)
    assert seen == [*range(5)]


@pytest.mark.parametrize("place", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED])
def test_a_batch_of_an_iterator_that_was_drawn_and_not_trained_on_comes_first(place):
    engine, seen = seen_by()
    batches = iter(range(6))
    for _ in range(3):
        with engine.add_event_handler(
            place, lambda engine, batch: engine.interrupt() if engine.state.epoch_iteration >= 2 else None
        ):
            engine.run(batches, max_epochs=1)
    engine.run(batches, max_epochs=1)
    assert seen == [*range(6)]


def test_an_iterator_goes_on_over_the_borders_of_epochs_and_runs():
    engine, seen = seen_by()
    batches = iter(range(8))
    for epochs in (1, 2, 4):
        engine.run(batches, max_epochs=epochs, epoch_length=2)
    assert seen == [*range(8)]


def test_the_data_may_change_between_epochs_its_generators_too():
    engine = make_engine()
    first = DataLoader(range(3), generator=torch.Generator().manual_seed(1), shuffle=True)
    second = DataLoader(range(4), sampler=torch.utils.data.SubsetRandomSampler(range(4)))
    for epochs, data in enumerate((first, second, Stated(None, 2), first), start=1):
        engine.run(data, max_epochs=epochs)
    assert engine.state.iteration == 3 + 4 + 2 + 3


# ---------------------------------------------------------------------- saving


def test_a_state_holds_plain_values_and_is_the_same_after_a_round_trip():
    engine = make_engine(state={"best": 0.5})
    engine.on(Events.ITERATION_COMPLETED)(lambda engine, batch: engine.record({"loss": torch.tensor(2.0)}))
    engine.run(DataLoader(range(4), shuffle=True, generator=torch.Generator()), max_iters=3)
    fresh = saved_and_loaded(engine, make_engine(state={"best": 0.0}))
    assert (fresh.state.best, fresh.state.metrics["loss"], counters(fresh.state)) == (0.5, 2.0, (1, 3, 3))
    assert (fresh.state.max_iters, fresh.state.stop_reason) == (3, "completed")
    again, saved = fresh.state_dict(), engine.state_dict()
    assert repr(again) == repr(saved)


def test_event_counts_are_part_of_the_state():
    def build():
        engine = make_engine(lambda engine, batch: engine.fire_event("looked"))
        engine.register_events("looked")
        engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), lambda engine, batch: None)
        return engine

    engine = build()
    engine.run(DATA_OF_THREE, max_iters=2)
    assert saved_and_loaded(engine, build()).state_dict()["firings"]["looked"] == 2


def change(**values):
    return lambda state: {**state, **values}


def drop(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: None, "an engine's state dictionary was wanted, got NoneType"),
        (lambda state: [1], "an engine's state dictionary was wanted, got list"),
        (lambda state: {}, "is no state dictionary of an Engine"),
        (change(format=2), "has format 2, and this version of pellucid reads 1"),
        (drop("iteration"), r"\['iteration'\] missing, nothing unknown"),
        (change(itertion=1), r"nothing missing, \['itertion'\] unknown"),
        (change(fields={}), r"its declared fields and this engine do not fit: \['best'\] missing"),
        (change(fields={"best": 0.0, "worst": 1}), r"its declared fields .* \['worst'\] unknown"),
        (change(fields={"bst": 0.0}), "did you mean 'best'"),
        (change(updates_by_optimizer={}), r"its optimizers and this engine do not fit: \['optimizer'\] missing"),
        (change(epoch=-1), "epoch must be a whole number of at least 0, got -1"),
        (change(iteration="3"), "iteration must be a whole number of at least 0, got '3'"),
        (change(updates=1.5), "updates must be a whole number of at least 0, got 1.5"),
        (change(max_epochs=0), "max_epochs must be a whole number of at least 1, got 0"),
        (change(position={}), "its position in the data cannot be read"),
        (change(metrics=[1]), "metrics must be a mapping, got list"),
        (change(firings=None), "firings must be a mapping, got NoneType"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, message):
    def build():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Engine(lambda engine, batch: None, model, optimizer=optimizer, state={"best": 0.0})

    saved = build()
    saved.run(DATA_OF_THREE, max_iters=2)
    state = spoil(saved.state_dict())
    engine = build()
    engine.run(DATA_OF_THREE, max_epochs=2)
    before = repr(engine.state_dict())
    with pytest.raises(CheckpointError, match=message):
        engine.load_state_dict(state)
    assert repr(engine.state_dict()) == before
