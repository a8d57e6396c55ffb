"""Checks the options of strategies where they are given: what came, what was wanted."""

from __future__ import annotations

import inspect
import math
from typing import Any

from ..errors import StrategyError

__all__ = ["check_hook", "check_positive", "check_switches"]


def check_switches(**switches: Any) -> None:
    """Refuse what is neither True nor False.

    Raises:
        StrategyError: as above, with the option's name.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise StrategyError(f"{name}={value!r}: True or False was wanted")


def check_positive(name: str, value: Any, unit: str) -> None:
    """Refuse what is no finite number above 0; None is the default and passes.

    Raises:
        StrategyError: as above.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and math.isfinite(value) and value > 0):
        raise StrategyError(f"{name}={value!r}: a number of {unit} above 0 was wanted, or None for torch's default")


def check_hook(hook: Any, given: Any) -> None:
    """Refuse a communication hook that cannot be called as ``hook(state, bucket)``.

    Raises:
        StrategyError: as above.
    """
    if not callable(hook):
        raise StrategyError(f"comm_hook must be a hook, or a pair of its state and the hook, got {given!r}")
    try:
        inspect.signature(hook).bind(object(), object())
    except TypeError as error:
        raise StrategyError(f"comm_hook is called as hook(state, bucket), but {hook!r}: {error}") from None
    except ValueError:
        return  # some built-in callables have no signature to look at
