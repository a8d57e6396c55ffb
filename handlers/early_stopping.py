"""Stop a run whose score no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine import CheckpointError, Engine, Events
from ._attachable import Attachable, Subscription
from ._monitor import Mode, Monitor, require_number

__all__ = ["EarlyStopping"]

logger = logging.getLogger("pellucid.handlers")


class EarlyStopping(Attachable):
    """Stop the run when ``monitor`` has not improved in the last ``patience`` records of it.

    It acts at the moment the metric is recorded, so the order of attaching does not matter, and reads the number
    then, which waits for the device. NaN and infinity are never an improvement and count against patience.

    A stopped run stays stopped: run again, also from a checkpoint, it makes no step and says so, until
    :meth:`reset`. No start of a run clears the count.

    Args:
        monitor: the name of a recorded metric, such as ``"val/accuracy"``.
        mode: ``"max"`` if larger is better, ``"min"`` if smaller is.
        patience: how many records in a row without improvement stop the run.
        min_delta: an improvement is a change for the better by more than this.
        first_epoch: the epoch by whose end the metric must have come once. If nobody has recorded it by then, nor
            has any attached handler announced it (``records``), :class:`~pellucid.engine.MonitorError` is raised
            when the run moves on.

    Example:
        >>> EarlyStopping("val/accuracy", mode="max", patience=5).attach(trainer)
    """

    def __init__(
        self, monitor: str, *, mode: Mode, patience: int, min_delta: float = 0.0, first_epoch: int = 1
    ) -> None:
        self._monitor = Monitor(monitor, mode=mode, min_delta=min_delta, first_epoch=first_epoch)
        self._patience: int = require_number("patience", patience, least=1, whole=True)
        self.reset()

    @property
    def best(self) -> float | None:
        """The best finite value so far, or None."""
        return self._best

    @property
    def waited(self) -> int:
        """How many records in a row brought no improvement."""
        return self._waited

    @property
    def stopped(self) -> bool:
        """Whether it has stopped the run."""
        return self._stopped

    def reset(self) -> None:
        """Forget the best value, the count and the stop, so that a stopped run can go on."""
        self._best: float | None = None
        self._waited = 0
        self._stopped = False

    def subscriptions(self) -> Sequence[Subscription]:
        return (
            (Events.STARTED, self._stay_stopped),
            (Events.METRICS_RECORDED, self._judge),
            *self._monitor.subscriptions(),
        )

    def _stay_stopped(self, engine: Engine, batch: Any) -> None:
        if self._stopped:
            if engine.state.rank == 0:
                logger.warning("%r has stopped this run before, no step is made: its own reset() lets it go on", self)
            engine.terminate()

    def _judge(self, engine: Engine, batch: Any) -> None:
        value = self._monitor.read(engine)
        if value is None:
            return
        if self._monitor.is_better(value, self._best):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            self._stop(engine)

    def _stop(self, engine: Engine) -> None:
        self._stopped = True
        if engine.state.rank == 0:
            logger.warning("%r stops the run: no improvement in %d records", self, self._waited)
        engine.terminate()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the count and whether it has stopped, as plain values."""
        return {"best": self._best, "waited": self._waited, "stopped": self._stopped}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of an earlier ``state_dict()``.

        Raises:
            CheckpointError: other keys than that has.
        """
        wanted = set(self.state_dict())
        if set(state_dict) != wanted:
            raise CheckpointError(f"EarlyStopping: the keys {sorted(wanted)} were wanted, got {sorted(state_dict)}")
        best = state_dict["best"]
        self._best = None if best is None else float(best)
        self._waited = int(state_dict["waited"])
        self._stopped = bool(state_dict["stopped"])
        self._monitor.has_come = best is not None or self._waited > 0

    def __repr__(self) -> str:
        """Show what is watched and how it stands."""
        return (
            f"EarlyStopping({self._monitor.name!r}, mode={self._monitor.mode!r}, patience={self._patience}, "
            f"best={self._best}, waited={self._waited}, stopped={self._stopped})"
        )
