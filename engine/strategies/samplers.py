"""Samplers of the user's that divide the data among ranks themselves: how they are known, and what they are told.

A sampler divides the data if it says so by torch's convention, an attribute ``num_replicas``, or with both ``rank`` and
``world_size``. It may be the loader's sampler, its batch sampler, or what either is made of (an attribute ``sampler``).
One that makes a single part leaves the data whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

__all__ = ["divider_of", "misfit", "padding_of", "parts_of", "tell_epoch"]


def divider_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that divides the data of ``loader``, None where none does."""
    return next((one for one in _samplers(loader) if (parts_of(one) or 1) > 1), None)


def parts_of(sampler: Any) -> int | None:
    """Return the number of parts that a sampler divides the data into, None where it says none."""
    parts = getattr(sampler, "num_replicas", None)
    if parts is None and _is_whole(getattr(sampler, "rank", None)):
        parts = getattr(sampler, "world_size", None)
    return parts if _is_whole(parts) else None


def misfit(sampler: Any, rank: int, world_size: int) -> str | None:
    """Say what is wrong with a sampler that divides the data, on this rank; None: it fits."""
    kind, parts, its_rank = type(sampler).__name__, parts_of(sampler), getattr(sampler, "rank", rank)
    if parts != world_size:
        return (
            f"the loader's {kind} divides the data into {parts} parts, and {world_size} ranks read different data: "
            f"make it with num_replicas={world_size}, or leave it out, and every rank gets batches of its own anyway"
        )
    if its_rank != rank:
        return (
            f"the loader's {kind} is made for rank={its_rank}, and this is rank {rank}: make it with rank={rank}, or "
            "leave it out, and every rank gets batches of its own anyway"
        )
    return None


def padding_of(sampler: Any) -> int:
    """Return how many samples a sampler of torch's repeats to make its parts equal; negative: leaves out."""
    if not isinstance(sampler, DistributedSampler):
        return 0
    return int(sampler.total_size - len(sampler.dataset))  # type: ignore[arg-type]  # it has called len itself


def tell_epoch(source: Any, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` of a loader's distributed sampler; other data is left alone. No collective.

    Args:
        source: what a pass goes over, or what was given.
        epoch: from 0, as in torch's examples.
    """
    source = getattr(source, "data", source) if not isinstance(source, DataLoader) else source
    samplers = list(_samplers(source)) if isinstance(source, DataLoader) else []
    if not any(parts_of(one) for one in samplers):
        return
    for one in samplers:
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    seen: list[Any] = []
    left = [loader.sampler, loader.batch_sampler]
    while left:
        sampler = left.pop()
        if sampler is not None and not any(sampler is one for one in seen):
            seen.append(sampler)
            left += [getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
            yield sampler


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
