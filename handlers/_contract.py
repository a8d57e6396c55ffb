"""What the checks of ``testing`` are made of: a small training, its outcome, and a comparison to the bit."""

from __future__ import annotations

import copy
import io
import os
import random
import signal
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ..engine import Engine, EventLike, Events, seed_everything

__all__ = [
    "EPOCHS",
    "ContractError",
    "Failure",
    "MakeHandler",
    "SmallTraining",
    "compare",
    "has_state",
    "open_resources",
    "through_a_file",
]

MakeHandler = Callable[[Engine], Any]

EPOCHS = 2
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ContractError(AssertionError):
    """A handler does not keep a part of the contract."""


class Failure(NamedTuple):
    """An error that is raised once: in the third step (no event), or in a handler, attached before or after ours."""

    error: BaseException
    event: Events | None = None
    before: bool = False

    def __str__(self) -> str:
        """Say what happens where."""
        what = type(self.error).__name__
        if self.event is None:
            return f"a {what} in the step"
        return f"a {what} in a handler of {self.event.name} attached {'before' if self.before else 'after'} it"


class SmallTraining:
    """Two epochs of three shuffled batches, with dropout, batch statistics and momentum; with a handler, if made.

    Args:
        make: makes the handler, which is attached.
        seed: of the net, and of everything random that follows.
        failure: happens once.
    """

    def __init__(self, make: MakeHandler | None = None, *, seed: int = 0, failure: Failure | None = None) -> None:
        seed_everything(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.recorded: list[tuple[int, dict[str, Any]]] = []
        self.outcome: dict[str, Any] = {}  # of the last run
        self.samples: list[list[int]] = []
        self.failures = [] if failure is None else [failure]  # still to come
        self.engine = Engine(_step(self.samples, self.failures), self.model, optimizer=optimizer, name="training")
        self.loader = DataLoader(_samples(), 4, shuffle=True)
        _let_fail(self.engine, self.failures, before=True)
        self.handler: Any = None if make is None else make(self.engine)
        if self.handler is not None:
            self.handler.attach(self.engine)
        _let_fail(self.engine, self.failures, before=False)
        self.engine.add_event_handler(Events.EPOCH_COMPLETED, _record_score)
        self.engine.add_event_handler(Events.METRICS_RECORDED, _note(self.recorded))

    def run(self, epochs: int = EPOCHS) -> SmallTraining:
        try:
            self.engine.run(self.loader, max_epochs=epochs)
        finally:
            self.outcome = self._outcome()
        return self

    def stop_at(self, event: EventLike) -> SmallTraining:
        """Terminate the next time that it fires; the run after that goes on."""
        pending = [True]
        self.engine.add_event_handler(event, lambda engine, batch: pending and pending.pop() and engine.terminate())
        return self

    def evaluate_every_iteration(self) -> SmallTraining:
        """Let another engine go over the same loader with the same model, drawing random numbers."""
        model, loader = self.model, self.loader
        evaluator = Engine(lambda engine, batch: model(batch[0]) + torch.rand(()), model, mode="eval", name="inner")
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: evaluator.run(loader))
        return self

    def train_every_iteration(self, inner: SmallTraining) -> SmallTraining:
        """Let another training, of a model of its own, go on by an epoch."""
        self.engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine, batch: inner.run(inner.engine.state.epoch + 1)
        )
        return self

    # ------------------------------------------------------------------ what is saved

    def saved(self) -> dict[str, Any]:
        return {
            "handler": self.state(),
            "engine": self.engine.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "model": self.model.state_dict(),
        }

    def load(self, saved: Mapping[str, Any]) -> SmallTraining:
        if has_state(self.handler):
            self.handler.load_state_dict(saved["handler"])
        self.engine.load_state_dict(saved["engine"])
        self.engine.optimizer.load_state_dict(saved["optimizer"])
        self.model.load_state_dict(saved["model"])
        return self

    # ------------------------------------------------------------------ what comes out

    def state(self) -> Any:
        return self.handler.state_dict() if has_state(self.handler) else None

    def series(self, ignore: Collection[str]) -> list[tuple[int, dict[str, Any]]]:
        """Return what was recorded, with its iteration, but for the names that match a pattern in ``ignore``."""
        kept = [(iteration, _without(values, ignore)) for iteration, values in self.recorded]
        return [(iteration, values) for iteration, values in kept if values]

    def _outcome(self) -> dict[str, Any]:
        state, optimizer, model = self.engine.state, self.engine.optimizer, self.model
        return {
            "weights": copy.deepcopy(dict(model.state_dict())),
            "gradients": copy.deepcopy([parameter.grad for parameter in model.parameters()]),
            "trainable": [parameter.requires_grad for parameter in model.parameters()],
            "modes": {name: module.training for name, module in model.named_modules()},
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "counts": {"epoch": state.epoch, "iteration": state.iteration, "updates": state.updates},
            "samples": self.samples.copy(),
            "random state": _random_state(),
            "grad mode": torch.is_grad_enabled(),
        }

    def listeners(self) -> dict[str, Any]:
        """Return what a handler leaves behind: handlers of events, and hooks of torch."""
        modules = dict(self.model.named_modules()).items()
        return {
            # without those events that nobody listens to: one that the handler has registered stays
            "handlers": "\n".join(line for line in str(self.engine.describe()).splitlines() if not line.endswith(" -")),
            "hooks": {name or "model": [len(getattr(module, kind, ())) for kind in _HOOKS] for name, module in modules},
        }


# what is attached to the engine, and its step, keep no training alive


def _step(samples: list[list[int]], failures: list[Failure]) -> Callable[[Engine, Any], dict[str, Tensor]]:
    def step(engine: Engine, batch: Any) -> dict[str, Tensor]:
        if engine.state.iteration == 3 and failures and failures[0].event is None:
            raise failures.pop().error
        inputs, classes, indices = batch
        samples.append(indices.tolist())
        loss = F.cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        engine.record({"loss": loss})
        return {"loss": loss}

    return step


def _let_fail(engine: Engine, failures: list[Failure], *, before: bool) -> None:
    def fail(engine: Engine, batch: Any) -> None:
        if failures:
            raise failures.pop().error

    for failure in failures:
        if failure.event is not None and failure.before == before:
            engine.add_event_handler(failure.event, fail)


def _record_score(engine: Engine, batch: Any) -> None:
    engine.record({"score": 1.0 / engine.state.epoch})


def _note(recorded: list[tuple[int, dict[str, Any]]]) -> Callable[[Engine, Any], None]:
    def note(engine: Engine, batch: Any) -> None:
        record = engine.state.last_record
        assert record is not None, "METRICS_RECORDED comes with a record"
        recorded.append((record.iteration, dict(record.values)))

    return note


def _samples() -> TensorDataset:
    """Eleven samples, each ``(inputs of shape (4,), class 0 or 1, index)``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(11, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 2, (11,), generator=generator), torch.arange(11))


def _random_state() -> dict[str, int]:
    """Return a number for each generator, which is shorter to tell than its state."""
    numpy = sys.modules.get("numpy")
    states = {
        "torch": torch.get_rng_state().tolist(),
        "Python": random.getstate(),
        "NumPy": None if numpy is None else [part.tolist() for part in numpy.random.get_state()[1:2]],
    }
    return {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}


def open_resources() -> set[str]:
    """Return what this process holds now: threads, files it has open, and what it does at each signal."""
    threads = {f"the thread {thread.name!r} ({thread.ident})" for thread in threading.enumerate()}
    handlers = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    signals = {f"{handler!r} for signal {int(number)}" for number, handler in handlers if callable(handler)}
    return threads | signals | _open_files()


def _open_files() -> set[str]:
    """Return ordinary files only: sockets and pipes are often kept by a library for all its users."""
    if not os.path.isdir("/dev/fd"):  # Windows
        return set()
    found = set()
    for number in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(number))
        except OSError:  # that of the listing itself
            continue
        if stat.S_ISREG(status.st_mode):
            found.add(f"the file {_path_of(number)} (descriptor {number}, inode {status.st_ino})")
    return found


def _path_of(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:  # there is no such folder on macOS
        return "of unknown name"


# ---------------------------------------------------------------------- states and comparison


def has_state(handler: Any) -> bool:
    """Say whether a handler is saved and resumed.

    Raises:
        ContractError: it can be saved only, or resumed only.
    """
    saves, loads = (callable(getattr(handler, name, None)) for name in ("state_dict", "load_state_dict"))
    if saves != loads:
        missing = "load_state_dict" if saves else "state_dict"
        raise ContractError(f"{handler!r}: {missing}() is missing: a checkpoint needs both, or neither")
    return saves


def through_a_file(state: Any, handler: Any) -> Any:
    """Return ``state`` as it comes back from a file.

    Raises:
        ContractError: a weights-only loader does not read it.
    """
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as error:  # what cannot be pickled raises all kinds
        raise ContractError(
            f"{handler!r}: state_dict() has what a weights-only loader does not read: keep tensors, numbers, texts, "
            f"lists and dicts in it ({error})"
        ) from error


def compare(what: str, wanted: Any, got: Any, ignore: Collection[str] = ()) -> None:
    """Compare two values to the bit; keys of mappings that match a pattern in ``ignore`` are left out.

    Raises:
        ContractError: they differ; the message begins with ``what`` and names the first place.
    """
    difference = next(_differences(wanted, got, "", ignore), None)
    if difference is not None:
        raise ContractError(f"{what}: {difference}")


def _differences(wanted: Any, got: Any, where: str, ignore: Collection[str]) -> Iterator[str]:
    place = where or "it"
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        if not _are_same_tensors(wanted, got):
            yield f"{place} is {_shown(got)} and not {_shown(wanted)}"
    elif isinstance(wanted, Mapping) and isinstance(got, Mapping):
        wanted, got = _without(wanted, ignore), _without(got, ignore)
        if set(wanted) != set(got):
            yield f"{place} has the keys {sorted(map(str, got))} and not {sorted(map(str, wanted))}"
        for key in (key for key in wanted if key in got):
            yield from _differences(wanted[key], got[key], f"{where}[{key!r}]", ignore)
    elif isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        for number, pair in enumerate(zip(wanted, got, strict=False)):
            yield from _differences(*pair, f"{where}[{number}]", ignore)
        if len(wanted) != len(got):
            yield f"{place} has {len(got)} entries and not {len(wanted)}"
    elif repr(wanted) != repr(got):  # so that NaN equals itself, and 0.0 is not -0.0
        yield f"{place} is {got!r} and not {wanted!r}"


def _without(mapping: Mapping[Any, Any], ignore: Collection[str]) -> dict[Any, Any]:
    return {
        key: value
        for key, value in mapping.items()
        if not any(isinstance(key, str) and fnmatchcase(key, pattern) for pattern in ignore)
    }


def _shown(tensor: Tensor) -> str:
    if tensor.numel() <= 8:
        return str(tensor)
    return f"a tensor of shape {tuple(tensor.shape)} and norm {tensor.double().norm().item()!r}"


def _are_same_tensors(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits = [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)
