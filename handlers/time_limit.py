"""Stop a run when its time is up."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine import CheckpointError, Engine, Events
from ._attachable import Attachable, Subscription
from ._monitor import require_positive

__all__ = ["TimeLimit"]

logger = logging.getLogger("pellucid.handlers")


class TimeLimit(Attachable):
    """Terminate a run after the iteration in which ``limit_sec`` is reached.

    The time is that of a wall clock from the run's start, inner runs and saving included. On several ranks the first
    one to reach it stops all, at one iteration. What a last checkpoint takes comes on top of it: leave some room.

    Args:
        limit_sec: how long a run may take, in seconds.
        total: the time of all runs counts, also of those before a checkpoint was resumed. Without it every run has the
            whole limit, as with the time of a cluster's job.

    Example:
        >>> TimeLimit(3.5 * 3600).attach(trainer)
    """

    def __init__(self, limit_sec: float, *, total: bool = False) -> None:
        self._limit_sec = require_positive("limit_sec", limit_sec)
        self._total = total
        self._spent_sec = 0.0  # in earlier runs
        self._began: float | None = None

    @property
    def elapsed_sec(self) -> float:
        """The time that counts so far."""
        return self._spent_sec + (0.0 if self._began is None else time.monotonic() - self._began)

    def reset(self) -> None:
        """Let the time begin again."""
        self._spent_sec = 0.0
        self._began = None if self._began is None else time.monotonic()

    def subscriptions(self) -> Sequence[Subscription]:
        return (
            (Events.STARTED, self._begin),
            (Events.STARTED | Events.ITERATION_COMPLETED, self._check),
            (Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED | Events.EXCEPTION_RAISED, self._end),
        )

    def _begin(self, engine: Engine, batch: Any) -> None:
        if not self._total:
            self._spent_sec = 0.0
        self._began = time.monotonic()

    def _check(self, engine: Engine, batch: Any) -> None:
        elapsed = self.elapsed_sec
        if elapsed < self._limit_sec:
            return
        if engine.state.rank == 0:
            logger.warning("%r stops the run after %.0f s", self, elapsed)
        engine.terminate()

    def _end(self, engine: Engine, batch: Any) -> None:
        self._spent_sec, self._began = self.elapsed_sec, None

    def state_dict(self) -> dict[str, Any]:
        """Return the time that counts so far, in seconds."""
        return {"elapsed_sec": self.elapsed_sec}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the time of an earlier ``state_dict()``; it counts only with ``total=True``.

        Raises:
            CheckpointError: other keys than that has.
        """
        if set(state_dict) != {"elapsed_sec"}:
            raise CheckpointError(f"TimeLimit: one key 'elapsed_sec' was wanted, got {sorted(state_dict)}")
        self._spent_sec, self._began = float(state_dict["elapsed_sec"]), None

    def __repr__(self) -> str:
        """Show the limit."""
        return f"TimeLimit({self._limit_sec:g}{', total=True' if self._total else ''})"
