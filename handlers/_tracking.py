"""What the loggers share that write into a run of a tracking service: its id and hyper-parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..engine import CheckpointError
from ._logger import Logger
from ._output import Output

__all__ = ["TrackingLogger", "as_found_random_state", "check_hparams"]


class TrackingLogger(Logger):
    """A logger that writes into a run of a service, which goes on under its id."""

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

    @property
    def run_id(self) -> str | None:
        """The id of the service's run; None before something was written."""
        return self._run_id

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


@contextmanager
def as_found_random_state() -> Iterator[None]:
    """Put Python's random state back, which the training may draw from."""
    found = random.getstate()
    try:
        yield
    finally:
        random.setstate(found)


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
