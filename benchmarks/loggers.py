"""What each logger adds to an iteration, on average, where it writes the step's loss at every 100th.

    make bench

Each round runs the same engine with no logger, with each one, and with a handler that calls the same client by hand, in
changing order, so that a busy machine slows all. A figure is the median over the rounds of the time more than without,
with the middle half of them in brackets. Opening and closing, once a run, is left out and shown beside. Exits with 1
where a logger adds more than 2 µs, and more than 2 µs beside its client called by hand: what W&B's client takes for a
point is more than that already.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from pellucid.engine import Engine, Events
from pellucid.handlers import CSVLogger, JSONLinesLogger, MLflowLogger, TensorBoardLogger, WandbLogger

LIMIT_US = 2.0
ROUNDS = 5
ITERATIONS = 20_000
EVERY = 100
NO_LOGGER = "no logger"
BY_HAND = " by hand"

Attach = Callable[[Engine, Path], object]
Times = list[tuple[float, float]]  # seconds of all iterations, and of opening and closing


def main() -> None:
    torch.set_num_threads(1)
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    sides: dict[str, Attach] = {
        NO_LOGGER: lambda engine, folder: None,
        "CSVLogger": lambda engine, folder: CSVLogger(folder / "a.csv", output="loss", every=EVERY).attach(engine),
        "JSONLinesLogger": lambda engine, folder: JSONLinesLogger(
            folder / "a.jsonl", output="loss", every=EVERY
        ).attach(engine),
        "TensorBoardLogger": lambda engine, folder: TensorBoardLogger(folder, output="loss", every=EVERY).attach(
            engine
        ),
        "TensorBoardLogger" + BY_HAND: tensorboard_by_hand,
        "MLflowLogger, files": lambda engine, folder: mlflow_logger(engine, folder.as_uri()),
        "MLflowLogger, files" + BY_HAND: lambda engine, folder: mlflow_by_hand(engine, folder.as_uri()),
        "MLflowLogger, SQLite": lambda engine, folder: mlflow_logger(engine, f"sqlite:///{folder}/a.db"),
        "MLflowLogger, SQLite" + BY_HAND: lambda engine, folder: mlflow_by_hand(engine, f"sqlite:///{folder}/a.db"),
        "WandbLogger, offline": lambda engine, folder: WandbLogger(
            "benchmark", directory=folder, mode="offline", init=quiet_wandb(), output="loss", every=EVERY
        ).attach(engine),
        "WandbLogger, offline" + BY_HAND: wandb_by_hand,
    }
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"every={EVERY}, {ITERATIONS} iterations, median of {ROUNDS} rounds [middle half]\n")
    print(f"{'':24}{'µs more an iteration':>24}{'its client by hand':>24}{'s to open and close':>22}")
    times = measure(sides)
    slow = []
    for name in sides:
        if name == NO_LOGGER or name.endswith(BY_HAND):
            continue
        more = us_more(times, name)
        by_hand = us_more(times, name + BY_HAND) if name + BY_HAND in times else None
        around = median(outside for _, outside in times[name])
        print(f"{name:24}{spread(more):>24}{'' if by_hand is None else spread(by_hand):>24}{around:>22.2f}")
        if median(more) - (0.0 if by_hand is None else max(0.0, median(by_hand))) > LIMIT_US:
            slow.append(name)
    if slow:
        sys.exit(f"\nMore than {LIMIT_US} µs: {', '.join(slow)}")


# ---- the clients, by loggers and by hand


def mlflow_logger(engine: Engine, uri: str) -> object:
    return MLflowLogger(uri, output="loss", every=EVERY).attach(engine)


def mlflow_by_hand(engine: Engine, uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("benchmark")).info.run_id
    write_by_hand(engine, lambda value, step: client.log_metric(run_id, "train/loss", value, step=step))
    engine.add_event_handler(Events.COMPLETED, lambda engine, batch: client.set_terminated(run_id))


def tensorboard_by_hand(engine: Engine, folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    write_by_hand(engine, lambda value, step: writer.add_scalar("train/loss", value, step))
    engine.add_event_handler(Events.COMPLETED, lambda engine, batch: writer.close())


def quiet_wandb() -> dict[str, Any]:
    import wandb

    return {"settings": wandb.Settings(silent=True, console="off")}


def wandb_by_hand(engine: Engine, folder: Path) -> None:
    import wandb

    run = wandb.init(project="benchmark", dir=str(folder), mode="offline", reinit="create_new", **quiet_wandb())
    write_by_hand(engine, lambda value, step: run.log({"train/loss": value}, step=step))
    engine.add_event_handler(Events.COMPLETED, lambda engine, batch: run.finish())


def write_by_hand(engine: Engine, write: Callable[[float, int], object]) -> None:
    @engine.on(Events.ITERATION_COMPLETED(every=EVERY))
    def handler(engine: Engine, batch: Any) -> None:
        write(engine.state.output["loss"].item(), engine.state.iteration)


# ---- measuring


def measure(sides: dict[str, Attach]) -> dict[str, Times]:
    times: dict[str, Times] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):  # the first warms up
        for name in sorted(sides, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(run_once(sides[name], Path(folder)))
    return {name: runs[1:] for name, runs in times.items()}


def run_once(attach: Attach, folder: Path) -> tuple[float, float]:
    loss = torch.tensor(0.5)
    engine = Engine(lambda engine, batch: {"loss": loss})
    gc.collect()
    began = clock()
    attach(engine, folder)
    moments: list[float] = []
    # the first epoch opens the logger; at the end of the second one everything has been sent
    for event in (Events.EPOCH_STARTED(once=2), Events.EPOCH_COMPLETED(once=2)):
        engine.add_event_handler(event, lambda engine, batch: moments.append(clock()), last=True)
    engine.run(lambda state: range(EVERY if state.epoch == 1 else ITERATIONS), max_epochs=2)
    whole = clock() - began
    inside = moments[1] - moments[0]
    return inside, whole - inside


clock: Callable[[], float] = time.perf_counter


def us_more(times: dict[str, Times], name: str) -> list[float]:
    pairs = zip(times[name], times[NO_LOGGER], strict=True)
    return [(mine - plain) / ITERATIONS * 1e6 for (mine, _), (plain, _) in pairs]


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f} {high:.2f}]"


if __name__ == "__main__":
    main()
