"""One rank alone with a model that ranks train together: for a validation on rank 0, say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .base import Model
from .ddp import DDP
from .single import SingleDevice

__all__ = ["LocalView"]


class LocalView(SingleDevice):
    """What ``strategy="single"`` means for a model under ``DDP``: its device and precision, and no collective call.

    The other ranks may wait or work; gradients that are made here are not averaged with theirs.

    Args:
        together: the strategy of the ranks.
    """

    def __init__(self, together: DDP) -> None:
        super().__init__(together.device, precision=together.precision)
        self._together = together

    @contextmanager
    def running(self, model: Model | None, train: bool) -> Iterator[None]:
        """Return the region of one run, in which no forward of the model is a collective."""
        with self._together.paused(model), super().running(model, train):
            yield
