"""How fast a run goes, and how much memory it takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine import Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._batches import count_samples
from ._monitor import require_number

__all__ = ["Throughput"]

_MIB = 2**20


class Throughput(Attachable):
    """Record samples, iterations and updates per second, and the peak of memory, each ``every`` iterations.

    The names are ``throughput/samples_per_sec``, ``throughput/iterations_per_sec``, ``throughput/updates_per_sec`` (in
    training), ``throughput/host_peak_mib`` (of the process, where the system tells it) and
    ``throughput/device_peak_mib`` (allocated by torch, on an accelerator). Each is of the time since the last record,
    with what handlers and inner runs took in it. All are of this rank; the ranks together do ``world_size`` times as
    much.

    It never makes the host wait for the device: over a few iterations the time of an asynchronous device shows only
    where the host is held up by it, over many it does.

    Args:
        every: record after so many iterations; what is left at the end of an epoch is not recorded.
        samples: how many samples a batch has. None: the length of its first tensor.
        prefix: of the names.

    Example:
        >>> Throughput(every=50).attach(trainer)
    """

    def __init__(
        self, every: int = 100, *, samples: Callable[[Any], int] | None = None, prefix: str = "throughput/"
    ) -> None:
        self._every: int = require_number("every", every, least=1, whole=True)
        if samples is not None and not callable(samples):
            raise TypeError(f"samples={samples!r}: a function of the batch was wanted, such as len")
        self._samples_of = _samples if samples is None else samples
        self._prefix = prefix
        self._since = (0.0, 0)  # when the present stretch began, and the updates there were
        self._samples = self._iterations = 0
        self.records = (f"{prefix}*",)

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._begin), (Events.ITERATION_COMPLETED, self._count))

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._samples = self._iterations = 0
        self._since = time.perf_counter(), engine.state.updates

    def _count(self, engine: Engine, batch: Any) -> None:
        self._samples += self._samples_of(batch)
        self._iterations += 1
        if self._iterations == self._every:
            self._record(engine)

    def _record(self, engine: Engine) -> None:
        (began, updates), now = self._since, time.perf_counter()
        took = max(now - began, 1e-9)
        values = {"samples_per_sec": self._samples / took, "iterations_per_sec": self._iterations / took}
        if engine.state.mode == "train":
            values["updates_per_sec"] = (engine.state.updates - updates) / took
        values |= _memory(engine.device)
        self._samples = self._iterations = 0
        self._since = now, engine.state.updates
        engine.record({f"{self._prefix}{name}": value for name, value in values.items()})

    def __repr__(self) -> str:
        """Show how often it records."""
        return f"Throughput(every={self._every})"


def _samples(batch: Any) -> int:
    """Return how many samples a batch has.

    Raises:
        HandlerError: it has no tensor.
    """
    samples = count_samples(batch)
    if samples is None:
        raise HandlerError(
            f"Throughput: there is no tensor with samples in the batch, a {type(batch).__name__}: say how many it has, "
            "Throughput(samples=lambda batch: ...)"
        )
    return samples


def _memory(device: torch.device) -> dict[str, float]:
    found = {}
    peak = _host_peak_bytes()
    if peak is not None:
        found["host_peak_mib"] = peak / _MIB
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None and hasattr(module, "max_memory_allocated"):
        found["device_peak_mib"] = module.max_memory_allocated(device) / _MIB
    return found


def _host_peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS tells bytes, others KiB
