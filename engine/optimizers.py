"""Which optimizers an engine has: instances, or made by factories from the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .errors import UpdateError
from .strategies.base import modules_of

__all__ = ["OptimizerFactory", "Optimizers", "build_optimizers"]

OptimizerFactory = Callable[[Any], Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer] | None
_ONLY = "optimizer"  # the name of an optimizer that was not given in a mapping


def build_optimizers(given: Any, model: Any) -> tuple[Optimizers, dict[str, Optimizer]]:
    """Return what ``engine.optimizer`` is, and the optimizers by name.

    A factory is called with the parameters of the model, or of the module of the same name in a mapping.

    Raises:
        UpdateError: no optimizer, one that holds none of the model's parameters, or names that do not fit.
    """
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        only = _build_one(given, model, _ONLY)
        return only, {_ONLY: only}
    if not given:
        raise UpdateError("optimizer={} is an empty mapping: leave it out, or give an optimizer for each name")
    named = {name: _build_one(one, _part(model, name), name) for name, one in given.items()}
    return (given if all(named[name] is one for name, one in given.items()) else named), named


def _part(model: Any, name: str) -> Any:
    """Return the module an optimizer of this name belongs to: the one of the same name, else the whole model."""
    return model[name] if isinstance(model, Mapping) and name in model else model


def _build_one(given: Any, model: Any, name: str) -> Optimizer:
    parameters = _parameters(model)
    if isinstance(given, Optimizer):
        optimizer = given
    elif callable(given):
        if not parameters:
            raise UpdateError(f"the factory of optimizer {name!r} would get nothing to train: no parameters are there")
        optimizer = given(parameters)
        if not isinstance(optimizer, Optimizer):
            raise UpdateError(f"the factory of optimizer {name!r} must return a torch optimizer, got {optimizer!r}")
    else:
        raise UpdateError(
            f"{name} must be a torch optimizer, a factory params -> optimizer, or a mapping of either, got {given!r}"
        )
    mine = {id(parameter) for parameter in parameters}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if model is not None and not any(id(parameter) in mine for parameter in held):
        raise UpdateError(
            f"optimizer {name!r} holds none of the model's {len(mine)} parameters, so it would train nothing: make it "
            "from this model's parameters, or pass a factory such as lambda params: SGD(params, lr=0.1)"
        )
    return optimizer


def _parameters(model: Any) -> list[nn.Parameter]:
    seen: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        for parameter in module.parameters():
            seen[id(parameter)] = parameter
    return list(seen.values())
