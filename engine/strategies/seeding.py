"""One seed for a program, on one process or on many."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from ignite.utils import manual_seed

from ..errors import StrategyError

__all__ = ["seed_everything"]

_TOO_LARGE = 2**32  # for NumPy


def seed_everything(seed: SupportsIndex) -> int:
    """Seed Python, NumPy, torch and all devices, and return the seed.

    Called with the same seed on every rank, what is made before a run is the same on all: initial weights, splits of
    the data. Nothing more is needed: in a run the engine lets ranks differ where they must, in dropout masks and in
    the workers that load data, and has them agree on the order of samples by itself.

    Args:
        seed: a whole number, at least 0 and less than 2**32.

    Raises:
        StrategyError: it is none.
    """
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < _TOO_LARGE:
        raise StrategyError(f"seed={seed!r} must be a whole number, at least 0 and less than 2**32")
    manual_seed(number)
    return number
