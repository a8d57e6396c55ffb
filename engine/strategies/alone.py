"""Makes Ignite's metrics compute for this process alone, where a process group exists and must not be asked.

Ignite finds the group by itself, through its module ``ignite.distributed``, and every metric then reduces over all
ranks. An engine that runs on one rank only would wait for the others forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ignite.distributed.utils as idist
from ignite.distributed.comp_models import _SerialModel  # type: ignore[attr-defined]

__all__ = ["alone", "together"]


@contextmanager
def alone() -> Iterator[None]:
    """Let Ignite see one process for the length of the region. No collective.

    Uses names that are private to Ignite: it has no public way. ``tests/test_alone.py`` tells when they change.
    """
    with _as_ignite_sees(_SerialModel(), need_to_sync=False):
        yield


@contextmanager
def together() -> Iterator[None]:
    """Let Ignite look for the process group anew, within a region that is :func:`alone`. No collective."""
    with _as_ignite_sees(_SerialModel(), need_to_sync=True):
        yield


@contextmanager
def _as_ignite_sees(model: object, need_to_sync: bool) -> Iterator[None]:
    before = idist._model, idist._need_to_sync
    idist._model, idist._need_to_sync = model, need_to_sync  # type: ignore[assignment]
    try:
        yield
    finally:
        idist._model, idist._need_to_sync = before
