"""Rank 0's values for all ranks, whatever their type and layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast", "memory_of"]


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Give rank 0's values to all, in place. A collective."""
    for tensor in {id(one): one for one in tensors}.values():
        place = memory_of(tensor.detach())
        value = place.contiguous()
        # as bytes: gloo knows few types
        dist.broadcast(value if value.is_complex() else value.view(-1).view(torch.uint8), src=0)
        if value.data_ptr() != place.data_ptr():
            place.copy_(value)


def memory_of(tensor: Tensor) -> Tensor:
    """Return a view in which every value is there once: an expanded tensor has one for many, and takes no others."""
    for dimension in reversed(range(tensor.ndim)):
        if not tensor.stride(dimension) and tensor.shape[dimension]:
            tensor = tensor.select(dimension, 0)
    return tensor
