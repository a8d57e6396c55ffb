"""Refuses models that are wrapped already, before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ModelError
from .selection import is_under_a_strategy

__all__ = ["check_model"]

_INSIDE = (
    "pass the module inside it, `.module`: where a model runs is the strategy's business, and the model stays plain"
)
_BEFORE = "pass the module as it was before sharding: where a model runs is the strategy's business"
_COMPILE = "pass the module that torch.compile was given, and compile that one in place: `module.compile()`"

# Where each wrapper is found, its name there, and what to do. Of a class that nobody has imported there is no instance,
# so these are looked up and never imported: FSDP and dynamo take seconds to load.
_WRAPPERS = (
    (DistributedDataParallel.__module__, "DistributedDataParallel", _INSIDE),
    (DataParallel.__module__, "DataParallel", _INSIDE),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _INSIDE),
    ("torch.distributed.fsdp", "FSDPModule", _BEFORE),
    ("torch._dynamo.eval_frame", "OptimizedModule", _COMPILE),
)


def check_model(model: object) -> None:
    """Check that ``model`` is a module, a mapping from names to modules, or None, and that none of them is a wrapper.

    Only the modules themselves are looked at: a wrapper that is a child of one of them is its owner's business.

    Raises:
        ModelError: it is not, with the remedy.
    """
    if model is None:
        return
    if not isinstance(model, Mapping):
        _check_module(model, "model")
        return
    if not model:
        raise ModelError("model is an empty mapping: give it modules by name, or leave model=None")
    for name, module in model.items():
        if not isinstance(name, str):
            raise ModelError(f"model has the key {name!r}: the keys of a mapping of modules are their names, strings")
        _check_module(module, f"model[{name!r}]")


def _check_module(module: object, position: str) -> None:
    if isinstance(module, type):
        raise ModelError(f"{position} is the class {module.__qualname__}: pass an instance, {module.__qualname__}(...)")
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{position} is a {type(module).__qualname__}: pass a torch.nn.Module, or a dict that gives modules names"
        )
    for home, name, remedy in _WRAPPERS:
        wrapper = getattr(sys.modules.get(home), name, None)
        if wrapper is not None and isinstance(module, wrapper) and not _is_ours(name, module):
            raise ModelError(f"{position} is wrapped already ({name}): {remedy}")


def _is_ours(name: str, module: nn.Module) -> bool:
    """Say whether a sharded module is one that a strategy of ours has sharded: that is the user's own model still."""
    return name == "FSDPModule" and is_under_a_strategy(module)
