"""Traces of runs as plain text: every event that fired, in order, with the counters and the batch its handlers saw.

An entry reads ``ITERATION_STARTED:1/2=b``: the event, the epoch and the iteration, and the batch unless it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pellucid.engine import Engine, Events

DATA_OF_THREE = ["a", "b", "c"]


def entry(name: str, engine: Engine, batch: Any) -> str:
    """One entry of a trace."""
    seen = "" if batch is None else f"={batch}"
    return f"{name}:{engine.state.epoch}/{engine.state.iteration}{seen}"


def trace_of(engine: Engine, *, into: list[str] | None = None, prefix: str = "") -> list[str]:
    """Write every event of ``engine`` down from now on, in the list that is returned."""
    trace = [] if into is None else into

    def writer(name: str) -> Callable[[Engine, Any], None]:
        return lambda engine, batch: trace.append(entry(prefix + name, engine, batch))

    for event in Events:
        engine.add_event_handler(event, writer(event.name))
    return trace


def names_of(trace: Iterable[str]) -> list[str]:
    """The events of a trace alone."""
    return [one.partition(":")[0] for one in trace]


def make_engine(step: Callable[[Engine, Any], Any] = lambda engine, batch: None, **kwargs: Any) -> Engine:
    """An engine without a model."""
    return Engine(step, **kwargs)


def seen_by(step: Callable[[Engine, Any], Any] = lambda engine, batch: None, **kwargs: Any) -> tuple[Engine, list[Any]]:
    """An engine, and the list of the batches whose steps have returned."""
    batches: list[Any] = []

    def noting(engine: Engine, batch: Any) -> Any:
        output = step(engine, batch)
        batches.append(batch)
        return output

    return Engine(noting, **kwargs), batches


def make_trainer(within_step: Callable[[str, Engine], None] = lambda place, engine: None) -> tuple[Engine, list[Any]]:
    """An engine whose step records, calls backward and updates, and the list of the batches whose steps have returned.

    ``within_step`` is called at two places of the step, before the update and after it.
    """

    def step(engine: Engine, batch: Any) -> None:
        engine.record({"half": 0.5})
        within_step("the step before its update", engine)
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        within_step("the step after its update", engine)

    model = nn.Linear(1, 1)
    return seen_by(step, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


class Stated:
    """Data that states one length and holds another; None states none. The ``held`` lengths are those of its passes."""

    def __init__(self, stated: int | None, *held: int) -> None:
        self.stated = stated
        self.held = list(held)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        held = self.held[min(self.passes, len(self.held) - 1)]
        self.passes += 1
        return iter(range(held))

    def __len__(self) -> int:
        if self.stated is None:
            raise TypeError("no length")
        return self.stated
