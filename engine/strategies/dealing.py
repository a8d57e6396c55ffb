"""How one rank takes its part of what all ranks are given: every item in its turn, of an order, a list or a stream.

A loader is never changed: a shallow copy of it gets another sampler, or takes its turns in what the loader gives.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import DataError
from .base import Uneven

__all__ = ["Deal", "DealtItems", "DealtLoader", "DealtSampler", "DealtStream", "Turns", "stated_length"]

# given a sampler and its data set, iterates it as every other rank does
Iterate = Callable[[Any, Any], Iterator[Any]]


@dataclass(frozen=True)
class Deal:
    """Who gets what of ``total`` items: rank r of n the items r, r + n, ...

    Attributes:
        rank: r.
        world_size: n.
        uneven: what becomes of the last items where n does not divide ``total``; None: some ranks get one more.
    """

    rank: int
    world_size: int
    uneven: Uneven | None

    def places(self, total: int) -> range:
        """Return where in the order the items of this rank are; beyond its end it begins again."""
        end, n = total, self.world_size
        if self.uneven == "trim":
            end -= total % n
        elif self.uneven == "pad":
            end += -total % n
        return range(self.rank, end, n)


class DealtItems:
    """This rank's part of a list, a tuple or a range."""

    def __init__(self, items: Sequence[Any], deal: Deal) -> None:
        self._items = items
        self._places = deal.places(len(items))
        self._total = len(items)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        return (self._items[place % self._total] for place in self._places)


class DealtSampler:
    """This rank's part of what a sampler gives, in a loader's copy.

    Args:
        sampler: the loader's.
        dataset: the loader's.
        deal: says which part.
        iterate: as every other rank does.
        check: told how many items there were, where the last round did not go to all ranks.
    """

    def __init__(self, sampler: Any, dataset: Any, deal: Deal, iterate: Iterate, check: Callable[[int], None]) -> None:
        self.sampler = sampler
        self._dataset = dataset
        self._deal = deal
        self._iterate = iterate
        self._check = check

    def __len__(self) -> int:
        return len(self._deal.places(len(self.sampler)))

    def __iter__(self) -> Iterator[Any]:
        return self._take(self._iterate(self.sampler, self._dataset))

    def _take(self, items: Iterator[Any]) -> Iterator[Any]:
        rank, n, uneven = self._deal.rank, self._deal.world_size, self._deal.uneven
        first: list[Any] = []
        rounds = 0
        while dealt := list(itertools.islice(items, n)):
            first = first or dealt
            count = len(dealt)
            if count < n and uneven is not None:
                self._check(rounds * n + count)
            if rank < count and (count == n or uneven != "trim"):
                yield dealt[rank]
            elif uneven == "pad":
                yield first[(rank - count) % len(first)]
            rounds += 1


class Turns(Iterator[Any]):
    """Gives one of every n items of an iterator, when all n are drawn: all ranks stand at the same place in it.

    Of a last round that is not complete some ranks get an item, as many as there are items.
    """

    def __init__(self, items: Iterator[Any], deal: Deal) -> None:
        self._items = items
        self._deal = deal

    def __next__(self) -> Any:
        own: list[Any] = []
        for place, item in enumerate(itertools.islice(self._items, self._deal.world_size)):
            if place == self._deal.rank:
                own.append(item)
            del item  # else it would live on while the next one is made
        if not own:
            raise StopIteration
        return own.pop()

    @property
    def _shutdown_workers(self) -> Any:
        """What a loader's iterator has, for whoever ends its worker processes."""
        return self._items._shutdown_workers  # type: ignore[attr-defined]


class DealtStream:
    """This rank's turns in an iterable of unknown length."""

    def __init__(self, data: Iterable[Any], deal: Deal) -> None:
        self.data = data
        self._deal = deal

    def __iter__(self) -> Iterator[Any]:
        return Turns(iter(self.data), self._deal)


class DealtLoader:
    """A loader's shallow copy that gives this rank's part, and follows what the user sets on the loader later.

    Raises:
        DataError: the loader keeps an iterator of its own, which its copy would share.
    """

    def __init__(self, loader: DataLoader[Any], deal: Deal, iterate: Iterate, check: Callable[[int], None]) -> None:
        self._replaced: dict[str, Any] = {"_iterator": None}  # one with persistent workers
        self.copy = copy.copy(loader)
        if isinstance(loader.dataset, IterableDataset):
            self._replaced["_deal"] = deal
            self.copy.__class__ = _taking_turns(type(loader))
        else:
            _refuse_own_iterator(loader)
            name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._replaced[name] = DealtSampler(getattr(loader, name), loader.dataset, deal, iterate, check)
        vars(self.copy).update(self._replaced)  # torch forbids to assign some of these
        self._seen = dict(vars(loader))

    def follow(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the copy, after what has been set on ``loader`` since is set on it too."""
        for name, value in vars(loader).items():
            if name not in self._replaced and (name not in self._seen or self._seen[name] is not value):
                vars(self.copy)[name] = value
        self._seen = dict(vars(loader))
        return self.copy


def _taking_turns(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """Return a class of the same layout as ``kind``, which an instance of it may be changed to."""

    class Dealt(kind):  # type: ignore[valid-type, misc]
        _deal: Deal

        def __iter__(self) -> Any:
            return Turns(super().__iter__(), self._deal)

        def __len__(self) -> int:
            return len(self._deal.places(super().__len__()))

    Dealt.__name__ = Dealt.__qualname__ = f"Dealt{kind.__name__}"
    return Dealt


def _refuse_own_iterator(loader: DataLoader[Any]) -> None:
    kept = [name for name, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter)]
    if set(kept) - {"_iterator"}:
        raise DataError(
            f"this {type(loader).__name__} keeps an iterator over all batches as its attribute {kept[0]!r}, so it "
            "cannot give each rank its own: use a DataLoader with persistent_workers=True, or divide the data by rank "
            "and declare it: already_sharded(loader)"
        )


def stated_length(data: Any) -> int | None:
    """Return what ``len(data)`` says, None where it says nothing."""
    try:
        return len(data)
    except (TypeError, NotImplementedError, AttributeError):
        return None
