from __future__ import annotations

import logging
import math

import pytest
import torch

from pellucid.engine import CheckpointError, Engine, Events, HandlerError, MonitorError
from pellucid.handlers import EarlyStopping


def scored_engine(scores, name="score", event=Events.EPOCH_COMPLETED):
    """An engine that records one of the scores at the end of each epoch."""
    engine = Engine(lambda engine, batch: None)

    @engine.on(event)
    def score(engine, batch):
        engine.record({name: scores[engine.state.epoch - 1]})

    return engine


def stops_after(scores, *, mode="max", **arguments):
    engine = scored_engine(scores)
    EarlyStopping("score", mode=mode, **arguments).attach(engine)
    return engine.run([0, 1], max_epochs=len(scores)).epoch


def test_it_stops_after_patience_records_without_improvement():
    assert stops_after([1, 0.9, 0.9, 0.9, 0.9], patience=3) == 4
    assert stops_after([1, 0.9, 2, 0.9, 0.9], patience=3) == 5
    assert stops_after([1, 1, 1], patience=1) == 2


def test_in_mode_min_smaller_is_better():
    assert stops_after([3.0, 2.0, 1.0, 1.5, 1.5], mode="min", patience=2) == 5
    assert stops_after([1.0, 2.0, 3.0, 4.0], mode="min", patience=2) == 3


def test_a_gain_of_no_more_than_min_delta_is_no_improvement():
    assert stops_after([1.0, 1.5, 2.0, 2.5], patience=2, min_delta=1.5) == 3
    assert stops_after([1.0, 2.0, 3.0, 4.0], patience=2, min_delta=0.5) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_score_that_is_not_finite_is_never_the_best_and_counts_against_patience(value, mode):
    engine = scored_engine([value, 0.5, value, value, 0.7])
    stopping = EarlyStopping("score", mode=mode, patience=2).attach(engine)
    assert engine.run([0], max_epochs=5).epoch == 4
    assert stopping.best == 0.5


def test_only_records_that_contain_the_monitor_count():
    engine = scored_engine([1.0] * 6)
    stopping = EarlyStopping("score", mode="max", patience=3).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: engine.record({"loss": 1.0}))
    assert engine.run(range(10), max_epochs=6).epoch == 4
    assert stopping.waited == 3


@pytest.mark.parametrize("attached", ["before", "after"])
def test_the_order_of_attaching_does_not_matter(attached):
    engine = Engine(lambda engine, batch: None)
    stopping = EarlyStopping("score", mode="max", patience=2)
    if attached == "before":
        stopping.attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"score": 1.0}))
    if attached == "after":
        stopping.attach(engine)
    assert engine.run([0], max_epochs=9).epoch == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_that_is_cut_and_resumed_in_new_objects_stops_where_one_go_stops(cut):
    scores = [1, 0.9, 0.9, 0.9, 0.9]
    first = scored_engine(scores)
    before = EarlyStopping("score", mode="max", patience=3).attach(first)
    first.run([0], max_epochs=cut)

    second = scored_engine(scores[cut:])
    after = EarlyStopping("score", mode="max", patience=3).attach(second)
    after.load_state_dict(before.state_dict())
    assert cut + second.run([0], max_epochs=5).epoch == 4


def test_its_state_is_plain_values():
    stopping = EarlyStopping("score", mode="max", patience=1)
    assert stopping.state_dict() == {"best": None, "waited": 0, "stopped": False}
    stopping.attach(scored_engine([1, 0, 0])).load_state_dict({"best": 2, "waited": 1, "stopped": True})
    assert stopping.state_dict() == {"best": 2.0, "waited": 1, "stopped": True}
    with pytest.raises(CheckpointError, match="waited"):
        stopping.load_state_dict({"best": 1.0})


def test_a_stopped_run_makes_no_step_when_run_again_and_says_so(caplog):
    engine = scored_engine([1, 0, 0, 0, 0])
    EarlyStopping("score", mode="max", patience=1).attach(engine)
    stopped_at = engine.run([0, 1], max_epochs=5).iteration
    with caplog.at_level(logging.WARNING, logger="pellucid.handlers"):
        result = engine.run([0, 1], max_epochs=5)
    assert (result.iteration, result.stop_reason) == (stopped_at, "terminated")
    assert "no step is made" in caplog.text


def test_a_stopped_state_loaded_into_new_objects_makes_no_step():
    engine = scored_engine([1, 1, 1])
    stopping = EarlyStopping("score", mode="max", patience=1).attach(engine)
    stopping.load_state_dict({"best": 1.0, "waited": 1, "stopped": True})
    assert engine.run([0, 1], max_epochs=3).iteration == 0


def test_reset_lets_a_stopped_run_go_on():
    engine = scored_engine([1, 0, 0, 0, 0])
    stopping = EarlyStopping("score", mode="max", patience=1).attach(engine)
    engine.run([0, 1], max_epochs=5)
    stopping.reset()
    assert engine.run([0, 1], max_epochs=5).epoch == 4  # the third is the new best, the fourth no better


def test_a_monitor_that_nobody_records_is_an_error_at_the_end_of_the_first_epoch():
    engine = scored_engine([1, 1, 1], name="val/accuracy")
    EarlyStopping("val/acuracy", mode="max", patience=1).attach(engine)
    with pytest.raises(MonitorError, match=r"end of epoch 1 .*did you mean 'val/accuracy'.*Recorded: 'val/accuracy'"):
        engine.run([0, 1], max_epochs=3)
    assert engine.state.iteration == 2


def test_it_is_an_error_also_in_a_run_of_one_epoch_and_when_nothing_is_recorded():
    engine = Engine(lambda engine, batch: None)
    EarlyStopping("loss", mode="min", patience=1).attach(engine)
    with pytest.raises(MonitorError, match="Recorded: nothing"):
        engine.run([0, 1], max_epochs=1)


def test_an_epoch_that_was_broken_off_is_no_reason_for_the_error():
    engine = Engine(lambda engine, batch: engine.terminate())
    EarlyStopping("loss", mode="min", patience=1).attach(engine)
    assert engine.run([0, 1], max_epochs=1).stop_reason == "terminated"


def test_a_metric_announced_by_a_handler_is_waited_for():
    class Announces:
        records = ("late/*",)

        def record(self, engine, batch):
            engine.record({"late/score": 1.0})

    engine = Engine(lambda engine, batch: None)
    EarlyStopping("late/score", mode="max", patience=1).attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED(every=2), Announces().record)
    assert engine.run([0], max_epochs=9).epoch == 4


def test_first_epoch_says_when_a_late_metric_must_have_come():
    def run(first_epoch):
        engine = scored_engine([0, 0, 1, 1, 1], event=Events.EPOCH_COMPLETED(after=2))
        EarlyStopping("score", mode="max", patience=1, first_epoch=first_epoch).attach(engine)
        return engine.run([0], max_epochs=5).epoch

    assert run(first_epoch=3) == 4
    with pytest.raises(MonitorError, match="end of epoch 2"):
        run(first_epoch=2)


def test_a_monitored_value_must_be_a_single_number():
    engine = scored_engine([torch.eye(2)])
    EarlyStopping("score", mode="max", patience=1).attach(engine)
    with pytest.raises(MonitorError, match=r"single number was wanted, got Tensor"):
        engine.run([0], max_epochs=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mode": "biggest"}, ValueError, "mode='biggest'"),
        ({"patience": 0}, ValueError, "patience=0"),
        ({"patience": 1.5}, TypeError, "patience=1.5"),
        ({"patience": True}, TypeError, "patience=True"),
        ({"min_delta": -0.1}, ValueError, "min_delta=-0.1"),
        ({"min_delta": math.nan}, ValueError, "min_delta=nan"),
        ({"first_epoch": 0}, ValueError, "first_epoch=0"),
        ({"monitor": ""}, TypeError, "monitor=''"),
        ({"monitor": None}, TypeError, "monitor=None"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        EarlyStopping(**{"monitor": "score", "mode": "max", "patience": 1, **arguments})


def test_it_is_attached_to_an_engine_once_and_comes_off_again():
    engine = scored_engine([1, 0, 0])
    stopping = EarlyStopping("score", mode="max", patience=1).attach(engine)
    with pytest.raises(HandlerError, match="already"):
        stopping.attach(engine)
    stopping.detach(engine)
    assert engine.attached() == ()
    assert engine.run([0], max_epochs=3).epoch == 3
    with pytest.raises(HandlerError, match="not attached"):
        stopping.detach(engine)
