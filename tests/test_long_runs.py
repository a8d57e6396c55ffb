"""A long run needs no more memory than a short one."""

from __future__ import annotations

import gc
import io
import tracemalloc
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from pellucid.engine import Engine, Events
from pellucid.handlers import EarlyStopping, ProgressBar, Validate


def attach_every_kind_of_handler(engine: Engine) -> None:
    for event in (
        Events.GET_BATCH_STARTED,
        Events.ITERATION_STARTED(every=10),
        Events.EPOCH_STARTED | Events.COMPLETED,
    ):
        engine.add_event_handler(event, lambda engine, batch: None)
    engine.register_events("looked")

    @engine.on(Events.ITERATION_COMPLETED)
    def record(engine, batch):
        engine.record({"loss": engine.state.output["loss"], "batch": batch})
        engine.state.best = max(engine.state.best, engine.state.iteration)
        engine.fire_event("looked")

    evaluator = Engine(lambda engine, batch: engine.record({"batch": batch}), mode="eval")
    Validate(evaluator, range(2), every=Events.ITERATION_COMPLETED(every=100)).attach(engine)
    EarlyStopping("loss", mode="min", patience=1_000_000).attach(engine)
    ProgressBar(file=io.StringIO(), leave=False).attach(engine)


def measure_at(iterations: list[int], engine: Engine, measure: Callable[[], int]) -> list[int]:
    """Run over many epochs, and measure in the midst of these iterations."""
    measured: list[int] = []
    once = Events.ITERATION_COMPLETED(once=iterations)
    engine.add_event_handler(once, lambda engine, batch: measured.append(measure()))
    engine.run(range(150), max_iters=max(iterations) + 1)
    return measured


def count_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def test_no_more_objects_are_alive_after_ten_thousand_iterations_than_after_one_thousand():
    engine = Engine(lambda engine, batch: {"loss": 1.0}, state={"best": 0})
    attach_every_kind_of_handler(engine)
    early, late = measure_at([1_000, 10_000], engine, count_objects)
    assert abs(late - early) < 50  # other threads make objects too; one for 180 iterations would be seen


def test_training_keeps_no_object_from_iteration_to_iteration():
    model = nn.Linear(4, 2)
    inputs, classes = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)

    def train_step(engine, batch):
        loss = functional.cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    engine = Engine(train_step, model, optimizer=torch.optim.AdamW(model.parameters()), state={"best": 0})
    attach_every_kind_of_handler(engine)
    early, late = measure_at([200, 2_000], engine, count_objects)
    assert abs(late - early) < 90  # torch's own caches come and go; one object for 20 iterations would be seen


def peak_since_last_time() -> int:
    peak = tracemalloc.get_traced_memory()[1]
    gc.collect()  # empties Python's own stores of free objects too
    tracemalloc.reset_peak()
    return peak


def test_the_peak_of_memory_does_not_grow_with_the_iterations():
    engine = Engine(lambda engine, batch: {"loss": 1.0}, state={"best": 0})
    attach_every_kind_of_handler(engine)
    tracemalloc.start()
    try:
        _, early, _, late = measure_at([1_000, 2_000, 9_000, 10_000], engine, peak_since_last_time)
    finally:
        tracemalloc.stop()
    assert late - early < 8_000  # a byte for each iteration between: less than any object needs
