"""Watching one recorded metric: its value, which value is better, and whether it comes at all.

Shared by every handler that acts on a score.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ..engine import Engine, Events, MonitorError
from ._attachable import Subscription

__all__ = ["Mode", "Monitor", "describe_missing", "nearest_name", "require_number", "require_positive"]

Mode = Literal["max", "min"]


class Monitor:
    """The metric ``name``, of which larger (``"max"``) or smaller (``"min"``) values are better.

    Args:
        name: as given to ``engine.record``, such as ``"val/accuracy"``.
        mode: ``"max"`` or ``"min"``.
        min_delta: a value is better only if it is so by more than this.
        first_epoch: the epoch by whose end the metric must have come once, counted as ``engine.state.epoch``.
    """

    def __init__(self, name: str, *, mode: Mode, min_delta: float = 0.0, first_epoch: int = 1) -> None:
        _check_name_and_mode(name, mode)
        self.name = name
        self.mode = mode
        self._min_delta: float = require_number("min_delta", min_delta, least=0)
        self._first_epoch: int = require_number("first_epoch", first_epoch, least=1, whole=True)
        self.has_come = False  # part of the state of whoever monitors: a resumed run need not wait for it again
        self._epoch_to_check: int | None = None

    def subscriptions(self) -> Sequence[Subscription]:
        """Return the methods that find out whether the metric comes at all.

        The end of an epoch is judged when the run moves on, so a metric recorded by any of its handlers is in time.
        """
        return (
            (Events.STARTED, self._forget_epoch),
            (Events.EPOCH_COMPLETED, self._note_epoch),
            (Events.EPOCH_STARTED | Events.COMPLETED, self._check_recorded),
        )

    def read(self, engine: Engine) -> float | None:
        """Return the metric's value if the latest record contains it, else None. Waits for the device.

        Raises:
            MonitorError: the value is no single number.
        """
        record = engine.state.last_record
        if record is None or self.name not in record.values:
            return None
        self.has_come = True
        value = record.values[self.name]  # waits for the device
        if not isinstance(value, int | float):
            raise MonitorError(
                f"monitor={self.name!r}: a single number was wanted, got {type(value).__name__}. Record a number "
                f"of it under a name of its own, such as its mean, and monitor that"
            )
        return float(value)

    def is_better(self, value: float, best: float | None) -> bool:
        """Say whether ``value`` improves on ``best`` (None: there is none yet). NaN and infinity never do."""
        if not math.isfinite(value):
            return False
        if best is None:
            return True
        gain = value - best if self.mode == "max" else best - value
        return gain > self._min_delta

    def _forget_epoch(self, engine: Engine, batch: Any) -> None:
        # an error in EPOCH_COMPLETED has ended the last run before all its handlers had recorded
        self._epoch_to_check = None

    def _note_epoch(self, engine: Engine, batch: Any) -> None:
        self._epoch_to_check = engine.state.epoch

    def _check_recorded(self, engine: Engine, batch: Any) -> None:
        epoch, self._epoch_to_check = self._epoch_to_check, None
        if epoch is None or epoch < self._first_epoch or self.has_come:
            return
        missing = describe_missing(engine, self.name) or _describe_unrecorded(engine, self.name)
        if missing:
            raise MonitorError(
                f"monitor={self.name!r}: by the end of epoch {epoch} {missing} For a metric that comes later give "
                f"first_epoch=, the epoch by whose end it must have come"
            )


def describe_missing(engine: Engine, name: str) -> str | None:
    """Return what to say of a metric that is neither recorded nor announced by a handler, or None if it is."""
    recorded = sorted(engine.state.metrics)
    if name in recorded or any(_announces(handler, name) for handler in engine.attached()):
        return None
    what = f"nobody has recorded {name!r}{nearest_name(name, recorded)}"
    return f"{what} Recorded: {', '.join(map(repr, recorded)) or 'nothing'}."


def _describe_unrecorded(engine: Engine, name: str) -> str | None:
    """Return what to say of a metric that is there and was never recorded, so that nobody was told of it."""
    if name not in engine.state.metrics or any(_announces(handler, name) for handler in engine.attached()):
        return None
    return (
        f"{name!r} is in state.metrics, but was never recorded: an Ignite metric on engine.ignite only writes it "
        f"there. Pass the metric as Engine(..., metrics={{{name!r}: ...}}), or call engine.record({{{name!r}: value}})."
    )


def nearest_name(name: str, known: Sequence[str]) -> str:
    """Return the end of a sentence that offers the nearest of the ``known`` names, if one is near."""
    nearest = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else "."


def _announces(handler: object, name: str) -> bool:
    announced: Sequence[str] = getattr(handler, "records", ())
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in announced)


def _check_name_and_mode(name: Any, mode: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"monitor={name!r}: the name of a recorded metric was wanted, such as 'val/accuracy'")
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}: 'max' (larger is better) or 'min' (smaller is better) was wanted")


def require_number(argument: str, value: Any, *, least: float, whole: bool = False) -> Any:
    """Return ``value`` if it is a finite number (a whole one) of at least ``least``.

    Raises:
        TypeError: no number, or a fraction where a whole one is wanted.
        ValueError: too small, or not finite.
    """
    wanted = f"{'a whole' if whole else 'a finite'} number of at least {least:g} was wanted"
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(f"{argument}={value!r}: {wanted}")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{argument}={value!r}: {wanted}")
    return value


def require_positive(argument: str, value: Any) -> float:
    """Return ``value`` if it is a number above 0; infinity is one.

    Raises:
        TypeError: no number.
        ValueError: not above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument}={value!r}: a number above 0 was wanted")
    if not value > 0:
        raise ValueError(f"{argument}={value!r}: a number above 0 was wanted")
    return value
