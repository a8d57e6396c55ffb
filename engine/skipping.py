"""Going past batches of a loader without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from .rng import find_generators

__all__ = ["without_loading"]

# these draw from generators of their own, or all at once before the first batch: loading draws nothing that they see
_BY_THEMSELVES = {SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler}


def without_loading(batches: Iterator[Any], draws_again: bool = False) -> Iterator[Any] | None:
    """Return what goes past batches of a loader's iterator by drawing their indices only; None where that is not exact.

    It is not where workers load ahead and draw random numbers of their own, nor with a sampler of the user's, which may
    draw from a generator that the samples draw from too; nor, with ``draws_again`` (the next batch is drawn before any
    generator is put back), where the samples draw from generators of their own. Uses torch's private ``_next_index``,
    which is tested.
    """
    if type(batches) is not _SingleProcessDataLoaderIter:
        return None
    if draws_again and find_generators([batches._dataset, batches._collate_fn]):
        return None
    sampler = batches._index_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return _indices(batches) if type(sampler) in _BY_THEMSELVES else None


def _indices(batches: Any) -> Iterator[Any]:
    while True:
        try:
            yield batches._next_index()
        except StopIteration:
            return
        batches._num_yielded += 1  # torch compares it with the stated length
