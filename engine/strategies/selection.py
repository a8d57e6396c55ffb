"""From ``Engine(strategy=...)`` to a strategy object."""

from __future__ import annotations

import weakref

from torch import nn

from ..errors import StrategyError
from .base import Model, Strategy, modules_of
from .devices import parameter_devices
from .single import SingleDevice

__all__ = ["resolve"]

# A trainer on the CPU of a machine with a GPU, and an evaluator of the same model that is told nothing: it must not
# move the model away. Nothing may be written on the user's model, so it is noted here, weakly at both ends.
_strategies: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Strategy]] = weakref.WeakKeyDictionary()


def resolve(strategy: str | Strategy, model: Model | None) -> Strategy:
    """Return the strategy that ``strategy`` means for ``model``.

    ``"auto"`` and ``"single"`` keep the strategy that the model, or the larger model it is a part of, was resolved to
    before, as long as that one is in use somewhere and the model is still on its device; else they make a
    ``SingleDevice()``.

    Raises:
        StrategyError: there is no such strategy.
    """
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif strategy in ("auto", SingleDevice.name):
        chosen = _strategy_of(model) or SingleDevice()
    else:
        raise _unknown(strategy)
    for root in modules_of(model):
        for module in root.modules():
            _strategies[module] = weakref.ref(chosen)
    return chosen


def _strategy_of(model: Model | None) -> Strategy | None:
    for module in modules_of(model):
        reference = _strategies.get(module)
        strategy = None if reference is None else reference()
        if strategy is not None and strategy.device in (parameter_devices(module) or [strategy.device]):
            return strategy
    return None


def _unknown(strategy: object) -> StrategyError:
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return StrategyError(f"strategy is the class {strategy.__name__}: pass an instance, {strategy.__name__}()")
    return StrategyError(
        f"strategy={strategy!r} is no strategy: pass 'auto', 'single', or an instance such as SingleDevice('cpu')"
    )
