"""What the tests of the promises share: a small training made from one seed, inner runs in it, equality to the bit.

    alone = Training("shuffled").run(epochs=2)
    watched = Training("shuffled").at(Events.EPOCH_COMPLETED, Look()).run(epochs=2)
    assert_equal_to_the_bit(alone.outcome(), watched.outcome())

The net has what looking could disturb: dropout, batch statistics, and a batch norm frozen by hand.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from pellucid.engine import Engine, Events

SAMPLES, BATCH = 14, 3  # five batches an epoch, the last one smaller
STEP_PLACES = ("before the forward", "after the forward", "after the backward", "after the update")
Place = Any  # an event, filtered or not, or a place in the step
Action = Callable[["Training", Engine], None]


class Boom(Exception):
    """An error out of a user's code."""


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


# ---------------------------------------------------------------------- data


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Inputs of shape (6,), classes in 0..2 and the sample's own number; ``noise()`` is added to the inputs."""

    def __init__(self, noise: Callable[[], float] = float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.classes = torch.randint(0, 3, (SAMPLES,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index] + self.noise(), self.classes[index], index


class NoisySamples(Samples):
    """Keeps the generator of its noise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(2)
        self.noise = self.generator.random


class NumpySampler(Sampler[int]):
    """Draws one index after the other from a generator of its own."""

    def __init__(self) -> None:
        self.rng = numpy.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return (int(self.rng.integers(SAMPLES)) for _ in range(SAMPLES))


class PythonSampler(Sampler[int]):
    """Shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.sample(range(SAMPLES), SAMPLES))


class CountingSampler(Sampler[int]):
    """Shuffles by the number of the epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(SAMPLES), SAMPLES))


def global_noise() -> float:
    return random.random() + numpy.random.rand() + torch.rand(()).item()


def _workers(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), BATCH, shuffle=True, num_workers=2, **options)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(Samples(), BATCH),
    "shuffled": lambda: DataLoader(Samples(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(Samples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "numpy sampler": lambda: DataLoader(Samples(), BATCH, sampler=NumpySampler()),
    "python sampler": lambda: DataLoader(Samples(), BATCH, sampler=PythonSampler()),
    "counting sampler": lambda: DataLoader(Samples(), BATCH, sampler=CountingSampler()),
    "noisy data set": lambda: DataLoader(NoisySamples(), BATCH, shuffle=True),
    "global noise": lambda: DataLoader(Samples(global_noise), BATCH, shuffle=True),
}
# with noise from the global random state, a batch that was drawn and not trained on comes out another the next time
REPEATABLE = [name for name in LOADERS if name != "global noise"]
WORKER_LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "two workers": _workers,
    "two workers, own generator": lambda: _workers(generator=torch.Generator().manual_seed(6)),
    "two workers, global noise": lambda: DataLoader(Samples(global_noise), BATCH, shuffle=True, num_workers=2),
    "persistent workers": lambda: _workers(persistent_workers=True),
}


# ---------------------------------------------------------------------- the training


def make_net() -> nn.Sequential:
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
    frozen = nn.BatchNorm1d(8).eval()
    return nn.Sequential(first, nn.Linear(8, 8), frozen, nn.Linear(8, 3))


momentum = partial(SGD, lr=0.1, momentum=0.9)
adam = partial(Adam, lr=0.05)


class Training:
    """A net, its optimizer, its data and the engine that trains it, all made from one seed.

    Args:
        loader: a name in ``LOADERS`` or ``WORKER_LOADERS``, or a function that makes the data.
        optimizer: ``params -> optimizer``.
        seed: of the net, and of everything random that follows.
    """

    def __init__(
        self,
        loader: str | Callable[[], Any] = "shuffled",
        optimizer: Callable[[Any], Optimizer] = momentum,
        seed: int = 0,
    ) -> None:
        seed_everything(seed)
        self.model = make_net()
        self.loader = (LOADERS | WORKER_LOADERS)[loader]() if isinstance(loader, str) else loader()
        # weakly, so that no cycle keeps the loader: one that the collector takes waits for each of its workers
        me = weakref.proxy(self)
        self.engine = Engine(
            partial(Training.step, me), self.model, optimizer=optimizer, state={"seen": 0}, name="train"
        )
        self.samples: dict[int, list[int]] = {}
        self.losses: dict[int, float] = {}
        self._actions: dict[str, list[Action]] = {place: [] for place in STEP_PLACES}
        self._seed: int | None = seed
        self._random = random_states()

    def step(self, engine: Engine, batch: Any) -> torch.Tensor:
        x, y, index = batch
        self._act("before the forward")
        loss = cross_entropy(engine.model(x), y)
        self.samples[engine.state.iteration] = index.tolist()
        self.losses[engine.state.iteration] = loss.item()
        engine.state.seen = engine.state.iteration
        self._act("after the forward")
        engine.backward(loss)
        self._act("after the backward")
        engine.update()
        self._act("after the update")
        return loss

    def at(self, place: Any, action: Action) -> Training:
        """Let ``action(training, engine)`` run at an event, or at a place in the step."""
        if place in self._actions:
            self._actions[place].append(action)
        else:
            me = weakref.proxy(self)
            self.engine.add_event_handler(place, lambda engine, batch: action(me, engine))
        return self

    def _act(self, place: str) -> None:
        for action in self._actions[place]:
            action(self, self.engine)

    def run(self, epochs: int | None = None, data: Any = None, **limits: Any) -> Training:
        """Run, and go on after that; the first run starts from the seed, whatever happened since this was made."""
        if self._seed is not None:
            seed_everything(self._seed)
            self._seed = None
        try:
            self.engine.run(self.loader if data is None else data, epochs, **limits)
        finally:
            self._random = random_states()
        return self

    def saved(self) -> dict[str, Any]:
        """Return everything a checkpoint of this training holds, also while it runs."""
        parts = {"engine": self.engine, "model": self.model, "optimizer": self.engine.optimizer}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, saved: Mapping[str, Any]) -> Training:
        self._seed = None
        self.engine.load_state_dict(saved["engine"])
        self.model.load_state_dict(saved["model"])
        self.engine.optimizer.load_state_dict(saved["optimizer"])
        return self

    def outcome(self, *, since: int = 0, next_epoch: bool = True) -> dict[str, Any]:
        """Return all there is to compare after a run, whenever asked; samples and losses after iteration ``since``."""
        state = self.engine.state
        outcome = {
            "weights": copy.deepcopy(dict(self.model.state_dict())),
            "optimizer": copy.deepcopy(self.engine.optimizer.state_dict()),
            "flags": flags(self.model),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "samples": {iteration: samples for iteration, samples in self.samples.items() if iteration > since},
            "losses": {iteration: loss for iteration, loss in self.losses.items() if iteration > since},
            "counters": (state.epoch, state.iteration, state.epoch_iteration, state.updates, state.seen),
            "random": self._random,
        }
        if next_epoch:
            set_random_states(self._random)
            outcome["samples of the next epoch"] = [batch[2].tolist() for batch in self.loader]
        return outcome


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def random_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}


def set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


# ---------------------------------------------------------------------- inner runs


OTHER = DataLoader(Samples(global_noise), 4, shuffle=True)
BATCHES = list(DataLoader(Samples(), 4))
DATA: dict[str, Callable[[Training], Any]] = {
    "the same": lambda training: training.loader,
    "the same, asked for": lambda training: lambda state: training.loader,
    "other": lambda training: OTHER,
    "other, asked for": lambda training: lambda state: OTHER,
    "a list": lambda training: BATCHES,
    "an iterator": lambda training: iter(BATCHES),
}
ENDINGS = {
    "returns": "completed",
    "terminates": "terminated",
    "interrupts": "interrupted",
    "raises": "failed",
    "is interrupted by Ctrl-C": "interrupted",
}
DEEDS = ("evaluates", "evaluates by hand", "takes gradients", "leaves modes changed", "trains a copy")


@dataclass(frozen=True)
class Look:
    """An inner run: over which data, what it does, how it ends, and the looks inside it.

    Called as an action of a training, or of an inner run of one. Everything it does draws random numbers.
    """

    data: str = "the same"
    does: str = "evaluates"
    ends: str = "returns"
    inside: tuple[tuple[Place, Look], ...] = ()

    def __call__(self, training: Training, outer: Engine) -> None:
        inner = self._engine(training, outer)
        for place, look in self.inside:
            if place not in STEP_PLACES:
                inner.add_event_handler(place, lambda engine, batch, look=look: look(training, engine))
        inner.add_event_handler(Events.ITERATION_COMPLETED, self._end)
        with suppress(Boom, KeyboardInterrupt):
            inner.run(DATA[self.data](training))
        assert inner.state.stop_reason == ENDINGS[self.ends]

    def _engine(self, training: Training, outer: Engine) -> Engine:
        def step(engine: Engine, batch: Any) -> torch.Tensor:
            return self._step(training, engine, batch)

        if self.does == "evaluates by hand":  # as in plain PyTorch: the engine knows nothing of the model
            return Engine(step, mode="eval")
        if outer.model is None:
            outer = training.engine
        if self.does == "trains a copy":
            inner = outer.fork(step, mode="train", model="copy", optimizer=momentum)
            inner.model.requires_grad_()  # should the look around it have frozen the model
            return inner
        return outer.fork(step)

    def _step(self, training: Training, engine: Engine, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        model = engine.model if engine.model is not None else training.model
        self._look(training, engine, "before the forward")
        if self.does == "evaluates by hand":
            model.eval()
        with torch.set_grad_enabled(self.does in ("takes gradients", "trains a copy")):
            loss: torch.Tensor = cross_entropy(model(x), y) + global_noise()
        self._look(training, engine, "after the forward")
        if self.does == "takes gradients" and loss.requires_grad:  # unless the look around it has frozen the model
            loss.backward()
        elif self.does == "trains a copy":
            engine.backward(loss)
            engine.update()
        elif self.does == "leaves modes changed":
            leave_modes_changed(model)
        return loss

    def _look(self, training: Training, engine: Engine, where: str) -> None:
        for place, look in self.inside:
            if place == where and engine.state.iteration <= 2:
                look(training, engine)

    def _end(self, engine: Engine, batch: Any) -> None:
        if engine.state.iteration < 2:
            return
        if self.ends == "terminates":
            engine.terminate()
        elif self.ends == "interrupts":
            engine.interrupt()
        elif self.ends == "raises":
            raise Boom
        elif self.ends == "is interrupted by Ctrl-C":
            raise KeyboardInterrupt


def leave_modes_changed(model: nn.Module) -> None:
    """Do all at once what user code may forget to undo."""
    model.train()
    model.zero_grad(set_to_none=False)
    model.requires_grad_(False)
    torch.set_grad_enabled(not torch.is_grad_enabled())
    seed_everything(99)


# ---------------------------------------------------------------------- stops


def terminate(engine: Engine) -> None:
    engine.terminate()


def interrupt(engine: Engine) -> None:
    engine.interrupt()


def fail(engine: Engine) -> None:
    raise Boom


def press_ctrl_c(engine: Engine) -> None:
    raise KeyboardInterrupt


Verb = Callable[[Engine], None]
VERBS: tuple[Verb, ...] = (terminate, interrupt, fail, press_ctrl_c)
# where two epochs can be stopped so that the batch in work is done or can be done again, and how often they come by
FIRINGS: dict[Place, int] = {
    Events.STARTED: 1,
    Events.EPOCH_STARTED: 2,
    Events.GET_BATCH_STARTED: 10,
    Events.GET_BATCH_COMPLETED: 10,
    Events.ITERATION_STARTED: 10,
    "before the forward": 10,
    Events.UPDATE_COMPLETED: 10,
    "after the update": 10,
    Events.ITERATION_COMPLETED: 10,
    Events.DATALOADER_STOP_ITERATION: 2,
    Events.EPOCH_COMPLETED: 2,
    Events.COMPLETED: 1,
}


def stop_at(
    training: Training, place: Place, firing: int | tuple[int, ...], verb: Callable[[Engine], None]
) -> Training:
    """Let a training be stopped when it comes by a place for the n-th time."""

    def count_and_stop(training: Training, engine: Engine) -> None:
        fired.append(place)
        if len(fired) in (firing if isinstance(firing, tuple) else (firing,)):
            verb(engine)

    fired: list[Place] = []
    return training.at(place, count_and_stop)


def run_on(training: Training, between: Callable[[], None] = lambda: None, epochs: int = 2) -> int:
    """Run to the end, going on after every stop; return how often it was stopped."""
    stops = 0
    while True:
        with suppress(Boom, KeyboardInterrupt):
            training.run(epochs)
        if training.engine.state.stop_reason == "completed":
            return stops
        stops += 1
        between()


# ---------------------------------------------------------------------- equality


def assert_equal_to_the_bit(first: Any, second: Any, where: str = "") -> None:
    """Compare nested values: numbers by their bits, so that 0.0 is not -0.0 and NaN equals itself."""
    if isinstance(first, torch.Tensor | numpy.ndarray):
        assert type(first) is type(second), where
        assert (first.dtype, first.shape) == (second.dtype, second.shape), where
        equal = _bytes(first) == _bytes(second)
        assert equal, f"{where} differs: {first} and {second}"
    elif isinstance(first, Mapping):
        assert list(first) == list(second), where
        for name in first:
            assert_equal_to_the_bit(first[name], second[name], f"{where}[{name!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), f"{where} differs in length: {first!r} and {second!r}"
        for place, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal_to_the_bit(one, other, f"{where}[{place}]")
    else:
        assert repr(first) == repr(second), f"{where} differs: {first!r} and {second!r}"


def _bytes(values: Any) -> bytes:
    array = values.detach().numpy() if isinstance(values, torch.Tensor) else values
    result: bytes = array.tobytes()
    return result
