"""What the tests of loggers share: each back end, real, and a reader of what it has written that is not ours."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
from ignite.metrics import Average

from pellucid.engine import Engine, Events
from pellucid.handlers import (
    CSVLogger,
    JSONLinesLogger,
    MLflowLogger,
    TensorBoardLogger,
    Validate,
    WandbLogger,
)

Point = tuple[int, str, float]  # iteration, name, value


@dataclass(frozen=True)
class BackEnd:
    """How to make a logger that writes into a folder, and how to read all points that are there, by name."""

    name: str
    make: Callable[..., Any]
    read: Callable[[Path], list[Point]]


def read_csv(folder: Path) -> list[Point]:
    table = pandas.read_csv(folder / "metrics.csv")
    return list(zip(table["iteration"], table["name"], table["value"], strict=True))


def read_json_lines(folder: Path) -> list[Point]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["iteration"], row["name"], row["value"]) for row in rows]


def read_tensorboard(folder: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    # files of one second are read in no certain order
    points = [(event.wall_time, event.step, name, event.value) for name in names for event in events.Scalars(name)]
    return [point[1:] for point in sorted(points)]


def read_mlflow(folder: Path) -> list[Point]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_uri(folder))
    points = []
    for run in client.search_runs([one.experiment_id for one in client.search_experiments()]):
        for name in run.data.metrics:
            points += [(one.step, name, one.value) for one in client.get_metric_history(run.info.run_id, name)]
    return points


def mlflow_uri(folder: Path) -> str:
    return (folder / "mlruns").as_uri()


def read_wandb(folder: Path) -> list[Point]:
    points = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in wandb_records(path):
            if not record.HasField("history"):
                continue
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = items["_step"]
            points += [(step, name, value) for name, value in items.items() if not name.startswith("_")]
    return points


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline run, whose file is a sequence of protobuf messages in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, block, begin, message, records = path.read_bytes(), 32768, 7, b"", []
    while begin + 7 <= len(data):
        if block - begin % block < 7:
            begin += block - begin % block
            continue
        _, length, kind = struct.unpack("<IHB", data[begin : begin + 7])
        message += data[begin + 7 : begin + 7 + length]
        begin += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return records


def make_wandb(folder: Path, **arguments: Any) -> WandbLogger:
    import wandb

    quiet = {"settings": wandb.Settings(silent=True, console="off", x_disable_stats=True)}
    return WandbLogger("tests", directory=folder, mode="offline", init=quiet, **arguments)


CSV = BackEnd("csv", lambda folder, **arguments: CSVLogger(folder / "metrics.csv", **arguments), read_csv)
JSON_LINES = BackEnd(
    "json lines", lambda folder, **arguments: JSONLinesLogger(folder / "metrics.jsonl", **arguments), read_json_lines
)
TENSORBOARD = BackEnd(
    "tensorboard", lambda folder, **arguments: TensorBoardLogger(folder / "tensorboard", **arguments), read_tensorboard
)
MLFLOW = BackEnd("mlflow", lambda folder, **arguments: MLflowLogger(mlflow_uri(folder), **arguments), read_mlflow)
WANDB = BackEnd("wandb", make_wandb, read_wandb)
BACK_ENDS = [CSV, JSON_LINES, TENSORBOARD, MLFLOW, WANDB]


def of_name(points: list[Point], wanted: str) -> list[tuple[int, float]]:
    return [(step, value) for step, name, value in points if name == wanted]


def make_trainer(step: Any = lambda engine, batch: {"loss": float(engine.state.iteration)}) -> Engine:
    return Engine(step)


def make_evaluator(**arguments: Any) -> Engine:
    return Engine(lambda engine, batch: batch, mode="eval", metrics={"score": Average()}, **arguments)


def validate(trainer: Engine, evaluator: Engine, every: int = 3) -> None:
    event = Events.ITERATION_COMPLETED(every=every)
    Validate(evaluator, [1.0, 2.0], every=event, prefix="val/").attach(trainer)
