"""Metrics go on in mid-epoch, and running averages over the epochs, as if the run had not been stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events as IgniteEvents
from ignite.handlers import EarlyStopping as IgniteEarlyStopping
from ignite.handlers.param_scheduler import LinearCyclicalScheduler
from ignite.metrics import (
    ROC_AUC,
    Accuracy,
    Average,
    CohenKappa,
    ConfusionMatrix,
    Fbeta,
    Metric,
    MetricsLambda,
    Precision,
    Recall,
    RunningAverage,
)
from ignite.metrics.metric import BatchFiltered, RunningEpochWise, SingleEpochRunningBatchWise

from pellucid.engine import Engine, Events, resume, save_checkpoint

warnings.filterwarnings("ignore", message=".*epoch_bound.*")


class Own(Metric):
    """Keeps what it has seen in its own way, and lists none of it."""

    def reset(self) -> None:
        self.rows: list[Any] = []
        self.by_class: dict[int, float] = {}

    def update(self, output: Any) -> None:
        scores, classes = output
        self.rows.append(scores.sum())
        self.by_class[int(classes.sum())] = float(scores.max())

    def compute(self) -> float:
        return float(sum(self.rows) + sum(self.by_class.values()))


class Total:
    """What no safe loader reads."""

    def __init__(self) -> None:
        self.value = 0.0


class Opaque(Own):
    """Keeps an object of its own."""

    def reset(self) -> None:
        super().reset()
        self.total = Total()

    def update(self, output: Any) -> None:
        self.total.value += float(output[0].sum())

    def compute(self) -> float:
        return self.total.value


class WithOwnState(Opaque):
    """Says itself what is to be kept."""

    def state_dict(self) -> Any:
        return {"value": self.total.value}

    def load_state_dict(self, state: Any) -> None:
        self.total.value = state["value"]


def rounded(output: Any) -> Any:
    return output[0].round(), output[1]


METRICS: dict[str, Callable[[], Metric]] = {
    "ROC AUC": ROC_AUC,
    "Cohen's kappa": lambda: CohenKappa(output_transform=rounded),
    "confusion": lambda: ConfusionMatrix(
        2, output_transform=lambda output: (torch.stack([1 - output[0], output[0]], 1), output[1])
    ),
    "F": lambda: Fbeta(1.0, output_transform=rounded),
    "arithmetic": lambda: (
        Precision(output_transform=rounded, average=False) * 2 + Recall(output_transform=rounded, average=False)
    ).mean(),
    "lambda": lambda: MetricsLambda(lambda one, two: one + two, Average(lambda output: output[0].mean()), Own()),
    "own": Own,
    "own state": WithOwnState,
    "accuracy": lambda: Accuracy(output_transform=rounded),
    "running": lambda: RunningAverage(output_transform=lambda output: output[0].mean()),
    "running of a metric": lambda: RunningAverage(Accuracy(output_transform=rounded)),
}
ON_IGNITE: dict[str, Callable[[Engine], Any]] = {
    "accuracy": lambda engine: Accuracy(output_transform=rounded).attach(engine.ignite, "value"),
    "AUC": lambda engine: ROC_AUC().attach(engine.ignite, "value"),
    "running": lambda engine: RunningAverage(output_transform=lambda output: output[0].mean()).attach(
        engine.ignite, "value"
    ),
    "running, each epoch": lambda engine: RunningAverage(Accuracy(output_transform=rounded)).attach(
        engine.ignite, "value", SingleEpochRunningBatchWise()
    ),
    "running over epochs": lambda engine: RunningAverage(Accuracy(output_transform=rounded)).attach(
        engine.ignite, "value", RunningEpochWise()
    ),
    "filtered": lambda engine: Own().attach(engine.ignite, "value", BatchFiltered(every=2)),
    "arithmetic": lambda engine: (Own() * 2 + Own()).attach(engine.ignite, "value"),
}


def make(metric: Any) -> tuple[Engine, list[Any]]:
    def step(engine: Engine, batch: Any) -> Any:
        return batch

    engine = Engine(step, metrics={"value": metric} if isinstance(metric, Metric) else None)
    if not isinstance(metric, Metric):
        metric(engine)
    seen: list[Any] = []

    @engine.on(Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED | Events.COMPLETED)
    def note(engine: Engine, batch: Any) -> None:
        value = engine.ignite.state.metrics.get("value")
        seen.append((engine.state.iteration, value.tolist() if isinstance(value, torch.Tensor) else value))

    return engine, seen


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(4, generator=generator), torch.randint(0, 2, (4,), generator=generator)) for _ in range(5)] + [
        (torch.rand(2, generator=generator), torch.tensor([0, 1]))
    ]


CASES = [(name, METRICS[name]) for name in METRICS] + [
    (f"{name} on ignite", lambda name=name: ON_IGNITE[name]) for name in ON_IGNITE
]


@pytest.mark.parametrize("how", ["new objects", "the same objects"])
@pytest.mark.parametrize(("name", "metric"), CASES, ids=[name for name, _ in CASES])
def test_it_goes_on_from_every_iteration(tmp_path, name, metric, how):
    engine, wanted = make(metric())
    engine.run(batches(), max_epochs=3)
    assert len({repr(value) for _, value in wanted}) > 1
    for stop in (1, 3, 5, 6, 8, 12):
        engine, seen = make(metric())
        engine.run(batches(), max_iters=stop)
        if how == "new objects":
            save_checkpoint(engine, tmp_path / str(stop))
            engine, rest = make(metric())
            resume(engine, tmp_path / str(stop))
        else:
            rest = seen
        engine.run(batches(), max_epochs=3)
        assert rest[-1] == wanted[-1], stop
        done = [row for row in wanted if row[0] > stop]
        assert rest[-len(done) :] == done, stop


def test_what_cannot_be_saved_is_named_when_it_is_resumed(tmp_path, caplog):
    engine, _ = make(Opaque())
    engine.run(batches(), max_iters=2)
    save_checkpoint(engine, tmp_path)
    again, _ = make(Opaque())
    resume(again, tmp_path)
    assert caplog.text.count("metric 'value' goes on in mid-epoch without its total (Total)") == 1


def test_a_second_run_begins_afresh_after_a_reset_and_in_evaluation():
    for mode in ("train", "eval"):
        engine = Engine(lambda engine, batch: batch, mode=mode)
        ON_IGNITE["running"](engine)
        values = []
        for _ in range(2):
            engine.run(batches())
            values.append(engine.ignite.state.metrics["value"])
            engine.reset()
        assert values[0] == values[1]


# ---------------------------------------------------------------------- what else is attached


class Counter:
    """A handler that is called itself."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, engine: Engine, batch: Any) -> None:
        self.count += 1

    def add(self, step: int, engine: Engine, batch: Any) -> None:
        self.count += step

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_whatever_is_attached_and_has_a_state_is_saved(tmp_path):
    from functools import partial

    def make() -> tuple[Engine, list[Any]]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(engine: Engine, batch: Any) -> None:
            engine.backward(engine.model(torch.ones(1)).sum())
            engine.update()

        engine = Engine(step, model, optimizer=optimizer)
        called, partly = Counter(), Counter()
        scheduler = LinearCyclicalScheduler(optimizer, "lr", 1.0, 0.0, 10)
        stopping = IgniteEarlyStopping(9, lambda engine: -engine.state.iteration, engine.ignite)
        engine.add_event_handler(Events.ITERATION_COMPLETED, called)
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), partial(partly.add, 5))
        engine.ignite.add_event_handler(IgniteEvents.ITERATION_STARTED, scheduler)
        engine.ignite.add_event_handler(IgniteEvents.ITERATION_COMPLETED(every=2), stopping)
        assert set(map(id, (called, partly, scheduler, stopping))) <= set(map(id, engine.attached()))
        return engine, [called, partly, scheduler, stopping]

    engine, parts = make()
    engine.run([0] * 5)
    save_checkpoint(engine, tmp_path)
    again, others = make()
    resume(again, tmp_path)
    for one, other in zip(parts, others, strict=True):
        assert dict(one.state_dict()) == dict(other.state_dict())
    assert others[0].count == 5 and others[1].count == 10 and others[2].event_index == 5 and others[3].counter == 1
