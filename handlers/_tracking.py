"""What the loggers share that write into a run of a tracking service: its id, hyper-parameters, sending in bursts."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..engine import CheckpointError
from ._logger import Counts, Logger
from ._output import Output

__all__ = ["Row", "TrackingLogger", "check_hparams"]

_MOST_WAITING = 200
_LONGEST_WAIT_SEC = 10.0


class Row(NamedTuple):
    """What was written at one moment."""

    time_sec: float
    iteration: int
    numbers: Mapping[str, int | float]


class TrackingLogger(Logger):
    """A logger that writes into a run of a service, which goes on under its id.

    Numbers are sent together, which costs a fraction of sending each: at 200 moments that wait, after 10 s, and at an
    epoch's end and the run's.
    """

    def __init__(
        self,
        run_id: str | None,
        hparams: Mapping[str, Any] | None,
        *,
        output: Output,
        every: int,
        prefix: str | None,
    ) -> None:
        super().__init__(output=output, every=every, prefix=prefix)
        self._run_id = run_id
        self._hparams = check_hparams(hparams)
        self._waiting: list[Row] = []
        self._send_at_sec = 0.0

    @property
    def run_id(self) -> str | None:
        """The id of the service's run; None before something was written."""
        return self._run_id

    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        now_sec = time.time()
        if not self._waiting:
            self._send_at_sec = now_sec + _LONGEST_WAIT_SEC
        self._waiting.append(Row(now_sec, counts.iteration, numbers))
        if len(self._waiting) >= _MOST_WAITING or now_sec >= self._send_at_sec:
            self._flush()

    def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if rows:
            self._send(rows)

    @abstractmethod
    def _send(self, rows: Sequence[Row]) -> None:
        """Send what has waited."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the training stands, and the id of the service's run."""
        return {**super().state_dict(), "run_id": self._run_id}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the run of an earlier ``state_dict()``.

        Raises:
            CheckpointError: it is none of such a logger.
        """
        run_id = state_dict.get("run_id")
        if run_id is not None and not isinstance(run_id, str):
            raise CheckpointError(f"{type(self).__name__}: run_id must be a text or None, got {run_id!r}")
        super().load_state_dict(state_dict)
        self._run_id = run_id


def check_hparams(hparams: Any) -> dict[str, bool | int | float | str]:
    """Return names and plain values; what is no number is a text.

    Raises:
        TypeError: no mapping of names.
    """
    if hparams is None:
        return {}
    if not isinstance(hparams, Mapping) or not all(isinstance(name, str) for name in hparams):
        raise TypeError(f'hparams={hparams!r}: a mapping of names to values was wanted, such as {{"lr": 0.1}}')
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in hparams.items()}
