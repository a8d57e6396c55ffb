"""How a sharded module becomes a plain one again, for the length of a copy.

``fully_shard`` changes a module's class, adds hooks and attributes, and puts shards in place of parameters. What is
here knows of each module what it was, and asks nothing of torch but its hooks' origin.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from torch import nn

from ..errors import StrategyError
from .base import ModelT, copying, deep_copy, modules_of
from .fsdp_tensors import whole

__all__ = ["Origins", "copied", "refuse_deepcopy"]

_HOOKS_OF = ("torch.distributed.fsdp.", "torch.distributed.tensor.")


def copied(model: ModelT, origins: Origins) -> ModelT:
    """Return a plain deep copy of ``model``, whole on every rank; see ``Strategy.copy_model``. A collective."""
    modules = list(dict.fromkeys(module for root in modules_of(model) for module in root.modules()))
    with copying():
        memo = _whole_tensors(modules)
        with origins.plain(modules):
            return deep_copy(model, memo)


def _whole_tensors(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Return what ``copy.deepcopy`` is to find as the copy of each sharded tensor."""
    memo: dict[int, Any] = {}
    for module in modules:
        for one in module.parameters(recurse=False):
            if id(one) not in memo and hasattr(one, "device_mesh"):
                memo[id(one)] = nn.Parameter(whole(one), requires_grad=one.requires_grad)
                vars(memo[id(one)]).update(copy.deepcopy(vars(one)))
        for buffer in module.buffers(recurse=False):
            if hasattr(buffer, "device_mesh"):
                memo[id(buffer)] = whole(buffer)
    return memo


class Origin(NamedTuple):
    """The class of a module before, and the attributes that it has got since."""

    kind: type[nn.Module]
    added: frozenset[str]


class Origins:
    """What modules were before they were sharded. Holds them weakly."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, Origin] = weakref.WeakKeyDictionary()

    def __contains__(self, module: nn.Module) -> bool:
        """Say whether a module is sharded, or a part of one that is."""
        return module in self._known

    @contextmanager
    def noting(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Return the region in which modules are sharded."""
        before = {module: (type(module), vars(module).keys() | ()) for module in modules}
        yield
        for module, (kind, names) in before.items():
            self._known[module] = Origin(kind, frozenset(vars(module).keys() - names))

    @contextmanager
    def plain(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Return the region in which modules have their own classes, attributes and hooks; they keep their shards."""
        sharded = [(module, type(module), vars(module)) for module in modules if module in self._known]
        try:
            for module, _, attributes in sharded:
                origin = self._known[module]
                plain = {name: value for name, value in attributes.items() if name not in origin.added}
                for name, value in plain.items():
                    if "_hooks" in name and isinstance(value, Mapping):
                        plain[name] = _without_torchs(value)
                object.__setattr__(module, "__dict__", plain)
                module.__class__ = origin.kind
            yield
        finally:
            for module, kind, attributes in sharded:
                object.__setattr__(module, "__dict__", attributes)
                module.__class__ = kind


def refuse_deepcopy(memo: Any) -> NoReturn:
    """Stand in for the ``__deepcopy__`` of a sharded module."""
    raise StrategyError(
        "this model is sharded: each rank holds a part of it, which a deep copy alone cannot make whole. Use "
        'engine.fork(step, model="copy") to work with a copy, engine.strategy.copy_model(model) for the plain module, '
        "or engine.strategy.full_state_dict(model) for its weights, on all ranks"
    )


def _without_torchs(hooks: Mapping[Any, Any]) -> Any:
    kept = type(hooks)()
    for key, hook in hooks.items():
        if not str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF):
            kept[key] = hook  # type: ignore[index]
    return kept
