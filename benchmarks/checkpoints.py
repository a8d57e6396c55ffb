"""How long a save holds the training loop, beside a plain ``torch.save`` of the same state.

    .venv/bin/python benchmarks/checkpoints.py

A model of 100 MB, an optimizer with momentum, so 200 MB are saved. Each round saves the same state by ``torch.save``
into one file, by ``Checkpoint``, and by ``Checkpoint(async_save=True)``, in changing order; a figure is the median over
the rounds of the time that the loop waits. ``torch.save`` leaves the bytes in the system's cache; "on the disk" waits
for them as a checkpoint does, which also takes the checksums of its files. Prints only: a disk is what it is.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from pellucid.engine import Engine, Events
from pellucid.handlers import Checkpoint

ROUNDS = 7
LAYERS, WIDTH = 25, 1024  # of 4 MB each

NEVER = Events.ITERATION_COMPLETED(once=10**9)


def main() -> None:
    rounds = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rounds.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), rounds.parse_args().rounds)
    print(f"Python {platform.python_version()}, torch {torch.__version__}: 100 MB of weights, 200 MB in all")
    for name, seconds in times.items():
        print(f"{name:34}{median(seconds) * 1e3:9.0f} ms")


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    engine = make_engine()
    plain = Checkpoint(folder / "plain", NEVER)
    background = Checkpoint(folder / "background", NEVER, async_save=True)
    savers: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: save_plainly(engine, folder / "plain.pt", on_disk=False),
        "torch.save, on the disk": lambda: save_plainly(engine, folder / "plain.pt", on_disk=True),
        "Checkpoint": lambda: plain.save(engine),
        "Checkpoint(async_save=True)": lambda: background.save(engine),
    }
    times: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(rounds):
        for name in sorted(savers, reverse=bool(number % 2)):
            began = perf_counter()
            savers[name]()
            times[name].append(perf_counter() - began)
            background.wait()
    return times


def make_engine() -> Engine:
    def step(engine: Engine, batch: Any) -> None:
        engine.backward(engine.model(batch).mean())
        engine.update()

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    engine = Engine(step, model, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9), strategy="single")
    engine.run([torch.randn(2, WIDTH)])
    return engine


def save_plainly(engine: Engine, path: Path, on_disk: bool) -> None:
    torch.save([engine.model.state_dict(), engine.optimizer.state_dict(), engine.state_dict()], path)
    if on_disk:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
