"""Curves that grow while an engine runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..engine import Engine, EventLike, Events
from ._attachable import Subscription
from ._monitor import describe_missing, require_number
from ._notebook import NotebookOutput, in_notebook
from ._pictures import PicturePath, require_matplotlib
from .history import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LivePlot"]

logger = logging.getLogger("pellucid.handlers")

_SHARE = 0.1  # of the time that goes into drawing, at most


class LivePlot(History):
    """A :class:`History` that draws its curves while the engine runs.

    In a notebook they are one output of the cell, drawn anew in its place, and the last picture stays; the next run, in
    another cell, has an output of its own. Elsewhere nothing is shown. With ``path`` the picture is also a file, in a
    script too. However the run is left, by an error or Ctrl-C too, the last picture shows all there is. Only rank 0
    draws. Drawing reads the values, which waits for the device, and takes at most a tenth of the time.

    Args:
        names: what is drawn, as in :meth:`History.plot`; none: every scalar.
        every: when to draw, after all other handlers of this event.
        x: what the curves are drawn over.
        path: the file to save the picture to; ``{epoch}``, ``{iteration}`` and ``{updates}`` in it are filled in.
        min_interval_sec: how long to wait, at least, before drawing again. The last picture is always drawn.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> Validate(evaluator, val_loader).attach(trainer)
        >>> curves = LivePlot("val/accuracy", path="curves.png").attach(trainer)
        >>> result = trainer.run(loader, max_epochs=3)
    """

    def __init__(
        self,
        *names: str,
        every: EventLike = Events.EPOCH_COMPLETED,
        x: Literal["epoch", "iteration", "updates"] = "iteration",
        path: str | os.PathLike[str] | None = None,
        min_interval_sec: float = 0.5,
    ) -> None:
        require_matplotlib("LivePlot")
        super().__init__()
        if not all(isinstance(name, str) and name for name in names):
            raise TypeError(f"names={names!r}: names of recorded metrics were wanted, such as 'loss', 'val/loss'")
        if x not in ("epoch", "iteration", "updates"):
            raise ValueError(f"x={x!r}: 'epoch', 'iteration' or 'updates' was wanted")
        self._names = names
        self._every = every
        self._x: Literal["epoch", "iteration", "updates"] = x
        self._path = None if path is None else PicturePath(path)
        self._min_interval_sec: float = require_number("min_interval_sec", min_interval_sec, least=0)
        self._output: NotebookOutput | None = None
        self._drawn_rows = 0
        self._not_before_sec = 0.0
        self._figure: Figure | None = None

    @property
    def figure(self) -> Figure | None:
        """The newest picture; None before the first, and where nothing is drawn. pyplot does not know of it."""
        return self._figure

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._begin), (Events.METRICS_RECORDED, self._keep))

    def last_subscriptions(self) -> Sequence[Subscription]:
        end = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED
        return ((self._every, self._draw_if_due), (end, self._end), (Events.EXCEPTION_RAISED, self._end_by_error))

    def _begin(self, engine: Engine, batch: Any) -> None:
        if engine.state.depth == 0:
            self._output, self._drawn_rows, self._not_before_sec = None, 0, 0.0

    def _draw_if_due(self, engine: Engine, batch: Any) -> None:
        if time.perf_counter() >= self._not_before_sec:
            self._draw(engine)

    def _end(self, engine: Engine, batch: Any) -> None:
        if engine.state.depth:
            return  # the run around this one goes on
        self._draw(engine)
        missing = [describe_missing(engine, name) for name in self._names if name not in self.names]
        for what in filter(None, missing if engine.state.stop_reason == "completed" else ()):
            logger.warning("%r: %s", self, what)

    def _end_by_error(self, engine: Engine, batch: Any) -> None:
        # after an error of it the device may be in no state to be read
        is_readable = isinstance(engine.state.exception, KeyboardInterrupt) or not self._has_values_on_device()
        if engine.state.depth == 0 and is_readable:
            self._draw(engine)

    def _has_values_on_device(self) -> bool:
        waiting = (row.value for row in self._rows[self._read_until :])
        return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in waiting)

    def _draw(self, engine: Engine) -> None:
        """Draw what has come, unless nothing has since the last time, or nobody would see it."""
        shows = in_notebook()
        if engine.state.rank != 0 or len(self) == self._drawn_rows or not (shows or self._path):
            return
        began_sec = time.perf_counter()
        self._drawn_rows = len(self)
        names = [name for name in self._names if name in self.names]
        if (self._names and not names) or not any(isinstance(row.value, int | float) for row in self._read()):
            return
        self._figure = self.plot(*names, x=self._x, title=_title(engine))
        if shows:
            self._output = self._output or NotebookOutput()
            self._output.show(self._figure)
        if self._path is not None:
            self._path.save(self._figure, engine.state)
        now_sec = time.perf_counter()
        self._not_before_sec = now_sec + max(self._min_interval_sec, (now_sec - began_sec) * (1 / _SHARE - 1))

    def __repr__(self) -> str:
        """Say what is drawn and when."""
        return f"LivePlot({', '.join(map(repr, self._names)) or 'all'}, every={self._every!r}, {len(self)} rows)"


def _title(engine: Engine) -> str:
    state = engine.state
    of_all = "" if state.max_epochs is None else f" of {state.max_epochs}"
    return f"{engine.name}: epoch {state.epoch}{of_all}, iteration {state.iteration}"
