"""What the tests of updates share: a small training in accumulation windows, and the plain loop it has to equal.

by_hand = train_by_hand(make_batches(5), windows_of(5, 2))
assert_same(Updating(steps=2).run(make_batches(5)).outcome(), by_hand)
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset

from pellucid.engine import Engine, Events, SingleDevice, StateView

Batch = tuple[Tensor, Tensor]
EPOCHS = 2
STEP_PLACES = ("before the forward", "after the forward", "after the backward", "after the update")
momentum = partial(SGD, lr=0.1, momentum=0.9)


class Boom(Exception):
    """An error out of a user's code."""


# ---------------------------------------------------------------------- data


def make_batches(count: int, sizes: tuple[int, ...] = (3,)) -> list[Batch]:
    """Return batches of these sizes, one after the other and round again."""
    generator = torch.Generator().manual_seed(1)
    shapes = [sizes[i % len(sizes)] for i in range(count)]
    return [(torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator)) for n in shapes]


class Stated:
    """Batches whose number is stated as another one."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Stream(IterableDataset[Batch]):
    """The same batches one by one, of unknown number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Batch]:
        return iter(make_batches(self.count))


TOO_SHORT = "a length stated too short"
DATA: dict[str, Callable[[int], Any]] = {
    "a list": make_batches,
    "a callable": lambda count: lambda state: iter(make_batches(count)),
    "a loader of a stream": lambda count: DataLoader(Stream(count), batch_size=None),
    "a length stated too long": lambda count: Stated(make_batches(count), count + 3),
    TOO_SHORT: lambda count: Stated(make_batches(count), count - 2),
}


def windows_of(count: int, steps: int, kind: str = "a list") -> list[range]:
    """Return which batches of an epoch, counted from 0, make each update."""
    stated = count - 2 if kind == TOO_SHORT else count
    starts = [*range(0, stated, steps), *range(stated, count, steps)]
    return [range(first, end) for first, end in zip(starts, [*starts[1:], count], strict=True)]


# ---------------------------------------------------------------------- two trainings


def make_net(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def train_by_hand(
    data: Iterable[Batch], windows: Iterable[range], dropout: float = 0.2, epochs: int = EPOCHS
) -> dict[str, Any]:
    """Train as ten lines of plain PyTorch do, which know of every window how many batches are in it."""
    net = make_net(dropout)
    optimizer = momentum(net.parameters())
    window_of = {place: window for window in windows for place in window}
    torch.manual_seed(2)
    made = []
    for epoch in range(epochs):
        for place, (x, y) in enumerate(data):
            window = window_of[place]
            (mse_loss(net(x), y) / len(window)).backward()
            if place == window[-1]:
                optimizer.step()
                optimizer.zero_grad()
                made.append(epoch * len(window_of) + place + 1)
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "updated in": made, "scale": {}}


Action = Callable[["Updating", Engine], None]


class Updating:
    """A net, its optimizer, and the engine that trains it in windows of ``steps`` batches.

    Args:
        steps: batches in a window.
        dropout: 0 where a batch has to come out the same when it is repeated.
        weight: what ``backward`` is told of a batch, from the batch.
        precision: of the strategy.
    """

    def __init__(
        self,
        steps: int,
        dropout: float = 0.2,
        weight: Callable[[Batch], Any] = lambda batch: None,
        precision: str = "32-true",
    ) -> None:
        self.net = make_net(dropout)
        self.weight = weight
        scaler = {"init_scale": 64.0, "growth_interval": 2} if precision == "16-mixed" else None
        strategy = SingleDevice("cpu", precision=precision, scaler=scaler)
        self.engine = Engine(
            self.step, self.net, optimizer=momentum, strategy=strategy, gradient_accumulation_steps=steps
        )
        self.updated_in: list[int] = []
        self.actions: dict[str, list[Action]] = {place: [] for place in STEP_PLACES}
        self.engine.add_event_handler(Events.UPDATE_COMPLETED, self._note)
        torch.manual_seed(2)

    def step(self, engine: Engine, batch: Batch) -> Tensor:
        x, y = batch
        self._act("before the forward")
        with engine.autocast():
            loss = mse_loss(engine.model(x).float(), y)
        self._act("after the forward")
        engine.backward(loss, weight=self.weight(batch))
        self._act("after the backward")
        engine.update()
        self._act("after the update")
        return loss

    def at(self, place: Any, action: Action) -> Updating:
        """Let ``action(training, engine)`` run at an event, or at a place in the step."""
        if place in self.actions:
            self.actions[place].append(action)
        else:
            self.engine.add_event_handler(place, lambda engine, batch: action(self, engine))
        return self

    def _act(self, place: str) -> None:
        for action in self.actions[place]:
            action(self, self.engine)

    def _note(self, engine: Engine, batch: Any) -> None:
        self.updated_in.append(engine.state.iteration)

    def run(self, data: Any, epochs: int | None = EPOCHS, **limits: Any) -> Updating:
        self.engine.run(data, epochs, **limits)
        return self

    def saved(self) -> bytes:
        """Return a file with everything a checkpoint of this training holds, also while it runs."""
        file = io.BytesIO()
        parts = {"engine": self.engine, "net": self.net, "optimizer": self.engine.optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()} | {"made": self.updated_in}, file)
        return file.getvalue()

    def load(self, file: bytes) -> Updating:
        saved = torch.load(io.BytesIO(file), weights_only=True)
        self.engine.load_state_dict(saved["engine"])
        self.net.load_state_dict(saved["net"])
        self.engine.optimizer.load_state_dict(saved["optimizer"])
        self.updated_in = list(saved["made"])
        return self

    def outcome(self) -> dict[str, Any]:
        """Return what there is to compare after a run, and look that no gradient was left."""
        state: StateView = self.engine.state
        assert [parameter.grad for parameter in self.net.parameters()] == [None] * 4
        assert state.updates == state.updates_by_optimizer["optimizer"] == len(self.updated_in)
        weights, optimizer = self.net.state_dict(), self.engine.optimizer.state_dict()
        scale = self.engine.state_dict()["gradients"]["scale"]
        return copy.deepcopy({"net": weights, "optimizer": optimizer, "updated in": self.updated_in, "scale": scale})


# ---------------------------------------------------------------------- equality


def assert_same(first: Any, second: Any, tolerance: float = 0.0, where: str = "") -> None:
    """Compare nested values, tensors to the bit unless a tolerance is given."""
    if isinstance(first, Tensor):
        equal = (
            torch.allclose(first, second, rtol=tolerance, atol=tolerance) if tolerance else torch.equal(first, second)
        )
        assert equal, f"{where} differs: {first} and {second}"
    elif isinstance(first, Mapping):
        assert first.keys() == second.keys(), where
        for name in first:
            assert_same(first[name], second[name], tolerance, f"{where}[{name!r}]")
    else:
        assert first == second, f"{where} differs: {first!r} and {second!r}"
