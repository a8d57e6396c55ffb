"""Counting the samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["count_samples"]


def count_samples(batch: Any) -> int | None:
    """Return the length of the first tensor of a batch that has one; None if there is none."""
    return next((tensor.shape[0] for tensor in _tensors(batch) if tensor.dim()), None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
