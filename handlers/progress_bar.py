"""Show how far a run is."""

from __future__ import annotations

import logging
import numbers
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TextIO

import torch

from ..engine import Engine, Events
from ._attachable import Attachable, Subscription
from ._bars import BarLine, open_line
from ._monitor import describe_missing, require_number
from ._output import select_output

__all__ = ["ProgressBar"]

logger = logging.getLogger("pellucid.handlers")


class ProgressBar(Attachable):
    """A bar for each epoch, with recorded metrics beside it.

    In a terminal or notebook it moves (tqdm), and the bar of an inner run has a line of its own that vanishes when
    that run ends. Where output is no terminal, each bar is one line of text, written when it is closed. It is closed
    however the run is left. Only rank 0 draws. One ProgressBar may be attached to several engines.

    Numbers are read, which waits for the device, only when the bar is redrawn. Messages printed meanwhile go through
    ``tqdm.write``, so that they do not run into the bar.

    Args:
        metrics: which recorded metrics to show: ``"all"``, a sequence of names, or None.
        output: names of values of the step's output to show: keys if it is a mapping, positions if it is a tuple or
            list of as many values, the value itself if it is one and there is one name.
        every: how many iterations to wait before redrawing.
        min_interval_sec: how long to wait before redrawing. The end of an epoch is always shown.
        description: stands in the bar instead of the engine's name.
        file: where to write. None: the notebook, else standard error.
        leave: whether a finished bar stays visible.

    Example:
        >>> ProgressBar(["val/accuracy"], output=["loss"], every=10).attach(trainer)
    """

    def __init__(
        self,
        metrics: Literal["all"] | Sequence[str] | None = "all",
        *,
        output: Sequence[str] = (),
        every: int = 1,
        min_interval_sec: float = 0.1,
        description: str | None = None,
        file: TextIO | None = None,
        leave: bool = True,
    ) -> None:
        self._metrics = metrics if metrics is None or metrics == "all" else _names("metrics", metrics)
        self._output = _names("output", output)
        self._every: int = require_number("every", every, least=1, whole=True)
        self._min_interval_sec: float = require_number("min_interval_sec", min_interval_sec, least=0)
        self._description = description
        self._file = file
        self._leave = leave
        self._lines: dict[int, BarLine] = {}  # by depth of the run
        self._checked = False

    def subscriptions(self) -> Sequence[Subscription]:
        return (
            (Events.EPOCH_STARTED, self._begin_epoch),
            (Events.ITERATION_COMPLETED, self._advance),
            (Events.EPOCH_COMPLETED, self._end_epoch),
            (Events.METRICS_RECORDED, self._show_late_metrics),
            (Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED, self._close),
            (Events.EXCEPTION_RAISED, self._close_unread),
        )

    def _begin_epoch(self, engine: Engine, batch: Any) -> None:
        self._close(engine, batch)
        self._open(engine, done=0)

    def _open(self, engine: Engine, done: int) -> BarLine:
        state = engine.state
        line = open_line(
            self._label(engine),
            done,
            state.epoch_length,
            rank=state.rank,
            inner=state.depth > 0,
            file=self._file,
            leave=self._leave,
        )
        self._lines[state.depth] = line
        return line

    def _label(self, engine: Engine) -> str:
        state = engine.state
        label = self._description or engine.name
        if state.mode == "eval" and state.max_epochs == 1:
            return label
        of_all = "" if state.max_epochs is None else f"/{state.max_epochs}"
        return f"{label} epoch {state.epoch}{of_all}"

    def _advance(self, engine: Engine, batch: Any) -> None:
        state = engine.state
        done = state.epoch_iteration
        # a run that goes on in mid-epoch has no EPOCH_STARTED
        line = self._lines.get(state.depth) or self._open(engine, done - 1)
        line.done = done
        if line.live and (done == line.total or self._is_due(line)):
            self._draw(engine, line)

    def _is_due(self, line: BarLine) -> bool:
        return line.done % self._every == 0 and time.perf_counter() - line.drawn_at_sec >= self._min_interval_sec

    def _end_epoch(self, engine: Engine, batch: Any) -> None:
        line = self._lines.get(engine.state.depth)
        if line is None:
            return
        line.ended = True
        line.total = line.done  # the length that the data stated was a hint
        self._draw(engine, line)

    def _show_late_metrics(self, engine: Engine, batch: Any) -> None:
        line = self._lines.get(engine.state.depth)
        if line is not None and line.ended and line.live:
            self._draw(engine, line)

    def _close(self, engine: Engine, batch: Any) -> None:
        line = self._lines.pop(engine.state.depth, None)
        if line is None:
            return
        try:
            self._read_numbers(engine, line)
        finally:
            line.close()
        if line.ended:
            self._check_names(engine)

    def _close_unread(self, engine: Engine, batch: Any) -> None:
        # after an error nothing is read: the device may be in no state for it
        line = self._lines.pop(engine.state.depth, None)
        if line is not None:
            line.close()

    def _draw(self, engine: Engine, line: BarLine) -> None:
        self._read_numbers(engine, line)
        line.draw()

    def _read_numbers(self, engine: Engine, line: BarLine) -> None:
        if self._output and line.output_read_at != line.done and engine.state.output is not None:
            line.output_read_at = line.done
            line.output_numbers = _as_text(select_output(self._output, engine.state.output).items())
        recorded = engine.state.metrics
        names: Iterable[str] = recorded if self._metrics == "all" else self._metrics or ()
        metrics = _as_text((name, recorded[name]) for name in names if name in recorded)
        line.numbers = ", ".join(filter(None, (line.output_numbers, metrics)))

    def _check_names(self, engine: Engine) -> None:
        if self._checked or self._metrics is None or self._metrics == "all":
            return
        self._checked = True
        for missing in filter(None, (describe_missing(engine, name) for name in self._metrics)):
            logger.warning("ProgressBar(metrics=...): after the first epoch %s", missing)

    def __repr__(self) -> str:
        """Show how the bar was asked for."""
        return f"ProgressBar(metrics={self._metrics!r}, output={self._output!r}, every={self._every})"


def _names(argument: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument}={names!r}: a sequence of names was wanted, such as ['loss']")
    return tuple(names)


def _as_text(values: Iterable[tuple[str, Any]]) -> str:
    """Return the values that are single numbers as text. Waits for the device."""
    numbered = ((name, _number(value)) for name, value in values)
    return ", ".join(f"{name}={_short(number)}" for name, number in numbered if number is not None)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None  # waits for the device
    return value if isinstance(value, numbers.Real) else None


def _short(number: Any) -> str:
    return str(number) if isinstance(number, numbers.Integral) else f"{number:.4g}"
