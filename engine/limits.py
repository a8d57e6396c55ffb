"""The limits of a run: what may be asked for, and what is left to do."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from .errors import LimitError

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """How far a run goes, to ``max_epochs`` or ``max_iters``, and how long an epoch is; None: all the data.

    ``batches`` is the most that one run takes of each pass over the data. Unlike the others it is not handed on to the
    next run.
    """

    max_epochs: int | None = None
    max_iters: int | None = None
    epoch_length: int | None = None
    batches: int | None = None

    @classmethod
    def asked(cls, max_epochs: Any, max_iters: Any, epoch_length: Any, limit_batches: Any = None) -> Limits:
        """Return the limits that a caller asks for.

        Raises:
            LimitError: no positive whole number, or two limits of one kind.
        """
        if max_epochs is not None and max_iters is not None:
            raise LimitError(f"give max_epochs={max_epochs!r} or max_iters={max_iters!r}, not both")
        if epoch_length is not None and limit_batches is not None:
            raise LimitError(
                f"give epoch_length={epoch_length!r}, of a stream that goes on from epoch to epoch, or "
                f"limit_batches={limit_batches!r} of each pass over the data, not both"
            )
        named = {
            "max_epochs": max_epochs,
            "max_iters": max_iters,
            "epoch_length": epoch_length,
            "limit_batches": limit_batches,
        }
        for name, value in named.items():
            if value is not None and (_whole(value) or 0) < 1:
                raise LimitError(f"{name} must be a whole number of at least 1, got {value!r}")
        return cls(*(None if value is None else _whole(value) for value in named.values()))

    def over(self, earlier: Limits) -> Limits:
        """Return these limits, with what the caller left open taken from the run before, else one epoch."""
        length = None if self.batches else self.epoch_length or earlier.epoch_length
        if self.max_epochs is not None or self.max_iters is not None:
            return Limits(self.max_epochs, self.max_iters, length, self.batches)
        if earlier.max_epochs is not None or earlier.max_iters is not None:
            return Limits(earlier.max_epochs, earlier.max_iters, length, self.batches)
        return Limits(1, None, length, self.batches)

    def check_reachable(self, epoch: int, iteration: int, batches: int) -> None:
        """Refuse a limit below what is done; ``batches`` are done in an epoch that is still open.

        Raises:
            LimitError: as above.
        """
        for name, limit, done in (("max_epochs", self.max_epochs, epoch), ("max_iters", self.max_iters, iteration)):
            if limit is not None and limit < done:
                raise LimitError(
                    f"{name}={limit} is below what is done already ({done}): give a larger limit to go on, or begin "
                    "afresh with engine.reset()"
                )
        if self.epoch_length is not None and self.epoch_length < batches:
            raise LimitError(
                f"epoch_length={self.epoch_length} is below the {batches} batches done in the present epoch"
            )

    def are_reached(self, epoch: int, iteration: int, epoch_open: bool) -> bool:
        """Say whether nothing is left to do."""
        if self.max_iters is not None:
            return iteration >= self.max_iters
        return not epoch_open and self.max_epochs is not None and epoch >= self.max_epochs


def _whole(value: Any) -> int | None:
    """Return a number as an int, None for one that is not whole."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
