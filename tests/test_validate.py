from __future__ import annotations

import logging

import pytest
import torch
from ignite.metrics import Average

from pellucid.engine import DataError, Engine, EventError, Events, HandlerError
from pellucid.handlers import EarlyStopping, History, Validate


def make_trainer():
    return Engine(lambda engine, batch: None)


def make_evaluator(step=lambda engine, batch: batch):
    return Engine(step, mode="eval", metrics={"mean": Average()})


def recorded(trainer):
    """What the trainer records, as (iteration, names and values)."""
    seen = []

    @trainer.on(Events.METRICS_RECORDED)
    def look(engine, batch):
        seen.append((engine.state.last_record.iteration, dict(engine.state.last_record.values)))

    return seen


def test_metrics_are_recorded_under_the_prefix_at_the_outer_iteration():
    trainer = make_trainer()
    seen = recorded(trainer)
    Validate(make_evaluator(), [1.0, 2.0, 6.0]).attach(trainer)
    trainer.run(range(4), max_epochs=2)
    assert seen == [(4, {"val/mean": 3.0}), (8, {"val/mean": 3.0})]


@pytest.mark.parametrize(
    ("every", "iterations"),
    [
        (Events.ITERATION_COMPLETED(every=3), [3, 6, 9]),
        (Events.EPOCH_COMPLETED(every=2), [10]),
        (Events.ITERATION_COMPLETED(every=4) | Events.EPOCH_COMPLETED, [4, 5, 8, 10]),
        (Events.STARTED | Events.COMPLETED, [0, 10]),
    ],
)
def test_it_evaluates_at_any_event(every, iterations):
    trainer = make_trainer()
    seen = recorded(trainer)
    Validate(make_evaluator(), [1.0], every=every, prefix="held out ").attach(trainer)
    trainer.run(range(5), max_epochs=2)
    assert seen == [(iteration, {"held out mean": 1.0}) for iteration in iterations]


def test_metrics_that_the_evaluator_records_itself_are_recorded_in_one_call():
    evaluator, trainer = make_evaluator(), make_trainer()
    seen = recorded(trainer)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"extra": 7}))
    Validate(evaluator, [1.0]).attach(trainer)
    trainer.run([0], max_epochs=1)
    assert seen == [(1, {"val/mean": 1.0, "val/extra": 7})]


def test_metrics_attached_in_ignites_way_are_recorded_but_for_those_that_are_no_numbers():
    class Report(Average):
        def compute(self):
            return {"report": "fine", "mean": super().compute()}

    evaluator, trainer = Engine(lambda engine, batch: batch, mode="eval"), make_trainer()
    Report().attach(evaluator.ignite, "all")
    seen = recorded(trainer)
    Validate(evaluator, [1.0]).attach(trainer)
    trainer.run([0], max_epochs=1)
    assert seen == [(1, {"val/mean": 1.0})]


def test_an_evaluation_that_terminates_records_nothing_rather_than_old_values(caplog):
    def step(engine, batch):
        if engine.state.parent.epoch == 2:
            engine.terminate()
        return batch

    trainer = make_trainer()
    seen = recorded(trainer)
    Validate(make_evaluator(step), [1.0, 1.0]).attach(trainer)
    with caplog.at_level(logging.WARNING, logger="pellucid.handlers"):
        trainer.run([0], max_epochs=3)
    assert [iteration for iteration, values in seen] == [1, 3]
    assert "terminated" in caplog.text


def test_an_evaluation_without_metrics_records_nothing():
    trainer = make_trainer()
    seen = recorded(trainer)
    validate = Validate(Engine(lambda engine, batch: batch, mode="eval"), [1.0]).attach(trainer)
    trainer.run([0], max_epochs=2)
    assert (seen, validate.records) == ([], ())


def test_an_error_in_the_evaluation_goes_through_unchanged():
    error = RuntimeError("of the user")

    def step(engine, batch):
        raise error

    trainer = make_trainer()
    Validate(make_evaluator(step), [1.0]).attach(trainer)
    with pytest.raises(RuntimeError, match="of the user") as caught:
        trainer.run([0], max_epochs=1)
    assert caught.value is error


def test_data_may_be_a_callable_and_epoch_length_cuts_it():
    trainer = make_trainer()
    seen = recorded(trainer)
    Validate(make_evaluator(), lambda state: [float(state.depth)] * 3).attach(trainer)
    Validate(make_evaluator(), [1.0, 3.0, 99.0], prefix="part/", epoch_length=2).attach(trainer)
    trainer.run([0], max_epochs=1)
    assert seen == [(1, {"val/mean": 1.0}), (1, {"part/mean": 2.0})]


def test_recording_the_metrics_reads_no_tensor():
    class Counted(torch.Tensor):
        reads = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            names = ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy")
            Counted.reads += getattr(function, "__name__", "") in names
            return super().__torch_function__(function, types, args, kwargs or {})

    evaluator, trainer = Engine(lambda engine, batch: None, mode="eval"), make_trainer()
    score = torch.tensor(0.5).as_subclass(Counted)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"score": score}))
    Validate(evaluator, [1.0]).attach(trainer)
    history = History().attach(trainer)
    trainer.run([0], max_epochs=3)
    assert Counted.reads == 0
    assert [row.value for row in history] == [0.5] * 3


def test_records_says_which_names_will_come():
    trainer = make_trainer()
    validate = Validate(make_evaluator(), [1.0]).attach(trainer)
    assert validate.records == ("val/*",)
    trainer.run([0], max_epochs=1)
    assert validate.records == ("val/mean",)


def test_a_monitor_waits_for_a_validation_that_comes_in_a_later_epoch():
    trainer = make_trainer()
    EarlyStopping("val/mean", mode="max", patience=1).attach(trainer)
    Validate(make_evaluator(), [1.0], every=Events.EPOCH_COMPLETED(every=3)).attach(trainer)
    assert trainer.run([0], max_epochs=20).epoch == 6


def test_a_validation_within_a_validation_is_recorded_where_it_belongs():
    outer, middle, inner = make_trainer(), make_evaluator(), make_evaluator()
    seen = recorded(outer)
    Validate(inner, [5.0], every=Events.ITERATION_COMPLETED, prefix="deep/").attach(middle)
    Validate(middle, [1.0, 3.0]).attach(outer)
    outer.run([0], max_epochs=1)
    assert seen == [(1, {"val/deep/mean": 5.0, "val/mean": 2.0})]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"evaluator": torch.nn.Linear(1, 1)}, HandlerError, "an Engine was wanted"),
        ({"evaluator": Engine(lambda engine, batch: None)}, HandlerError, "mode 'train'"),
        ({"data": None}, DataError, "data: .*got None"),
        ({"data": iter([1.0])}, DataError, "only once"),
        ({"prefix": None}, TypeError, "prefix=None"),
        ({"epoch_length": 0}, ValueError, "epoch_length=0"),
        ({"every": Events.METRICS_RECORDED}, EventError, "METRICS_RECORDED"),
        ({"every": Events.STARTED | Events.METRICS_RECORDED}, EventError, "METRICS_RECORDED"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        Validate(**{"evaluator": make_evaluator(), "data": [1.0], **arguments})


def test_it_cannot_be_attached_to_its_own_evaluator_nor_twice():
    evaluator, trainer = make_evaluator(), make_trainer()
    validate = Validate(evaluator, [1.0])
    with pytest.raises(HandlerError, match="own evaluator"):
        validate.attach(evaluator)
    validate.attach(trainer)
    with pytest.raises(HandlerError, match="already"):
        validate.attach(trainer)


def test_an_unknown_event_is_refused_when_it_is_attached():
    with pytest.raises(EventError, match="no event"):
        Validate(make_evaluator(), [1.0], every="epoch_finished").attach(make_trainer())


def test_a_detached_validation_runs_no_more():
    trainer = make_trainer()
    seen = recorded(trainer)
    validate = Validate(make_evaluator(), [1.0]).attach(trainer)
    trainer.run([0], max_epochs=1)
    validate.detach(trainer)
    trainer.run([0], max_epochs=3)
    assert len(seen) == 1
