"""Which batches a rank reads of the data that all ranks are given.

A map-style loader has one order of batches, agreed by all ranks, of which rank r of n takes r, r + n, ...: one step of
n ranks sees what one process with batches n times as large would see. What gives batches without an order to agree on
is gone over by every rank, which takes every n-th. Data that is divided already, by the user's own distributed sampler
or by declaration, is read as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from ..errors import DataError
from .base import Uneven
from .dealing import Deal, DealtItems, DealtLoader, DealtStream, Iterate, Turns, stated_length
from .peers import Peers
from .samplers import divider_of, misfit, padding_of

__all__ = ["AlreadySharded", "Shards", "Share", "already_sharded"]

_log = logging.getLogger("pellucid.engine")


@dataclass(frozen=True)
class Share:
    """What a rank reads in one pass.

    Attributes:
        source: what it iterates.
        length: how many batches it takes of that; None: until it ends.
    """

    source: Any
    length: int | None


class AlreadySharded:
    """Data that is this rank's own part already; made by :func:`already_sharded`."""

    def __init__(self, data: Iterable[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # a TypeError, as iterables without a length give

    def __repr__(self) -> str:
        return f"already_sharded({self.data!r})"


def already_sharded(data: Iterable[Any]) -> AlreadySharded:
    """Declare that ``data`` differs by rank: every rank gives its own part, and all of it is read there.

    In training all ranks end an epoch together, when the first of them has no batch left. In one process it changes
    nothing.

    Args:
        data: an iterable of batches, such as a DataLoader over this rank's files.

    Raises:
        DataError: not an iterable. A callable ``state -> iterable`` declares what it returns.
    """
    if isinstance(data, AlreadySharded):
        return data
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        remedy = "let the callable return already_sharded(...)" if callable(data) else "give a DataLoader or a list"
        raise DataError(f"already_sharded takes an iterable of batches, got {data!r}: {remedy}")
    return AlreadySharded(data)


class _Kind(IntEnum):
    ORDER = 1  # batches by an order that the ranks agree on
    ITEMS = 2  # batches at known places
    STREAM = 3  # batches as they come
    PART = 4  # divided already


class Shards:
    """What this rank reads of the data that an engine is given.

    Args:
        peers: all ranks.
        rank: this one among those that read different data.
        world_size: the number of those.
        uneven: what becomes of training batches that do not go to all ranks.
        iterate: given a sampler and its data set, iterates the sampler as every other rank does.
    """

    def __init__(self, peers: Peers, rank: int, world_size: int, uneven: Uneven, iterate: Iterate) -> None:
        self._peers = peers
        self._rank = rank
        self._world_size = world_size
        self._uneven: Uneven = uneven
        self._iterate = iterate
        self._notices = _Notices(peers.rank == 0, world_size, uneven)
        # by loader and whether it trains: workers that a copy keeps live on from pass to pass
        self._loaders: WeakKeyDictionary[DataLoader[Any], dict[bool, DealtLoader]] = WeakKeyDictionary()

    def of(self, data: Any, train: bool) -> Share:
        """Return what this rank reads of ``data`` in one pass. A collective; iterating it is one too.

        Args:
            data: any iterable, of the same kind and the same length on all ranks, unless it is divided already.
            train: in training every rank gets as many batches; in evaluation every batch goes to one rank.

        Raises:
            DataError: on all ranks: the data differs between them, or has too few batches for all of them.
        """
        is_declared = isinstance(data, AlreadySharded)
        data = data.data if isinstance(data, AlreadySharded) else data
        divider = divider_of(data) if isinstance(data, DataLoader) and not is_declared else None
        problem = None if divider is None else misfit(divider, self._rank, self._world_size)
        kind = _Kind.PART if is_declared or divider is not None else _kind_of(data)
        lowest, highest = self._compare(kind, _trusted_length(data), problem)
        if kind is _Kind.PART:
            if not train and padding_of(divider):
                self._notices.tell_padding(padding_of(divider), type(divider).__name__)
            return self._part(data, lowest, highest, train)
        if lowest != highest:
            raise DataError(
                f"the ranks were given data of different lengths, {lowest} to {highest} batches: give every rank the "
                "same data, of which each takes its part, or declare that it is divided: already_sharded(data)"
            )
        return self._dealt(kind, data, lowest, train)

    def _compare(self, kind: _Kind, length: int | None, problem: str | None) -> tuple[int | None, int | None]:
        """Return the smallest and the largest length on any rank, None for one that is unknown."""
        length = -1 if length is None else length
        numbers = [kind, -kind, length, -length, problem is not None]
        last, first, highest, lowest, has_problem = self._peers.largest("the opening of data", numbers)
        if has_problem:
            raise DataError(problem or "the distributed sampler of another rank does not fit there: its error says why")
        if last != -first:
            raise DataError(
                f"the ranks were given data of different kinds: {_Kind(-first).name.lower()} and "
                f"{_Kind(last).name.lower()}. Give every rank the same, a DataLoader or a list or an iterable"
            )
        return (None if lowest == 1 else -lowest), (None if highest == -1 else highest)

    def _part(self, data: Any, lowest: int | None, highest: int | None, train: bool) -> Share:
        length = _trusted_length(data)
        if not train or lowest is None or lowest == highest:
            return Share(data, None if train and lowest is None else length)
        self._notices.tell_parts(self._peers.gather(length, "the lengths of the ranks' data"))
        return Share(data, lowest)

    def _dealt(self, kind: _Kind, data: Any, total: int | None, train: bool) -> Share:
        deal = Deal(self._rank, self._world_size, self._uneven if train else None)
        if train and total is not None:
            self._notices.check_total(total)
        if isinstance(data, DataLoader):
            source: Any = self._loader(data, deal, train)
        elif kind is _Kind.ITEMS:
            source = DealtItems(data, deal)
        else:
            source = Turns(data, deal) if isinstance(data, Iterator) else DealtStream(data, deal)
        if total is None:
            return Share(source, None)
        return Share(source, len(deal.places(total)))

    def _loader(self, loader: DataLoader[Any], deal: Deal, train: bool) -> DataLoader[Any]:
        dealt = self._loaders.setdefault(loader, {})
        if train not in dealt:
            dealt[train] = DealtLoader(loader, deal, self._iterate, self._notices.check_total)
        return dealt[train].follow(loader)


class _Notices:
    """What the user is told of data that does not go round: each thing once, by one rank."""

    def __init__(self, speaks: bool, world_size: int, uneven: Uneven) -> None:
        self._speaks = speaks
        self._world_size = world_size
        self._uneven = uneven
        self._said: set[str] = set()

    def check_total(self, total: int) -> None:
        """Refuse training data of fewer batches than ranks, and tell of batches that are left out."""
        n = self._world_size
        if self._uneven == "pad" or total % n == 0:
            return
        if total < n:
            raise DataError(
                f"the data has {total} batch(es), too few to train on {n} ranks, of which each takes one per step: "
                'give more data or a smaller batch_size, start fewer ranks, or repeat batches with uneven="pad"'
            )
        self._say(
            f"{total} batches do not divide by {n} ranks: each rank takes {total // n}, and {total % n} of every "
            'epoch are left out. To repeat batches instead: uneven="pad" of the strategy'
        )

    def tell_parts(self, lengths: list[int]) -> None:
        """Refuse training data of which a rank has no part, and tell of batches that are left out."""
        counts = ", ".join(map(str, lengths))
        if not min(lengths):
            raise DataError(
                f"the ranks have {counts} batches (rank 0 first), and one without a batch cannot train: divide the "
                "data so that every rank has some"
            )
        self._say(
            f"the ranks have {counts} batches (rank 0 first): each takes {min(lengths)} in every epoch, and the rest "
            "is left out. Divide the data evenly to train on all of it"
        )

    def tell_padding(self, samples: int, kind: str) -> None:
        """Tell of a distributed sampler that does not give every sample once in an evaluation."""
        self._say(
            f"in this evaluation the loader's {kind} "
            + (f"counts {samples} sample(s) twice" if samples > 0 else f"leaves {-samples} sample(s) out")
            + " to give all ranks as many: without it every sample is counted once"
        )

    def _say(self, text: str) -> None:
        if self._speaks and text not in self._said:
            _log.warning("%s", text)
        self._said.add(text)


def _kind_of(data: Any) -> _Kind:
    if isinstance(data, DataLoader):
        return _Kind.STREAM if isinstance(data.dataset, IterableDataset) else _Kind.ORDER
    return _Kind.ITEMS if isinstance(data, list | tuple | range) else _Kind.STREAM


def _trusted_length(data: Any) -> int | None:
    """Return how many batches there are where that is sure: a map-style loader's order, a list."""
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or not _is_iterated_by_torch(data):
            return None
        return stated_length(data.sampler if data.batch_sampler is None else data.batch_sampler)
    return len(data) if isinstance(data, list | tuple | range) else None


def _is_iterated_by_torch(loader: DataLoader[Any]) -> bool:
    """Say whether the loader gives one batch for each item of its sampler, as a class of the user's may not."""
    return type(loader).__iter__.__module__.split(".")[0] in {"torch", "torchdata"}
