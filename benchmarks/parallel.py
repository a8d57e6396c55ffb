"""What an update costs on two ranks, beside torch's own wrappers in a plain loop.

    .venv/bin/python benchmarks/parallel.py

Two processes on this machine, over gloo. Each round trains a small net by the engine and by a plain loop, and which
comes first changes, so that a busy machine slows both. A figure is the median time from one update to the next, on rank
0, over all rounds; the ratio is that of each round's medians, of which the median is shown. Exits with 1 where the
engine takes more than 1.05 times as long.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from pellucid.engine import FSDP, Engine, Events, already_sharded, launch

LIMIT = 1.05
ROUNDS = 40  # of a busy machine's ratios, the median of fewer is off by several hundredths
BATCHES = 150  # in a round
WARM_UP = 30
WIDTH, BATCH = 256, 64
RANKS = 2

Batch = tuple[Tensor, Tensor]
Trainer = Callable[[str, int, list[Batch]], list[float]]


def main() -> None:
    rounds = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rounds.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    results = launch(measure, rounds.parse_args().rounds, nprocs=RANKS)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {RANKS} ranks over gloo")
    print(f"{'':24}{'pellucid':>12}{'torch':>12}{'ratio':>10}")
    for name, (ours, plain, ratio) in results.items():
        print(f"{name:24}{ours * 1e6:9.0f} µs{plain * 1e6:9.0f} µs{ratio:10.3f}")
    worst = max(ratio for _, _, ratio in results.values())
    if worst > LIMIT:
        sys.exit(f"\nThe engine took {worst:.3f} times as long as the plain loop, and {LIMIT} were promised at most.")


def measure(rounds: int) -> dict[str, tuple[float, float, float]]:
    torch.set_num_threads(1)
    return {
        "ddp": compare("ddp", 1, rounds),
        "ddp, windows of 4": compare("ddp", 4, rounds),
        "fsdp": compare("fsdp", 1, max(1, rounds // 3)),
    }


def compare(strategy: str, steps: int, rounds: int) -> tuple[float, float, float]:
    batches = make_batches()
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        gc.collect()
        pair: list[tuple[Trainer, list[float]]] = [(train_with_engine, times[0]), (train_with_torch, times[1])]
        for trainer, found in pair if number % 2 else reversed(pair):
            ends = trainer(strategy, steps, batches)[WARM_UP:]
            found.append(median(end - begin for begin, end in pairwise(ends)))
    ratios = [one / other for one, other in zip(*times, strict=True)]
    return median(times[0]), median(times[1]), median(ratios)


def train_with_engine(strategy: str, steps: int, batches: list[Batch]) -> list[float]:
    """Train by the engine; return when each update was done."""
    ends: list[float] = []
    engine = Engine(
        step,
        make_net(),
        optimizer=lambda params: SGD(params, lr=0.01),
        strategy=FSDP(shard=nn.Linear) if strategy == "fsdp" else strategy,
        gradient_accumulation_steps=steps,
    )
    event = Events.UPDATE_COMPLETED if steps > 1 else Events.ITERATION_COMPLETED
    engine.add_event_handler(event, lambda engine, batch: ends.append(perf_counter()))
    engine.run(already_sharded(batches))
    return ends


def step(engine: Engine, batch: Any) -> None:
    inputs, classes = batch
    engine.backward(cross_entropy(engine.model(inputs), classes))
    engine.update()


def train_with_torch(strategy: str, steps: int, batches: list[Batch]) -> list[float]:
    """Train by a plain loop around torch's own wrapper; return when each update was done."""
    net = make_net()
    ends: list[float] = []
    wrapped: Any
    if strategy == "fsdp":
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        wrapped = fully_shard(net)
    else:
        wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = SGD(wrapped.parameters(), lr=0.01)
    for number, (inputs, classes) in enumerate(batches, start=1):
        is_due = number % steps == 0
        if strategy == "ddp":
            wrapped.require_backward_grad_sync = is_due
        loss = cross_entropy(wrapped(inputs), classes)
        (loss / steps if steps > 1 else loss).backward()
        if is_due:
            optimizer.step()
            optimizer.zero_grad()
            ends.append(perf_counter())
    return ends


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [64, WIDTH, WIDTH, WIDTH, 10]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_batches() -> list[Batch]:
    return [(torch.randn(BATCH, 64), torch.randint(0, 10, (BATCH,))) for _ in range(BATCHES)]


if __name__ == "__main__":
    main()
