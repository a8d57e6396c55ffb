"""What ``engine.backward`` and ``engine.update`` cost in time, beside the plain calls of PyTorch.

    .venv/bin/python benchmarks/updates.py

In every iteration two tiny models are trained, one by the engine's verbs and one by plain calls, and which comes first
changes, so that a busy machine slows both. A figure is the median over all iterations, with the middle half in
brackets. Exits with 1 where the verbs take more than 3 µs longer.
"""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from pellucid.engine import Engine, SingleDevice

LIMIT = 3.0  # µs more than the plain calls
ROUNDS = 6
ITERATIONS = 3_000
WARM_UP = 300
WINDOW = 4

Ours = Callable[[Engine, Tensor], float]
Plain = Callable[[Tensor, Optimizer, bool], float]
Times = list[float]  # µs for one iteration


def main() -> None:
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"µs, median of {ROUNDS * (ITERATIONS - WARM_UP)} iterations [middle half]\n")
    print(f"{'':40}{'pellucid':>24}{'plain':>24}{'more':>24}")
    verbs = compare(time_verbs, time_plain_calls)
    show("backward, update", *verbs)
    show("  only backward", *compare(time_backward, time_plain_backward))
    show("  the engine's own part: beside its calls", *compare(time_verbs, time_bare_calls))
    show(f"windows of {WINDOW} batches, each batch", *compare(time_verbs, time_plain_window, WINDOW))

    more = median(differences(*verbs))
    if more > LIMIT:
        sys.exit(f"\n{more:.2f} µs longer than the plain calls, and {LIMIT} were promised at most.")


# ---- measuring


def compare(ours: Ours, plain: Plain, steps: int = 1) -> tuple[Times, Times]:
    """Return what each iteration took by the engine's verbs and by plain calls; windows as means over their batches."""
    times: tuple[Times, Times] = ([], [])
    for _ in range(ROUNDS):
        gc.collect()
        for all_rounds, this_round in zip(times, one_round(ours, plain, steps), strict=True):
            windows = [this_round[i : i + steps] for i in range(WARM_UP, ITERATIONS, steps)]
            all_rounds += [sum(window) / steps * 1e6 for window in windows]
    return times


def one_round(ours: Ours, plain: Plain, steps: int) -> tuple[Times, Times]:
    x, y = torch.ones(4, 8), torch.ones(4, 1)
    net, optimizer = tiny_model()
    times: tuple[Times, Times] = ([], [])

    def step(engine: Engine, place: int) -> None:
        for side in (0, 1) if place // steps % 2 else (1, 0):
            if side == 0:
                taken = ours(engine, F.mse_loss(engine.model(x), y))
            else:
                taken = plain(F.mse_loss(net(x), y), optimizer, (place + 1) % steps == 0)
            times[side].append(taken)

    model, own = tiny_model()
    engine = Engine(step, model, optimizer=own, strategy=SingleDevice("cpu"), gradient_accumulation_steps=steps)
    engine.run(range(ITERATIONS))
    return times


def tiny_model() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(8, 1)
    return model, SGD(model.parameters(), lr=0.01)


def differences(ours: Times, plain: Times) -> list[float]:
    return [a - b for a, b in zip(ours, plain, strict=True)]


def show(what: str, ours: Times, plain: Times) -> None:
    print(f"{what:40}{spread(ours):>24}{spread(plain):>24}{spread(differences(ours, plain)):>24}", flush=True)


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


# ---- what is measured: from a loss to the weights, in seconds


def time_verbs(engine: Engine, loss: Tensor) -> float:
    start = perf_counter()
    engine.backward(loss)
    engine.update()
    return perf_counter() - start


def time_plain_calls(loss: Tensor, optimizer: Optimizer, due: bool) -> float:
    start = perf_counter()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return perf_counter() - start


def time_plain_window(loss: Tensor, optimizer: Optimizer, due: bool) -> float:
    start = perf_counter()
    (loss / WINDOW).backward()
    if due:
        optimizer.step()
        optimizer.zero_grad()
    return perf_counter() - start


def time_backward(engine: Engine, loss: Tensor) -> float:
    start = perf_counter()
    engine.backward(loss)
    taken = perf_counter() - start
    engine.update()
    return taken


def time_plain_backward(loss: Tensor, optimizer: Optimizer, due: bool) -> float:
    start = perf_counter()
    loss.backward()
    taken = perf_counter() - start
    optimizer.step()
    optimizer.zero_grad()
    return taken


def time_bare_calls(loss: Tensor, optimizer: Optimizer, due: bool) -> float:
    """Make the calls of PyTorch that the engine makes: it drops the gradients itself."""
    start = perf_counter()
    loss.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    return perf_counter() - start


if __name__ == "__main__":
    main()
