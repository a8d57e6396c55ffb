from __future__ import annotations

import decimal
import fractions

import numpy
import pytest
import torch
import torchmetrics
import torchmetrics.classification
from ignite.metrics import Accuracy, Average, ConfusionMatrix, Loss, Metric
from torch.nn import functional

from pellucid.engine import Engine, Events, HandlerError, MetricError, Record, RecordError


def echo(engine, batch):
    return batch


def evaluator(step=echo, **metrics):
    return Engine(step, mode="eval", metrics=metrics or {"mean": Average()})


def recorded(engine):
    """The records of an engine as they come: (epoch, iteration, values)."""
    seen = []

    @engine.on(Events.METRICS_RECORDED)
    def look(engine, batch):
        record = engine.state.last_record
        seen.append((record.epoch, record.iteration, dict(record.values)))

    return seen


class Counted(torch.Tensor):
    """A tensor that counts how often it, or what is computed from it, is read on the host."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = ("item", "__float__", "__bool__", "__int__", "__index__", "tolist", "cpu", "numpy", "__array__")
        Counted.reads += getattr(function, "__name__", "") in names
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture(autouse=True)
def nothing_read_yet():
    Counted.reads = 0


# ---------------------------------------------------------------- record


def test_a_record_is_stamped_readable_and_announced():
    def step(engine, batch):
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        if batch == 1:
            engine.record({"loss": 0.5, "rate": 2})

    engine, seen = Engine(step, torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), []

    @engine.on(Events.METRICS_RECORDED)
    def look(engine, batch):
        seen.append((engine.state.last_record, dict(engine.state.metrics), batch))

    result = engine.run([0, 1, 2], max_epochs=2)
    (first, metrics, batch), (second, _, _) = seen
    assert (first.values, first.epoch, first.iteration, first.updates) == ({"loss": 0.5, "rate": 2}, 1, 2, 2)
    assert (second.epoch, second.iteration, second.updates) == (2, 5, 5)
    assert (metrics, batch) == ({"loss": 0.5, "rate": 2}, 1)
    assert result.last_record == second


def test_last_record_has_the_values_of_one_call_and_metrics_those_of_all():
    engine = Engine(echo)
    assert engine.state.last_record is None
    assert dict(engine.state.metrics) == {}
    engine.record({"a": 1, "b": 2})
    engine.record({"b": 3})
    assert dict(engine.state.last_record.values) == {"b": 3}
    assert dict(engine.state.metrics) == {"a": 1, "b": 3}


def test_a_record_cannot_be_changed():
    engine = Engine(echo)
    engine.record({"a": 1})
    record = engine.state.last_record
    assert isinstance(record, Record)
    with pytest.raises(AttributeError):
        record.iteration = 3
    for values in (record.values, engine.state.metrics):
        with pytest.raises(TypeError):
            values["a"] = 2
    given = {"a": 2}
    engine.record(given)
    given["a"] = 3
    assert (record.values["a"], engine.state.metrics["a"]) == (1, 2)


def test_records_made_inside_metrics_recorded_are_announced_in_turn():
    engine, seen = Engine(echo), []

    @engine.on(Events.METRICS_RECORDED)
    def derive(engine, batch):
        if "loss" in engine.state.last_record.values:
            engine.record({"perplexity": 2 ** engine.state.last_record.values["loss"]})

    engine.add_event_handler(Events.METRICS_RECORDED, lambda e, batch: seen.append(dict(e.state.last_record.values)))
    engine.record({"loss": 3})
    assert seen == [{"loss": 3}, {"perplexity": 8}]


def test_a_handler_that_records_at_every_record_is_stopped():
    engine = Engine(echo)
    engine.add_event_handler(Events.METRICS_RECORDED, lambda engine, batch: engine.record({"more": 1}))
    with pytest.raises(RecordError, match="a handler of METRICS_RECORDED records at every record"):
        engine.record({"loss": 1})


def test_an_error_in_a_handler_of_a_record_does_not_swallow_later_records():
    engine, seen = Engine(echo), []

    @engine.on(Events.METRICS_RECORDED)
    def fail(engine, batch):
        seen.append(dict(engine.state.last_record.values))
        if len(seen) == 1:
            engine.record({"b": 2})
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        engine.record({"a": 1})
    engine.record({"c": 3})
    assert seen == [{"a": 1}, {"c": 3}]
    assert dict(engine.state.metrics) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (3, "record takes a mapping of names to numbers.*got 3"),
        ({}, "record takes a mapping"),
        ([("a", 1)], "record takes a mapping"),
        ("loss", "record takes a mapping"),
        ({3: 1}, "the name of a metric must be a text, got 3"),
        ({"": 1}, "the name of a metric must be a text, got ''"),
        ({"a": "0.5"}, "metric 'a' must be a number, tensor or array, got str: '0.5'"),
        ({"a": None}, "got NoneType"),
        ({"a": [0.5]}, "got list"),
        ({"a": {"b": 0.5}}, "got dict"),
        ({"a": numpy.array(["x"])}, "got ndarray"),
        ({"a": numpy.array([None])}, "got ndarray"),
        ({"a": torch.nn.Linear(1, 1)}, "got Linear"),
        ({"good": 1, "a": "bad"}, "metric 'a'"),
    ],
)
def test_a_bad_name_or_value_is_refused_and_nothing_is_recorded(metrics, message):
    engine = Engine(echo)
    seen = recorded(engine)
    with pytest.raises(RecordError, match=message):
        engine.record(metrics)
    assert (seen, dict(engine.state.metrics), engine.state.last_record) == ([], {}, None)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (1, 1),
        (True, True),
        (0.5, 0.5),
        (1j, 1j),
        (decimal.Decimal("0.5"), decimal.Decimal("0.5")),
        (fractions.Fraction(1, 2), fractions.Fraction(1, 2)),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(3), 3),
        (torch.tensor(True), True),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(3), 3),
        (numpy.bool_(True), True),
        (numpy.array(0.5), 0.5),
    ],
)
def test_a_scalar_reads_as_a_python_number(value, read):
    engine = Engine(echo)
    engine.record({"a": value})
    for metrics in (engine.state.metrics, engine.state.last_record.values, engine.state.snapshot().metrics):
        assert (metrics["a"], type(metrics["a"])) == (read, type(read))


def test_what_is_larger_than_a_scalar_reads_as_it_is():
    engine = Engine(echo)
    engine.record({"tensor": torch.ones(2, 2), "one": torch.ones(1), "array": numpy.ones((2, 2))})
    metrics = engine.state.metrics
    assert torch.equal(metrics["tensor"], torch.ones(2, 2))
    assert torch.equal(metrics["one"], torch.ones(1))
    assert isinstance(metrics["array"], numpy.ndarray)


def test_tensors_and_arrays_are_detached_and_copied():
    engine, weight, array = Engine(echo), torch.nn.Parameter(torch.ones(())), numpy.ones(2)
    total = weight * 2
    engine.record({"total": total, "weight": weight, "array": array})
    with torch.no_grad():
        weight += 1
        total += 1
    array += 1
    raw = engine.state.metrics.raw()
    assert not raw["total"].requires_grad
    assert not raw["weight"].requires_grad
    assert (raw["total"].item(), raw["weight"].item(), raw["array"].tolist()) == (2.0, 1.0, [1.0, 1.0])


def test_a_number_is_read_when_somebody_asks_for_it_and_only_once():
    engine = Engine(echo)
    engine.record({"a": torch.tensor(0.5).as_subclass(Counted), "b": torch.tensor(1.5).as_subclass(Counted)})
    metrics, copied = engine.state.metrics, engine.state.metrics.copy()
    assert ("a" in metrics, len(metrics), list(metrics), list(metrics.raw())) == (True, 2, ["a", "b"], ["a", "b"])
    engine.state.snapshot()
    assert Counted.reads == 0
    assert (metrics["a"], metrics["a"], engine.state.metrics["a"]) == (0.5, 0.5, 0.5)
    assert Counted.reads == 1
    engine.record({"a": 2.5})
    assert copied["a"] == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("val/acuracy", r"no metric 'val/acuracy' has been recorded: did you mean 'val/accuracy'\? Recorded so far: "),
        ("zzz", r"no metric 'zzz' has been recorded\. Recorded so far: 'val/accuracy', 'loss'"),
        (3, "no metric 3 has been recorded"),
    ],
)
def test_a_misspelt_metric_is_an_error_that_names_the_nearest(name, message):
    engine = Engine(echo)
    engine.record({"val/accuracy": 0.5, "loss": 1.0})
    for metrics in (engine.state.metrics, engine.state.last_record.values, engine.state.snapshot().metrics):
        with pytest.raises(MetricError, match=message):
            metrics[name]
        with pytest.raises(KeyError):
            metrics[name]
        assert metrics.get(name, 7) == 7


def test_before_the_first_record_a_metric_is_missing():
    with pytest.raises(MetricError, match="Recorded so far: nothing"):
        Engine(echo).state.metrics["loss"]


# ---------------------------------------------------------------- metrics=


def test_the_metrics_of_an_epoch_are_one_record_before_the_users_handlers():
    engine, seen = evaluator(mean=Average(), twice=Average(lambda output: 2 * output)), []
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda e, batch: seen.append(("user", dict(e.state.metrics))))
    engine.add_event_handler(
        Events.METRICS_RECORDED, lambda e, b: seen.append(("record", dict(e.state.last_record.values)))
    )
    engine.run([1.0, 3.0])
    assert seen == [("record", {"mean": 2.0, "twice": 4.0}), ("user", {"mean": 2.0, "twice": 4.0})]


def test_a_training_engine_records_its_metrics_every_epoch_each_from_scratch():
    engine = Engine(lambda engine, batch: batch * engine.state.epoch, metrics={"mean": Average()})
    seen = recorded(engine)
    engine.run([1.0, 3.0], max_epochs=2)
    engine.run([1.0, 3.0], max_epochs=3)
    assert seen == [(1, 2, {"mean": 2.0}), (2, 4, {"mean": 4.0}), (3, 6, {"mean": 6.0})]


def test_an_epoch_that_is_paused_and_gone_on_with_is_measured_whole():
    engine = Engine(echo, metrics={"mean": Average(), "torch": torchmetrics.MeanMetric()})
    seen = recorded(engine)
    stop = engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: engine.terminate())
    engine.run([1.0, 2.0, 6.0], max_epochs=1)
    stop.remove()
    engine.run([1.0, 2.0, 6.0], max_epochs=1)
    assert seen == [(1, 3, {"mean": 3.0, "torch": 3.0})]


def test_averages_weigh_by_samples():
    batches = [
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.zeros(4, 1), torch.zeros(4, 1)),
        (torch.ones(1, 1), torch.zeros(1, 1)),
    ]
    engine = evaluator(ignite=Loss(functional.mse_loss), torch=torchmetrics.MeanSquaredError())
    for _ in range(2):
        assert engine.run(batches).metrics == pytest.approx({"ignite": 1 / 9, "torch": 1 / 9})


METRICS = {"ignite": Average, "torch": torchmetrics.MeanMetric}


@pytest.mark.parametrize("stop", ["terminate", "interrupt", "raise"])
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())
def test_an_evaluation_that_is_not_finished_gives_no_value_rather_than_the_old_one(metric, stop):
    def step(engine, batch):
        if batch == 9.0:
            if stop == "raise":
                raise RuntimeError("of the user")
            getattr(engine, stop)()
        return batch

    engine = evaluator(step, mean=metric())
    assert engine.run([1.0, 1.0]).metrics["mean"] == 1.0
    if stop == "raise":
        with pytest.raises(RuntimeError, match="of the user"):
            engine.run([9.0, 9.0])
    else:
        assert dict(engine.run([9.0, 9.0]).metrics) == {}
    assert dict(engine.state.metrics) == {}
    assert engine.state.last_record is None
    assert engine.run([3.0]).metrics["mean"] == 3.0


def test_a_later_evaluation_changes_nothing_that_was_recorded():
    trainer, validation = Engine(echo), evaluator()
    history = recorded(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(every=3))
    def validate(engine, batch):
        engine.record({f"val/{name}": value for name, value in validation.run([float(batch)]).metrics.items()})

    result = trainer.run(range(10))
    before, shown = list(history), repr(trainer.state)
    validation.run([100.0])
    validation.fork(echo, metrics={"mean": Average()}).run([7.0])
    assert history == before == [(1, 3, {"val/mean": 2.0}), (1, 6, {"val/mean": 5.0}), (1, 9, {"val/mean": 8.0})]
    assert repr(trainer.state) == shown
    assert (result.metrics["val/mean"], result.last_record.iteration) == (8.0, 9)


def test_a_result_of_an_evaluation_outlives_the_next_one():
    engine = evaluator()
    first = engine.run([1.0])
    engine.run([2.0])
    assert first.metrics["mean"] == 1.0


CLASSES = [(torch.eye(3), torch.tensor([0, 1, 1])), (torch.eye(3)[:1], torch.tensor([0]))]


def test_ignite_and_torchmetrics_agree():
    engine = evaluator(
        ignite=Accuracy(),
        torch=torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
        pair=torchmetrics.MetricCollection(
            {
                "micro": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
                "f1": torchmetrics.classification.MulticlassF1Score(3, average="micro"),
            }
        ),
    )
    seen = recorded(engine)
    engine.run(CLASSES)
    values = {"ignite": 0.75, "torch": 0.75, "pair/micro": 0.75, "pair/f1": 0.75}
    assert [(epoch, iteration) for epoch, iteration, _ in seen] == [(1, 2)]
    assert seen[0][2] == values
    assert engine.state.metrics["pair/f1"] == 0.75


def test_a_confusion_matrix_reads_as_it_is():
    engine = evaluator(ignite=ConfusionMatrix(3), torch=torchmetrics.classification.MulticlassConfusionMatrix(3))
    metrics = engine.run(CLASSES).metrics
    wanted = torch.tensor([[2, 0, 0], [0, 1, 1], [0, 0, 0]])
    assert torch.equal(metrics["ignite"].long(), wanted)
    assert torch.equal(metrics["torch"], wanted)


@pytest.mark.parametrize(
    "output",
    [lambda p, t: (p, t), lambda p, t: {"preds": p, "target": t}, lambda p, t: {"y_pred": p, "y": t, "loss": 1}],
)
def test_a_torchmetrics_metric_takes_a_tuple_or_a_dict(output):
    engine = evaluator(
        lambda engine, batch: output(*batch), a=torchmetrics.classification.MulticlassAccuracy(3, average="micro")
    )
    assert engine.run(CLASSES).metrics["a"] == 0.75


class Parts(Metric):
    """An Ignite metric whose result is a mapping."""

    def reset(self):
        self.total = 0.0

    def update(self, output):
        self.total += output

    def compute(self):
        return {"total": self.total, "half": self.total / 2}


def test_the_parts_of_a_metric_are_recorded_under_its_name():
    engine = evaluator(parts=Parts())
    seen = recorded(engine)
    engine.run([1.0, 3.0])
    assert seen == [(1, 2, {"parts/total": 4.0, "parts/half": 2.0})]
    assert "total" not in engine.state.metrics


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([Accuracy()], r'metrics= takes a mapping, \{"accuracy": Accuracy\(\)\}'),
        (Accuracy(), "metrics= takes a mapping"),
        (
            {"accuracy": Accuracy},
            "metric 'accuracy' must be an instance of an Ignite or torchmetrics metric, got <class",
        ),
        ({"accuracy": functional.cross_entropy}, "must be an instance"),
        ({"accuracy": torch.nn.Linear(1, 1)}, "must be an instance"),
        ({"accuracy": "accuracy"}, "must be an instance"),
        ({3: Accuracy()}, "the name of a metric must be a text, got 3"),
        ({"": Accuracy()}, "the name of a metric must be a text, got ''"),
    ],
)
def test_bad_metrics_are_refused_at_once(metrics, message):
    with pytest.raises(HandlerError, match=message):
        Engine(echo, mode="eval", metrics=metrics)


# ---------------------------------------------------------------- the host does not wait for the device


def counted_step(engine, batch):
    with torch.no_grad():
        return {"loss": (batch * 2).sum(), "y_pred": batch, "y": torch.zeros(2, 1)}


def counted_batches(n):
    return [torch.ones(2, 1).as_subclass(Counted) for _ in range(n)]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_engine_with_nothing_attached_reads_nothing(mode):
    Engine(counted_step, mode=mode).run(counted_batches(100))
    assert Counted.reads == 0


def test_recording_in_every_iteration_reads_nothing():
    engine = Engine(counted_step)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e, batch: e.record({"loss": e.state.output["loss"]}))
    engine.run(counted_batches(100))
    assert Counted.reads == 0
    assert engine.state.metrics["loss"] == 4.0
    assert Counted.reads == 1


def test_backward_and_update_read_nothing():
    weight = torch.nn.Parameter(torch.ones(1))

    def step(engine, batch):
        loss = (weight.as_subclass(Counted) * batch).mean()
        engine.backward(loss)
        engine.update()
        return loss

    model = torch.nn.ParameterList([weight])
    engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    engine.run(counted_batches(20))
    assert (engine.state.updates, Counted.reads) == (20, 0)


def test_metrics_are_read_at_an_epochs_end_only():
    reads = []
    metrics = {
        "loss": Loss(functional.mse_loss, output_transform=lambda out: (out["y_pred"], out["y"])),
        "mean": Average(lambda out: out["loss"]),
    }
    engine = Engine(counted_step, mode="eval", metrics=metrics)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: reads.append(Counted.reads))
    engine.run(counted_batches(100))
    assert set(reads) == {0}
    assert engine.state.metrics == {"loss": 1.0, "mean": 4.0}
