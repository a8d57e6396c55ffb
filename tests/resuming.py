"""A training with everything in it that has a state, to be stopped anywhere and resumed in new objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.metrics import Average, Loss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from pellucid.engine import Engine, Events, resume
from pellucid.handlers import EMA, Checkpoint, EarlyStopping, History, LRSchedule, Validate

EPOCHS = 4
SAMPLES, BATCH = 22, 6  # four batches an epoch, the last one of four samples
ITERATIONS = 16
STEPS = 3  # batches to an update


class Augmented(Dataset[tuple[Tensor, Tensor, int]]):
    """Draws from every global generator for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise + index, torch.tensor(index % 3), index


def plain_loader() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True)


def loader_with_workers() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=2)


def loader_with_generator() -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def stateful_loader() -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Augmented(), batch_size=BATCH, shuffle=True)


@dataclass
class Training:
    """One training in objects of its own; ``after_validation``: its checkpoints are attached after the validation."""

    directory: Path
    every: Any = Events.ITERATION_COMPLETED
    seed: int = 0
    make_loader: Callable[[], Any] = plain_loader
    after_validation: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        self.seen: list[int] = []
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.engine = Engine(
            self._step,
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            metrics={"train/loss": Average(lambda output: output["loss"])},
            state={"longest": 0},
            gradient_accumulation_steps=STEPS,
        )
        evaluator = Engine(lambda engine, batch: (engine.model(batch[0]), batch[1]), model, mode="eval",
                           metrics={"loss": Loss(cross_entropy)})  # fmt: skip
        self.checkpoint = Checkpoint(self.directory, self.every, **self.options)
        validate = Validate(evaluator, plain_loader(), every=Events.ITERATION_COMPLETED(every=4), prefix="val/")
        for handler in (validate, self.checkpoint) if self.after_validation else (self.checkpoint, validate):
            handler.attach(self.engine)
        self.ema = EMA(decay=0.9).attach(self.engine)
        self.history = History().attach(self.engine)
        EarlyStopping("val/loss", mode="min", patience=50).attach(self.engine)
        LRSchedule(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8), every="update").attach(
            self.engine
        )
        self.loader = self.make_loader()

    def _step(self, engine: Engine, batch: Any) -> dict[str, Tensor]:
        inputs, classes, numbers = batch
        self.seen.extend(numbers.tolist())
        loss = cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        engine.state.longest = max(engine.state.longest, engine.state.iteration)
        return {"loss": loss}

    def run(self) -> None:
        self.engine.run(self.loader, max_epochs=EPOCHS)

    def resume(self) -> Any:
        return resume(self.engine, self.directory)

    def outcome(self) -> dict[str, Any]:
        """What a run that was never stopped has at its end too, but for the samples seen before."""
        optimizer = self.engine.optimizer.state_dict()
        return {
            "weights": self.engine.model.state_dict(),
            "momentum": [state["momentum_buffer"] for state in optimizer["state"].values()],
            "rates": [group["lr"] for group in optimizer["param_groups"]],
            "averages": self.ema.weights(),
            "records": [tuple(row) for row in self.history.rows],
            "metrics": dict(self.engine.state.metrics),
            "counts": (self.engine.state.epoch, self.engine.state.iteration, self.engine.state.updates),
            "longest": self.engine.state.longest,
            "random": torch.get_rng_state(),
        }


def go_on(directory: Path, in_background: bool, result: Path) -> None:
    """Go on where the last process was killed, and leave the outcome: what a process of its own does."""
    torch.set_num_threads(1)
    training = Training(directory, options={"async_save": in_background})
    training.resume()
    training.run()
    torch.save(training.outcome(), result)


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the places at which two outcomes differ by a bit."""
    if isinstance(one, Tensor):
        if not torch.equal(one, other):
            yield where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            yield from differences(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)}"
        else:
            for place, pair in enumerate(zip(one, other, strict=True)):
                yield from differences(*pair, f"{where}/{place}")
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"
