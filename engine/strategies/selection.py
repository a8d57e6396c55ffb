"""From ``Engine(strategy=...)`` to a strategy object."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from ..errors import StrategyError
from .base import Model, Strategy, modules_of
from .data_parallel import DataParallel
from .ddp import DDP
from .devices import parameter_devices
from .fsdp import FSDP
from .local import LocalView
from .processes import are_several
from .single import SingleDevice

__all__ = ["is_under_a_strategy", "resolve"]

_NAMED: dict[str, Callable[[], Strategy]] = {one.name: one for one in (SingleDevice, DDP, FSDP, DataParallel)}

# A trainer on the CPU of a machine with a GPU, and an evaluator of the same model that is told nothing: it must not
# move the model away. Nothing may be written on the user's model, so it is noted here, weakly at both ends.
_strategies: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Strategy]] = weakref.WeakKeyDictionary()
# The strategies that were made by name, while they are in use: engines of one program share the process groups.
_made: weakref.WeakValueDictionary[str, Strategy] = weakref.WeakValueDictionary()


def resolve(strategy: str | Strategy, model: Model | None) -> Strategy:
    """Return the strategy that ``strategy`` means for ``model``.

    A name keeps the strategy that the model, or the larger model it is a part of, was resolved to before, if it is of
    that name, in use somewhere, and the model is still on its device. ``"auto"`` keeps any; else it is ``DDP`` where
    there are several processes, and ``SingleDevice`` where there is one. ``"single"`` for a model under ``DDP`` is this
    rank alone. Where a parallel strategy is made, this is a collective.

    Raises:
        StrategyError: there is no such strategy, or the model is under another one.
    """
    known = _strategy_of(model)
    if isinstance(strategy, Strategy):
        chosen = strategy
    elif strategy == "auto":
        chosen = known or _make(DDP.name if are_several() else SingleDevice.name)
    elif isinstance(strategy, str) and strategy in _NAMED:
        chosen = known if known is not None and known.name == strategy else _make(strategy)
    else:
        raise _unknown(strategy)
    if isinstance(chosen, SingleDevice) and isinstance(known, DDP) and known.peers is not None:
        return LocalView(known) if isinstance(strategy, str) else chosen
    if known is not None and known is not chosen:
        _refuse_another(known, chosen)
    if strategy == SingleDevice.name and are_several():
        return chosen  # this engine's alone: another one that is told nothing is for all ranks
    for root in modules_of(model):
        for module in root.modules():
            _strategies[module] = weakref.ref(chosen)
    return chosen


def is_under_a_strategy(module: nn.Module) -> bool:
    """Say whether a strategy that is in use has prepared this module."""
    return _strategy_of(module) is not None


def _make(name: str) -> Strategy:
    if name == SingleDevice.name:
        return SingleDevice()  # each model has its own place
    made = _made.get(name)
    if made is None or not _is_usable(made):
        made = _made[name] = _NAMED[name]()
    return made


def _strategy_of(model: Model | None) -> Strategy | None:
    for module in modules_of(model):
        reference = _strategies.get(module)
        strategy = None if reference is None else reference()
        if strategy is None or not _is_usable(strategy):
            continue
        if strategy.peers is not None or strategy.device in (parameter_devices(module) or [strategy.device]):
            return strategy
    return None


def _is_usable(strategy: Strategy) -> bool:
    """Say whether the ranks of a strategy are there: the process group may have been ended, and another one made."""
    return strategy.peers is None or strategy.peers.are_there()


def _refuse_another(known: Strategy, chosen: Strategy) -> None:
    if known.peers is None:
        return  # a model may be moved from one device to another, or shared with other ranks
    if known.forward_is_collective and isinstance(chosen, SingleDevice):
        raise StrategyError(
            f"the model is under {known!r}, where each rank holds a part of it: one rank alone cannot run it. Let all "
            "ranks run the engine (leave strategy out), or give it a whole copy: engine.strategy.copy_model(model)"
        )
    raise StrategyError(
        f"the model is under {known!r} already, and cannot be under {chosen!r} too: leave strategy out to share the "
        "first, or give the same object to both engines"
    )


def _unknown(strategy: object) -> StrategyError:
    if isinstance(strategy, type) and issubclass(strategy, Strategy):
        return StrategyError(f"strategy is the class {strategy.__name__}: pass an instance, {strategy.__name__}()")
    names = ", ".join(map(repr, ["auto", *_NAMED]))
    return StrategyError(
        f"strategy={strategy!r} is no strategy: pass {names}, or an instance such as SingleDevice('cpu')"
    )
