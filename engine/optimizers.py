"""The optimizers of an engine: how they are made of what it was given, and what is asked of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import UpdateError
from .strategies import Peers, Strategy
from .strategies.base import modules_of

__all__ = [
    "OptimizerFactory",
    "Optimizers",
    "build_optimizers",
    "drop_gradients",
    "gradients_of",
    "has_gradient",
    "held_by",
    "needs_closure",
    "refuse_differences",
    "settings_of",
    "trained_by",
    "zero_gradients",
]

OptimizerFactory = Callable[[Any], Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer] | None
_ONLY = "optimizer"  # the name of an optimizer that was not given in a mapping


def build_optimizers(given: Any, model: Any, strategy: Strategy) -> tuple[Optimizers, dict[str, Optimizer]]:
    """Return what ``engine.optimizer`` is, and the optimizers by name.

    A factory is called with the parameters of the model, or of the module of the same name in a mapping.

    Raises:
        UpdateError: no optimizer, one that holds none of the model's parameters, or names that do not fit.
    """
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        only = _build_one(given, model, _ONLY, strategy)
        return only, {_ONLY: only}
    if not given:
        raise UpdateError("optimizer={} is an empty mapping: leave it out, or give an optimizer for each name")
    named = {name: _build_one(one, _part(model, name), name, strategy) for name, one in given.items()}
    if len({id(one) for one in named.values()}) < len(named):
        raise UpdateError(f"one optimizer was given under several of the names {list(named)}: give each its own")
    return (given if all(named[name] is one for name, one in given.items()) else named), named


def _part(model: Any, name: str) -> Any:
    """Return the module an optimizer of this name belongs to: the one of the same name, else the whole model."""
    return model[name] if isinstance(model, Mapping) and name in model else model


def _build_one(given: Any, model: Any, name: str, strategy: Strategy) -> Optimizer:
    parameters = _parameters(model)
    if isinstance(given, Optimizer):
        optimizer = given
        strategy.adopt_optimizer(optimizer)
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
    if model is not None and not any(id(parameter) in mine for parameter in held_by(optimizer)):
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


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether a step must be given a function that computes the loss again, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def held_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_by(optimizer: Optimizer) -> list[Any]:
    """Return those that are not frozen."""
    return [parameter for parameter in held_by(optimizer) if parameter.requires_grad]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that are there."""
    return [parameter.grad for parameter in held_by(optimizer) if parameter.grad is not None]


def has_gradient(optimizer: Optimizer) -> bool:
    """Say whether any is there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def drop_gradients(optimizer: Optimizer) -> None:
    """Take all gradients off the parameters; the tensors themselves stay as they are."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def zero_gradients(optimizer: Optimizer) -> None:
    """Do as ``optimizer.zero_grad()`` does."""
    if getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad:
        drop_gradients(optimizer)  # the same, without a range for the profiler that takes longer than a small step
    else:
        optimizer.zero_grad()


def settings_of(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yield an optimizer's class and the settings of its groups, by name and in words."""
    yield "class", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                yield f"param_groups[{number}]['params']", f"{len(value)} parameters"
            elif isinstance(value, Tensor | int | float | str | bool | tuple | None):
                yield f"param_groups[{number}][{key!r}]", repr(value.tolist() if isinstance(value, Tensor) else value)


def refuse_differences(settings: Mapping[str, str], peers: Peers) -> None:
    """Refuse optimizers that are told other things on other ranks, whose weights would come apart. A collective.

    Raises:
        UpdateError: as above, with the first difference.
    """
    by_rank = peers.gather(dict(settings), "the settings of the optimizers")
    for rank, theirs in enumerate(by_rank):
        for name in by_rank[0] | theirs:
            here, there = by_rank[0].get(name, "nothing"), theirs.get(name, "nothing")
            if here != there:
                raise UpdateError(
                    f"the optimizers differ between ranks: {name} is {here} on rank 0 and {there} on rank {rank}. Make "
                    "them the same on every rank, or their weights come apart"
                )
