"""What Ignite sees of the ranks: all of them, or this process alone.

Ignite finds the process group by itself, through its module ``ignite.distributed``, and every metric then reduces over
all ranks. An engine that runs on one rank only would wait for the others forever. And to find the group is a
collective, which must not happen where one rank first asks: so it is done once, when the ranks' strategy is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ignite.distributed.utils as idist
import torch.distributed as dist
from ignite.distributed.comp_models import _SerialModel  # type: ignore[attr-defined]

__all__ = ["RanksAsIgniteSees", "alone"]


class RanksAsIgniteSees:
    """The ranks of the process group, as Ignite has found them."""

    def __init__(self) -> None:
        """Let Ignite look for the group. A collective."""
        idist.sync()
        self._model = idist._model

    @contextmanager
    def region(self) -> Iterator[None]:
        """Let Ignite see these ranks, within a region that is :func:`alone` too. No collective."""
        with _as_ignite_sees(self._model):
            yield


@contextmanager
def alone() -> Iterator[None]:
    """Let Ignite see one process for the length of the region. No collective; nothing where there is no group.

    Uses names that are private to Ignite, as it has no public way; ``tests/test_alone.py`` tells when they change.
    """
    if dist.is_available() and dist.is_initialized():
        with _as_ignite_sees(_SerialModel()):
            yield
    else:
        yield


@contextmanager
def _as_ignite_sees(model: object) -> Iterator[None]:
    before = idist._model, idist._need_to_sync
    idist._model, idist._need_to_sync = model, False  # type: ignore[assignment]
    try:
        yield
    finally:
        idist._model, idist._need_to_sync = before
