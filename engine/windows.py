"""Accumulation windows: which batches make one update, and what their gradients are divided by.

A window has ``steps`` batches, and never crosses the end of an epoch: the last one of an epoch may be shorter. The
gradient of an update is the mean over what is really in its window. While batches are added, each gradient is divided
by the size the window is expected to have; when the size is known beforehand this is the whole arithmetic, and equal to
the bit to ``(loss / k).backward()``. If the window turns out otherwise, or its batches have weights, the gradients are
corrected once, at the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UpdateError

__all__ = ["Weight", "Window", "multiply"]

Weight = float | Tensor


class Window:
    """The batches since the last update.

    Attributes:
        steps: batches in a full window.
        begun: batches begun in this window.
        count: those of them that have added a gradient.
        due: whether the batch in work ends the window.
    """

    def __init__(self, steps: int) -> None:
        """Make an empty window."""
        self.steps = steps
        self.due = True
        self.clear()

    def clear(self) -> None:
        """Begin a new window with the next batch."""
        self.begun = 0
        self.expected = self.steps
        self.forget_gradient()

    def forget_gradient(self) -> None:
        """Count no batch as added."""
        self.count = 0
        self.total: Weight | None = None  # of the weights, None without
        self._reference: Weight = 1.0
        self._batch_weight: Weight | None = None
        self.has_batch = False  # whether the batch in work has added its gradient

    def begin_batch(self, remaining: int | None, is_last: bool) -> None:
        """Take one more batch into the window.

        Args:
            remaining: how many batches the epoch still has, this one included; None if that is unknown.
            is_last: whether the epoch ends with this one.
        """
        if self.begun == 0:
            self.expected = self.steps if remaining is None else max(1, min(self.steps, remaining))
        self.begun += 1
        self.has_batch = False
        self.due = self.begun >= self.steps or is_last or remaining == 1

    def scaled(self, loss: Tensor, weight: Weight | None) -> Tensor:
        """Return what is to be differentiated for a loss of this batch.

        Raises:
            UpdateError: weights for some batches of a window only, or two weights for one batch.
        """
        self._check_weight(weight)
        if weight is not None and self.steps > 1:
            reference = weight if self.total is None else self._reference
            return loss * (weight / (reference * self.expected))
        return loss if self.expected == 1 else loss / self.expected

    def add_batch(self, weight: Weight | None) -> None:
        """Count the gradient of the batch in work, once it has been added."""
        if self.has_batch:
            return
        self.has_batch = True
        self._batch_weight = weight
        # at one batch a window, a user who adds several batches by hand gets their sum, as in a plain loop
        self.count = 1 if self.steps == 1 else self.count + 1
        if weight is not None:
            self._reference = weight if self.total is None else self._reference
            self.total = weight if self.total is None or self.steps == 1 else self.total + weight

    def _check_weight(self, weight: Weight | None) -> None:
        if weight is not None and not isinstance(weight, Tensor) and not weight > 0:
            raise UpdateError(f"weight= is how many items the loss is the mean of, more than 0, got {weight!r}")
        if self.steps == 1:
            return
        if self.has_batch and not _is_same(weight, self._batch_weight):
            raise UpdateError(
                f"a batch has one weight: backward was called with weight={self._batch_weight!r} and then with "
                f"weight={weight!r} for the same batch"
            )
        if self.count and (weight is None) != (self.total is None):
            raise UpdateError(
                "some batches of this accumulation window have a weight and some have none: give backward(loss, "
                "weight=...) in every batch of a window, or in none"
            )

    def correction(self) -> Weight | None:
        """Return what the gradients must be multiplied by to be the mean over the window, None for 1."""
        if self.steps == 1:
            return None
        if self.total is not None:
            factor = self._reference * self.expected / self.total
            return factor if isinstance(factor, Tensor) or factor != 1.0 else None
        batches = max(self.count, 1)
        return None if batches == self.expected else self.expected / batches

    def state_dict(self) -> dict[str, Any]:
        """Return the window as tensors and plain numbers."""
        names = ("begun", "expected", "count", "total")
        return {name: getattr(self, name) for name in names} | {"reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a window."""
        self.begun, self.expected = state["begun"], state["expected"]
        self.count, self.total, self._reference = state["count"], state["total"], state["reference"]


def multiply(gradients: list[Tensor], factor: Weight) -> None:
    """Multiply gradients in place. Does not wait for the device."""
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def _is_same(one: Weight | None, other: Weight | None) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other  # comparing numbers on a device would wait for it
    return one == other
