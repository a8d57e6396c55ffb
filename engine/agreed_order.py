"""One order of batches for all ranks: the one that rank 0 alone would draw.

A sampler is iterated on every rank, each time from the random state and the generators that rank 0 has when its own
loader asks for the first batch. Nothing but that state is sent, and no order is made as a whole, so samplers without
an end, and those of billions, are as good as any. Only the beginning of the order is compared between ranks.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import DataError
from .rng import GeneratorStates, RandomState, find_generators
from .strategies import Peers

__all__ = ["AgreedOrder"]

# items are drawn some at a time: to change the random state for each would take longer than to draw it
_DRAWN_PER_RANK = 64
_COMPARED = 16


class AgreedOrder:
    """Iterates samplers so that all ranks see the same.

    The random state of the other ranks stays as it is, as if nothing had been drawn. Rank 0's goes on as it would with
    the plain loader, as long as nobody else draws random numbers while the sampler is at work; if somebody does, the
    sampler goes on from where it stood, the same on all ranks. The generators that a sampler keeps (a
    ``torch.Generator``, say) end in the same state everywhere. Those of the data set are its own.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __call__(self, sampler: Any, dataset: Any) -> Iterator[Any]:
        """Return an iterator over ``sampler``. Asking it for its first item is two collectives.

        Args:
            sampler: what the loader asks for indices.
            dataset: what the sampler may refer to, but draws nothing from.

        Raises:
            DataError: when iterated, at once on all ranks: they have drawn different things.
        """
        if self._peers.rank:
            return self._follow(sampler, dataset)
        # a loader makes its sampler's iterator, draws a seed for its workers, and only then asks for indices;
        # a sampler may draw its order at the first of these moments or at the last
        before = _capture(sampler)
        return self._lead(sampler, before, iter(sampler))

    def _lead(self, sampler: Any, before: Any, items: Iterator[Any]) -> Iterator[Any]:
        now = _capture(sampler)
        self._peers.broadcast((before, now), "the random state for the order of batches")
        yield from self._draw(sampler, items, _Draws(now[0], leads=True))

    def _follow(self, sampler: Any, dataset: Any) -> Iterator[Any]:
        before, now = self._peers.broadcast(None, "the random state for the order of batches")
        with _Draws(before[0]).region():
            _install(before[1], sampler, dataset)
            items = iter(sampler)
        _install(now[1], sampler, dataset)
        yield from self._draw(sampler, items, _Draws(now[0]))

    def _draw(self, sampler: Any, items: Iterator[Any], draws: _Draws) -> Iterator[Any]:
        at_once = _DRAWN_PER_RANK * self._peers.world_size
        drawn: list[Any] | None = None
        while drawn is None or len(drawn) == at_once:
            is_first = drawn is None
            with draws.region():
                drawn = list(itertools.islice(items, at_once))
            if is_first:
                self._check_same(sampler, drawn[:_COMPARED])
            yield from drawn

    def _check_same(self, sampler: Any, beginning: list[Any]) -> None:
        number = zlib.crc32(repr(_comparable(beginning)).encode())
        largest, negated = self._peers.largest("the comparison of the order of batches", [number, -number])
        if largest != -negated:
            raise DataError(
                f"the ranks have drawn different orders of batches from {type(sampler).__name__}: give every rank the "
                "same data set and the same sampler, which draws from the global generators of torch, NumPy or Python, "
                "or from one that it keeps as an attribute, not from one that it makes anew with a seed of its own. "
                "Data that differs by rank is declared so: already_sharded(loader)"
            )


class _Draws:
    """The random state in which one sampler draws, apart from that of the rest of the program.

    Args:
        state: as plain data.
        leads: the rest of the program goes on from what the sampler has drawn, where it is in that state too.
    """

    def __init__(self, state: dict[str, Any], leads: bool = False) -> None:
        self._state = RandomState.from_state_dict(state)
        self._leads = leads

    @contextmanager
    def region(self) -> Iterator[None]:
        """Return the region in which the sampler is asked."""
        outside = RandomState()
        goes_along = self._leads and _are_equal(outside, self._state)
        self._state.restore()
        try:
            yield
        finally:
            self._state = RandomState.from_state_dict(_host_state())
            if not goes_along:
                outside.restore()


def _host_state() -> dict[str, Any]:
    """Return the random state without that of devices: each rank has a device of its own."""
    return {**RandomState().state_dict(), "devices": {}}


def _are_equal(one: RandomState, other: RandomState) -> bool:
    if one.python != other.python or not torch.equal(one.torch, other.torch):
        return False
    if one.numpy is None or other.numpy is None:
        return one.numpy is other.numpy
    kind, keys, *rest = one.numpy
    other_kind, other_keys, *other_rest = other.numpy
    return bool((kind, rest) == (other_kind, other_rest) and (keys == other_keys).all())


def _capture(sampler: Any) -> tuple[dict[str, Any], list[Any]]:
    return _host_state(), GeneratorStates(sampler).state_dict()


def _install(states: list[Any], sampler: Any, dataset: Any) -> None:
    """Put rank 0's states into the generators of the sampler, not into those that only the data set keeps."""
    own = list(_attributes(sampler))
    of_data = [one for one in find_generators(dataset) if not any(one is other for other in own)]
    kept = GeneratorStates(of_data)
    GeneratorStates.from_state_dict(states).restore(sampler)
    kept.put_back()


def _attributes(sampler: Any) -> Iterator[Any]:
    """Yield what a sampler, and the sampler that it is made of, and so on, have as attributes."""
    for _ in range(10):
        yield from getattr(sampler, "__dict__", {}).values()
        sampler = getattr(sampler, "sampler", None)


def _comparable(value: Any) -> Any:
    """Return indices as something that looks the same in every process."""
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, str | bytes | int | float | None):
        return value
    tolist = getattr(value, "tolist", None)  # tensors, NumPy's numbers and arrays
    return type(value).__qualname__ if tolist is None else tolist()
