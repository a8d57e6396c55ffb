"""What the loggers that follow runs on a server share: hyper-parameters, and the id of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine import CheckpointError

__all__ = ["check_hparams", "check_run_id"]


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


def check_run_id(owner: str, run_id: Any) -> str | None:
    """Return the id of a run, or None.

    Raises:
        CheckpointError: something else.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise CheckpointError(f"{owner}: run_id must be a text or None, got {run_id!r}")
    return run_id
