"""Where the time of a run goes: data, step, each handler, and the engine itself."""

from __future__ import annotations

import html
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Engine, Events
from ._attachable import Attachable, Subscription

__all__ = ["Timing", "TimingRow"]

_HEAD = ("what", "event", "calls", "total s", "mean ms", "share")


@dataclass(frozen=True)
class TimingRow:
    """The time of one thing.

    Attributes:
        what: ``"data"`` (waiting for batches and bringing them to the device), ``"step"``, ``"engine"`` (all that is
            nobody else's), or a handler's name.
        event: the handler's.
        calls: how often.
        seconds: in all.
    """

    what: str
    event: str
    calls: int
    seconds: float


class Timing(Attachable):
    """Measure the time of each run: of the data, the step, each handler by name, and the rest.

    Each moment counts once: what a handler takes inside the step is not the step's, and an inner run in a handler is
    that handler's. Look at it with ``print(timing)``, in a notebook as a table, or in ``engine.describe()``. It begins
    afresh with every run of the engine.

    An accelerator works on after the host has gone on: then the time shows where the host had to wait for it. For the
    time of kernels see ``Profile``.

    Example:
        >>> timing = Timing().attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> print(timing)
    """

    def __init__(self) -> None:
        self._handlers: dict[tuple[Any, ...], _Stopwatch] = {}
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        for watch in self._handlers.values():
            watch.calls, watch.seconds = 0, 0.0
        self._data, self._step = _Stopwatch("data"), _Stopwatch("step")
        self._in_handlers = 0.0  # seconds, of those that have returned
        self._inside = 0.0  # of these, inside the call in progress
        self._began: float | None = None
        self._total = 0.0
        self._mark = (0.0, 0.0)

    def attach(self, engine: Engine) -> Timing:
        """Measure ``engine``'s runs, and return the handler itself.

        Raises:
            HandlerError: no engine, or one that is measured already.
        """
        if isinstance(engine, Engine) and not self._is_attached(engine):
            engine.watch_calls(self)
        return super().attach(engine)

    def detach(self, engine: Engine) -> None:
        """Measure ``engine`` no more; the times stay.

        Raises:
            HandlerError: it is not attached to this engine.
        """
        super().detach(engine)
        engine.watch_calls(None)

    def subscriptions(self) -> Sequence[Subscription]:
        ends = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED | Events.EXCEPTION_RAISED
        return (
            (Events.STARTED, self._start),
            (Events.GET_BATCH_STARTED | Events.ITERATION_STARTED, self._begin),
            (Events.GET_BATCH_COMPLETED, self._end_data),
            (Events.ITERATION_COMPLETED, self._end_step),
            (ends, self._stop),
        )

    def _start(self, engine: Engine, batch: Any) -> None:
        self._begin_afresh()
        self._began = time.perf_counter()

    def _stop(self, engine: Engine, batch: Any) -> None:
        if self._began is not None:
            self._total, self._began = self._total + time.perf_counter() - self._began, None

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._mark = time.perf_counter(), self._in_handlers

    def _end_data(self, engine: Engine, batch: Any) -> None:
        self._data.add(self._since_mark())

    def _end_step(self, engine: Engine, batch: Any) -> None:
        self._step.add(self._since_mark())

    def _since_mark(self) -> float:
        began, in_handlers = self._mark
        return time.perf_counter() - began - (self._in_handlers - in_handlers)

    def around(self, event: str, handler: Callable[..., Any], call: Callable[[Any, Any], Any]) -> Any:
        """Return what calls a handler and measures it; the engine asks."""
        if getattr(handler, "__self__", None) is self:
            return call
        key, name, clock = _key(event, handler), _name(handler), time.perf_counter
        watch = self._handlers.get(key)
        if watch is None or watch.name != name:
            watch = self._handlers[key] = _Stopwatch(name, event)

        def timed(engine: Engine, batch: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            began = clock()
            try:
                return call(engine, batch)
            finally:
                took = clock() - began
                watch.add(took - self._inside)
                self._in_handlers += took - self._inside
                self._inside = outer + took

        return timed

    def spent(self, event: str, handler: Callable[..., Any]) -> tuple[int, float] | None:
        """Return the calls and the seconds of a handler, for ``engine.describe()``."""
        watch = self._handlers.get(_key(event, handler))
        return None if watch is None else (watch.calls, watch.seconds)

    @property
    def total_sec(self) -> float:
        """The time of the last run, or of the present one until now."""
        return self._total + (0.0 if self._began is None else time.perf_counter() - self._began)

    @property
    def rows(self) -> tuple[TimingRow, ...]:
        """Data, step, the handlers that were called, the slowest first, and the engine."""
        handlers = sorted((one for one in self._handlers.values() if one.calls), key=lambda one: -one.seconds)
        parts = [one.row() for one in (self._data, self._step, *handlers)]
        rest = self.total_sec - sum(row.seconds for row in parts)
        return (*parts, TimingRow("engine", "", self._step.calls, max(rest, 0.0)))

    def _cells(self) -> Iterator[tuple[str, ...]]:
        total = self.total_sec or 1.0
        for row in self.rows:
            mean = f"{1e3 * row.seconds / row.calls:.3f}" if row.calls else "-"
            share = f"{100 * row.seconds / total:.1f} %"
            yield row.what, row.event, str(row.calls), f"{row.seconds:.3f}", mean, share

    def __str__(self) -> str:
        """Return the table as text."""
        lines = [_HEAD, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        return "\n".join("  ".join(map(_fill, line, widths, range(len(_HEAD)))).rstrip() for line in lines)

    def __repr__(self) -> str:
        """Show the time and the iterations."""
        return f"Timing({self.total_sec:.3f} s, {self._step.calls} iterations)"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in self._cells()
        )
        return f"<table><caption>{html.escape(repr(self))}</caption><tr>{head}</tr>{body}</table>"


class _Stopwatch:
    """Sums up the time of one thing."""

    __slots__ = ("calls", "event", "name", "seconds")

    def __init__(self, name: str, event: str = "") -> None:
        self.name = name
        self.event = event
        self.calls = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds

    def row(self) -> TimingRow:
        return TimingRow(self.name, self.event, self.calls, self.seconds)


def _key(event: str, handler: Any) -> tuple[Any, ...]:
    """Return what stands for a handler without keeping it; a method is another object each time it is looked up."""
    return event, id(getattr(handler, "__func__", handler)), id(getattr(handler, "__self__", None))


def _name(handler: Any) -> str:
    owner = getattr(handler, "__self__", None)
    if inspect.ismethod(handler) and not isinstance(owner, type):
        return f"{type(owner).__name__}.{handler.__name__}"
    return str(getattr(handler, "__qualname__", repr(handler)))


def _fill(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
