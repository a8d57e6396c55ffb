"""Data that says itself where it stands: torchdata's StatefulDataLoader, or anything else with its two methods.

Such data goes on from a state of its own, and no batch is drawn again. Its state tells of all that was drawn; where a
batch was drawn and is not done, the pass begins in the state that it was opened in, and is gone through again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["is_stateful", "place_between", "place_in", "tell_doubts"]

_log = logging.getLogger("pellucid.engine")


def is_stateful(source: Any) -> bool:
    """Say whether the data has ``state_dict()`` and ``load_state_dict(state)``."""
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))


def place_in(source: Any, batches: Iterator[Any]) -> Any:
    """Return where a pass stands: as its iterator says, which another run over the same data does not change."""
    teller: Any = batches if callable(getattr(batches, "state_dict", None)) else source
    return copy.deepcopy(teller.state_dict())


def place_between(source: Any) -> Any:
    """Return the state of data that no pass goes over; None for a loader, which begins each pass as it was built."""
    return None if isinstance(source, DataLoader) else copy.deepcopy(source.state_dict())


def tell_doubts(source: Any, has_place: bool, had_workers: bool) -> None:
    """Say, where a run is taken up again, what of it may not be as if it had not been stopped.

    Args:
        source: the data.
        has_place: it goes on from its own state.
        had_workers: there were persistent workers already when its pass was opened.
    """
    if not getattr(source, "num_workers", 0):
        return
    if has_place:
        why = f"the state of a {type(source).__name__} leaves out"
    elif had_workers:
        why = "persistent workers keep to themselves"
    else:
        return
    _log.warning(
        "%s the random numbers of its worker processes: if the samples draw any (augmentation), the run goes on with "
        "others than a run that was not stopped. num_workers=0, or a DataLoader without persistent workers, is exact",
        why,
    )
