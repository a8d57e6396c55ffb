"""What an iteration may cost, counted instead of timed: calls of Python functions, and waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.engine import Engine, Events
from pellucid.handlers import EMA, EarlyStopping, GradientClip, History, LRSchedule, TimeLimit


def calls_of(run: Callable[[], object]) -> int:
    """Return how many Python functions are called in ``run``."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def calls_per_iteration(handlers: int, **filters: Any) -> float:
    def run(iterations: int) -> int:
        engine = Engine(lambda engine, batch: None)
        for _ in range(handlers):
            event = Events.ITERATION_COMPLETED(**filters) if filters else Events.ITERATION_COMPLETED
            engine.add_event_handler(event, lambda engine, batch: None)
        return calls_of(lambda: engine.run(range(iterations), max_epochs=1))

    return (run(1_100) - run(100)) / 1_000


@pytest.mark.parametrize(("handlers", "filters", "budget"), [(0, {}, 11), (5, {}, 15), (5, {"every": 100}, 13)])
def test_an_iteration_calls_few_functions(handlers, filters, budget):
    assert calls_per_iteration(handlers, **filters) <= budget


def test_handlers_that_are_not_due_cost_the_same_however_many_there_are():
    assert calls_per_iteration(200, every=1_000_000) <= calls_per_iteration(5, every=1_000_000) + 0.5


def test_an_inner_run_calls_few_functions_for_each_sub_module():
    def inner_run(modules: int) -> int:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(modules)))
        evaluator = Engine(lambda engine, batch: None, model, mode="eval")
        found = []
        Engine(lambda engine, batch: found.append(calls_of(lambda: evaluator.run([0]))), model).run([0, 0])
        return found[-1]

    assert (inner_run(510) - inner_run(10)) / 500 <= 8


class Counting(torch.Tensor):
    """Counts what makes the host wait for a device."""

    waits = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in {"item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy"}:
            Counting.waits += 1
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("attach", [
    lambda engine: None,
    lambda engine: History().attach(engine),
    lambda engine: EMA(decay=0.9).attach(engine),
    lambda engine: GradientClip(max_norm=1.0).attach(engine),
    lambda engine: LRSchedule(lambda one: torch.optim.lr_scheduler.StepLR(one, 2), every="update").attach(engine),
    lambda engine: TimeLimit(1000).attach(engine),
    lambda engine: EarlyStopping("absent", mode="min", patience=1, first_epoch=9).attach(engine),
], ids=["alone", "History", "EMA", "GradientClip", "LRSchedule", "TimeLimit", "EarlyStopping"])  # fmt: skip
def test_the_host_waits_for_nothing_that_no_handler_asks_for(attach):
    model = nn.Linear(2, 1)

    def step(engine: Engine, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = engine.model(batch).mean().as_subclass(Counting)
        engine.backward(loss)
        engine.update()
        engine.record({"loss": loss})
        return {"loss": loss}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(step, model, optimizer=optimizer, gradient_accumulation_steps=2)
    attach(engine)
    Counting.waits = 0
    engine.run([torch.ones(3, 2).as_subclass(Counting)] * 20, max_epochs=1)
    assert Counting.waits == 0
    float(torch.ones(()).as_subclass(Counting))
    assert Counting.waits == 1  # it does count
