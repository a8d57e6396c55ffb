"""Accumulation windows: which batches make one update, and what their gradients are divided by.

A window has ``steps`` batches, and never crosses the end of an epoch: the last one of an epoch may be shorter. The
gradient of an update is the mean over what is really in its window. While batches are added, each gradient is divided
by the size the window is expected to have; when the size is known beforehand this is the whole arithmetic, and equal to
the bit to ``(loss / k).backward()``. If the window turns out otherwise, or its batches have weights, the gradients are
corrected once, at the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
        owed: whether the window has ended and its update has yet to come, as a stop came between.
    """

    def __init__(self, steps: int, mean: Callable[[Weight], Weight] | None = None) -> None:
        """Make an empty window; ``mean`` is that of a number over the ranks, None where there is one."""
        self.steps = steps
        self._mean = mean
        self.due = True
        self.clear()

    def clear(self) -> None:
        """Begin a new window with the next batch."""
        self.begun = 0
        self.expected = self.steps
        self.owed = False
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
            UpdateError: a weight that is none, weights for some batches of a window only, or two for one batch.
        """
        if weight is not None:
            _check_weight(weight)
        if self.steps == 1 and (weight is None or self._mean is None):
            return loss
        if self.steps > 1:
            self._check_fits(weight)
        if weight is None:
            return loss if self.expected == 1 else loss / self.expected
        if self.total is None and not self.has_batch:
            # by the weight of the window's first batch all are measured, and the ranks agree on it
            self._reference = _reference(weight if self._mean is None else self._mean(weight))
        return loss * (weight / (self._reference * self.expected))

    def add_batch(self, weight: Weight | None) -> None:
        """Count the gradient of the batch in work, once it has been added."""
        if self.steps == 1:
            self.count = 1  # a user who adds several batches by hand gets their sum, as in a plain loop
        elif not self.has_batch:
            self.count += 1
            if weight is not None:
                self.total = weight if self.total is None else self.total + weight
        self.has_batch, self._batch_weight = True, weight

    def _check_fits(self, weight: Weight | None) -> None:
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
        if self.total is not None:
            total = self.total if self._mean is None else self._mean(self.total)
            factor = self._reference * self.expected / total
            return factor if isinstance(factor, Tensor) or factor != 1.0 else None
        batches = max(self.count, 1)
        return None if batches == self.expected else self.expected / batches

    def state_dict(self) -> dict[str, Any]:
        """Return the window as tensors and plain numbers."""
        names = ("begun", "expected", "owed", "count", "total")
        return {name: getattr(self, name) for name in names} | {"reference": self._reference}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a window; by an engine without windows its update is to be made first."""
        self.clear()
        self.begun, self.expected, self.count = state["begun"], state["expected"], state["count"]
        self.total, self._reference = state["total"], state["reference"]
        self.owed = state["owed"] or (self.steps == 1 and self.count > 0)


def multiply(gradients: list[Tensor], factor: Weight) -> None:
    """Multiply gradients in place. Does not wait for the device."""
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def _check_weight(weight: Weight) -> None:
    """Refuse what cannot be a number of items; the number in a tensor is not looked at, which would wait for it."""
    if isinstance(weight, Tensor):
        if weight.ndim:
            raise UpdateError(f"weight= is a number or a tensor of shape (), got shape {tuple(weight.shape)}")
        return
    elif isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf:
        return
    raise UpdateError(
        f"weight= is how many items the loss is the mean of, a number more than 0, got {weight!r}: call no backward "
        "for a batch without items"
    )


def _reference(weight: Weight) -> Weight:
    """Return the weight of a window's first batch, by which all are measured; of no items, that of one."""
    return torch.where(weight > 0, weight, 1) if isinstance(weight, Tensor) else weight


def _is_same(one: Weight | None, other: Weight | None) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other  # comparing numbers on a device would wait for it
    return one == other
