"""What handlers of updates share: an engine's optimizers by name, and the learning rates of one."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine import Engine, HandlerError

__all__ = [
    "is_nth_update",
    "metric_name",
    "metric_patterns",
    "optimizers_of",
    "parameters_of",
    "rates_of",
    "set_rates",
    "the_updating",
]


def optimizers_of(engine: Engine, only: str | None = None) -> dict[str, Optimizer]:
    """Return the engine's optimizers by name.

    Raises:
        HandlerError: it has none, or none of the name ``only``.
    """
    given = engine.optimizer
    if given is None:
        raise HandlerError(f"{engine!r} makes no updates: this handler needs an Engine(..., optimizer=...)")
    optimizers = dict(given) if isinstance(given, Mapping) else dict.fromkeys(engine.state.updates_by_optimizer, given)
    if only is not None and only not in optimizers:
        raise HandlerError(f"optimizer={only!r}: the engine has {', '.join(map(repr, optimizers))}")
    return optimizers


def the_updating(engine: Engine) -> Optimizer:
    """Return the optimizer that the present UPDATE_* event is about."""
    given = engine.optimizer
    optimizer: Optimizer = given[engine.state.updating] if isinstance(given, Mapping) else given
    return optimizer


def is_nth_update(engine: Engine, n: int) -> bool:
    """Say, in ``UPDATE_STARTED``, whether the update would be an n-th one of its optimizer."""
    return n == 1 or (engine.state.updates_by_optimizer[str(engine.state.updating)] + 1) % n == 0


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters that the optimizer holds."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def metric_name(engine: Engine, optimizer: str | None, name: str) -> str:
    """Return the name under which something of an optimizer is recorded; of one in a mapping ``"generator/lr"``."""
    return f"{optimizer}/{name}" if isinstance(engine.optimizer, Mapping) else name


def metric_patterns(name: str) -> tuple[str, ...]:
    """Return the patterns of all names that ``metric_name`` may make of ``name``."""
    return glob.escape(name), f"*/{glob.escape(name)}"


def rates_of(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each group. Waits for the device only for one that is a tensor there."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each group: a tensor stays the same tensor, and a group added since keeps its rate."""
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
