"""What the engine costs in time, each figure beside what it replaces, measured in the same run.

    make bench

The two sides take turns, round by round, so that a busy machine slows both. A figure is the median over all rounds,
with the middle half of them in brackets. Exits with 1 where an empty iteration costs more than half of Ignite's.
"""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

import ignite
import torch
from ignite.engine import Engine as IgniteEngine
from ignite.engine import Events as IgniteEvents
from torch import nn
from torch.nn import functional as F

from pellucid.engine import Engine, Events

LIMIT = 0.5  # of Ignite's time for an empty iteration
ROUNDS = 15
EMPTY_ITERATIONS = 5_000
TRAINING_ITERATIONS = 500
INNER_RUNS = 20
FEW_MODULES, MANY_MODULES = 10, 510

Run = Callable[[], object]
Times = list[float]  # µs for one iteration or inner run, one figure a round


def main() -> None:
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, Ignite {ignite.__version__}")
    print(f"µs, median of {ROUNDS} rounds [middle half]\n")
    print(f"{'':36}{'pellucid':>24}{'beside':>24}{'ratio':>20}")
    empty = {
        "empty iteration": compare_empty(handlers=0),
        "  five handlers": compare_empty(handlers=5),
        "  five handlers, every=100": compare_empty(handlers=5, every=100),
    }
    for what, sides in empty.items():
        show(what, sides, "Ignite")
    show("training iteration, tiny model", compare_training(step_with_verbs), "plain loop")
    show("  plain calls in the step", compare_training(step_with_plain_calls), "plain loop")
    few, many = compare_inner_runs()
    show(f"inner run, {FEW_MODULES} modules", few, "model.eval() and back")
    show("  each further module", [*map(per_module, few, many)], "model.eval() and back")

    slow = [what.strip() for what, sides in empty.items() if median(ratios(*sides)) > LIMIT]
    if slow:
        sys.exit(f"\nMore than {LIMIT} of Ignite's time: {', '.join(slow)}")


# ---- measuring


def take_turns(repeats: int, *sides: Callable[[], Run]) -> list[Times]:
    """Time every side once a round; what it prepares is not timed, and a first round warms up."""
    times: list[Times] = [[] for _ in sides]
    turns = list(zip(sides, times, strict=True))
    for _ in range(ROUNDS + 1):
        turns.reverse()
        for prepare, measured in turns:
            run = prepare()
            gc.collect()
            start = time.perf_counter()
            run()
            measured.append((time.perf_counter() - start) / repeats * 1e6)
    return [measured[1:] for measured in times]


def ratios(ours: Times, theirs: Times) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def per_module(few: Times, many: Times) -> Times:
    return [(b - a) / (MANY_MODULES - FEW_MODULES) for a, b in zip(few, many, strict=True)]


def show(what: str, sides: list[Times], beside: str) -> None:
    ours, theirs = sides
    print(f"{what:36}{spread(ours):>24}{spread(theirs):>24}{spread(ratios(ours, theirs)):>20}  {beside}", flush=True)


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


# ---- an iteration in which nothing is done


def compare_empty(handlers: int, every: int | None = None) -> list[Times]:
    sides = partial(empty_run, handlers, every), partial(empty_run_of_ignite, handlers, every)
    return take_turns(EMPTY_ITERATIONS, *sides)


def empty_run(handlers: int, every: int | None) -> Run:
    engine = Engine(lambda engine, batch: None)
    event = Events.ITERATION_COMPLETED
    for _ in range(handlers):
        engine.add_event_handler(event(every=every) if every else event, lambda engine, batch: None)
    return lambda: engine.run(range(EMPTY_ITERATIONS), max_epochs=1)


def empty_run_of_ignite(handlers: int, every: int | None) -> Run:
    engine = IgniteEngine(lambda engine, batch: None)
    event = IgniteEvents.ITERATION_COMPLETED
    for _ in range(handlers):
        engine.add_event_handler(event(every=every) if every else event, lambda engine: None)
    return lambda: engine.run(range(EMPTY_ITERATIONS), max_epochs=1)


# ---- an iteration that trains


def compare_training(step: Callable[[Engine, Any], Any]) -> list[Times]:
    return take_turns(TRAINING_ITERATIONS, partial(training_run, step), plain_loop)


def tiny_model() -> tuple[nn.Module, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = nn.Linear(8, 1)
    data = [(torch.ones(4, 8), torch.ones(4, 1))] * TRAINING_ITERATIONS
    return model, torch.optim.SGD(model.parameters(), lr=0.01), data


def training_run(step: Callable[[Engine, Any], Any]) -> Run:
    model, optimizer, data = tiny_model()
    engine = Engine(step, model, optimizer=optimizer)
    return lambda: engine.run(data, max_epochs=1)


def step_with_verbs(engine: Engine, batch: Any) -> None:
    x, y = batch
    engine.backward(F.mse_loss(engine.model(x), y))
    engine.update()


def step_with_plain_calls(engine: Engine, batch: Any) -> None:
    x, y = batch
    F.mse_loss(engine.model(x), y).backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def plain_loop() -> Run:
    model, optimizer, data = tiny_model()

    def loop() -> None:
        for x, y in data:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


# ---- an evaluation inside a run


def compare_inner_runs() -> tuple[list[Times], list[Times]]:
    sides = [partial(run, modules) for modules in (FEW_MODULES, MANY_MODULES) for run in (inner_runs, eval_and_back)]
    times = take_turns(INNER_RUNS, *sides)
    return times[:2], times[2:]


def inner_runs(modules: int) -> Run:
    model = nn.Sequential(*(nn.Identity() for _ in range(modules - 1)))
    evaluator = Engine(lambda engine, batch: None, model, mode="eval")
    trainer = Engine(lambda engine, batch: evaluator.run([None]), model)
    return lambda: trainer.run(range(INNER_RUNS), max_epochs=1)


def eval_and_back(modules: int) -> Run:
    model = nn.Sequential(*(nn.Identity() for _ in range(modules - 1)))

    def loop() -> None:
        for _ in range(INNER_RUNS):
            model.eval()
            with torch.no_grad():
                pass
            model.train()

    return loop


if __name__ == "__main__":
    main()
