"""What the tests on ranks share: a small training in one process, and the same one shared out, ours and torch's own.

alone = train_alone(Case(clip=0.1), world_size=2)
ours = run_on_ranks(train_with_engine, 2, Case(clip=0.1))
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from pellucid.engine import DDP, FSDP, Engine, Events
from pellucid.handlers import GradientClip

BATCH = 3
States = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A training: ``steps`` batches make an update; ``weighted`` losses are means over as many items as a batch has."""

    steps: int = 1
    weighted: bool = False
    clip: float | None = None
    batch_norm: bool = False
    precision: str = "32-true"
    epochs: int = 2
    strategy: str = "ddp"
    uneven_sizes: bool = False

    def make_strategy(self, **options: Any) -> Any:
        return {"ddp": DDP, "fsdp": FSDP}[self.strategy](precision=self.precision, **options)


def make_net(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(7)
    middle: list[nn.Module] = [nn.BatchNorm1d(10)] if batch_norm else []
    return nn.Sequential(nn.Linear(6, 10), *middle, nn.Tanh(), nn.Linear(10, 3))


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=generator))


def make_loader(samples: int = 48, batch_size: int = BATCH, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(make_data(samples), batch_size=batch_size, shuffle=shuffle)


def train_step(case: Case) -> Any:
    def step(engine: Engine, batch: Any) -> dict[str, Tensor]:
        inputs, classes = batch
        with engine.autocast():
            loss = cross_entropy(engine.model(inputs), classes)
        engine.backward(loss, weight=len(inputs) if case.weighted else None)
        engine.update()
        return {"loss": loss}

    return step


def train_with_engine(case: Case, samples: int = 48, **options: Any) -> States:
    """Train on this rank, and return the whole weights as every rank has them."""
    net = make_net(case.batch_norm)
    engine = Engine(
        train_step(case),
        net,
        optimizer=make_optimizer(net),
        strategy=case.make_strategy(**options),
        gradient_accumulation_steps=case.steps,
    )
    if case.clip is not None:
        GradientClip(max_norm=case.clip).attach(engine)
    engine.run(make_loader(samples), max_epochs=case.epochs)
    assert engine.model is net
    return {name: value.clone() for name, value in engine.strategy.full_state_dict(net).items()}


def train_alone(case: Case, world_size: int, samples: int = 48) -> States:
    """Train as one process that takes the batches of all ranks at once, in a plain loop."""
    net = make_net(case.batch_norm)
    optimizer = make_optimizer(net)
    autocast = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16-mixed" else nullcontext()
    together = world_size * case.steps
    for _ in range(case.epochs):
        batches = list(make_loader(samples))
        for begin in range(0, len(batches), together):
            window = batches[begin : begin + together]
            items = sum(len(inputs) for inputs, _ in window)
            for inputs, classes in window:
                share = len(inputs) / items if case.weighted else 1 / len(window)
                with autocast:
                    loss = cross_entropy(net(inputs), classes)
                (loss * share).backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def train_with_torch(case: Case, samples: int = 48) -> States:
    """Train on this rank with torch's own wrapper in a plain loop."""
    net = make_net(case.batch_norm)
    optimizer = make_optimizer(net)
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    autocast = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16-mixed" else nullcontext()
    for _ in range(case.epochs):
        batches = list(make_loader(samples))[rank::world_size]
        for number, (inputs, classes) in enumerate(batches, start=1):
            is_due = number % case.steps == 0 or number == len(batches)
            begun = (number - 1) // case.steps * case.steps
            size = min(case.steps, len(batches) - begun)
            with nullcontext() if is_due else wrapped.no_sync():
                with autocast:
                    loss = cross_entropy(wrapped(inputs), classes)
                (loss / size).backward()
            if is_due:
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in net.state_dict().items()}


def seed_differently() -> None:
    """Give each rank a random state of its own."""
    torch.manual_seed(dist.get_rank() + 100)
    random.seed(dist.get_rank() + 100)


def equal_to_the_bit(one: States, other: States) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_close(one: States, other: States, tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name].float(), other[name].float(), rtol=tolerance, atol=tolerance)


__all__ = [
    "BATCH",
    "Case",
    "Events",
    "assert_close",
    "equal_to_the_bit",
    "make_data",
    "make_loader",
    "make_net",
    "make_optimizer",
    "seed_differently",
    "train_alone",
    "train_step",
    "train_with_engine",
    "train_with_torch",
]
