"""How an optimizer that was made before its model was sharded comes to hold the shards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import StrategyError
from .fsdp_tensors import part_like
from .peers import Peers

__all__ = ["Replaced", "adopt"]


class Replaced:
    """Which parameter has come in place of which. Knows the old ones only as long as somebody else holds them."""

    def __init__(self) -> None:
        self._new: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    @contextmanager
    def noting(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Return the region in which parameters are replaced. What users have set on the old, the new ones have too."""
        before = [(module, name, old) for module in modules for name, old in module.named_parameters(recurse=False)]
        yield
        for module, name, old in before:
            new = module.get_parameter(name)
            for attribute, value in vars(old).items():
                if not hasattr(new, attribute):
                    setattr(new, attribute, value)
            self._note(old, new)

    def _note(self, old: nn.Parameter, new: nn.Parameter) -> None:
        known, key = self._new, id(old)  # an id is used again once its object is gone, so the entry goes with it
        known[key] = (weakref.ref(old, lambda _: known.pop(key, None)), new)

    def new_for(self, old: nn.Parameter) -> nn.Parameter | None:
        """Return what is in place of a parameter, None if it never was in a model that has been sharded."""
        reference, new = self._new.get(id(old), (None, None))
        return new if reference is not None and reference() is old else None


def adopt(optimizer: Optimizer, replaced: Replaced, shards: Iterable[nn.Parameter], peers: Peers) -> None:
    """Put the shards in place of the parameters in ``optimizer``, and of its state. A collective.

    Raises:
        StrategyError: that cannot be done; nothing is changed then.
    """
    sharded = {id(one) for one in shards}
    new: dict[int, nn.Parameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for place, old in enumerate(group["params"]):
            if id(old) in sharded:
                continue
            found = replaced.new_for(old)
            if found is None:
                raise StrategyError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(old.shape)} (number {place} of its "
                    f"group {index}) that no model under this strategy has, or had before it was sharded. Give a "
                    "factory, which is called with the parameters there are then: "
                    "Engine(..., optimizer=lambda parameters: SGD(parameters, lr=0.1))"
                )
            new[id(old)] = found
    if not new:
        return
    _check_same(optimizer, peers)
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            if id(old) in new:
                group["params"][place] = parameter = new[id(old)]
                if old in optimizer.state:
                    optimizer.state[parameter] = _sharded(optimizer.state.pop(old), parameter)


def _check_same(optimizer: Optimizer, peers: Peers) -> None:
    """Refuse state that cannot be sharded, or is not the same on all ranks."""
    mine: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                    raise StrategyError(
                        f"the state {key!r} of {type(optimizer).__name__} has the shape {tuple(value.shape)} where its "
                        f"parameter has {tuple(parameter.shape)}, and cannot be sharded like it: give the optimizer "
                        "as a factory, or before it has made a step"
                    )
            mine.append((tuple(parameter.shape), sorted(map(str, state))))
    found = peers.gather(mine, "the state of an optimizer")
    if any(one != found[0] for one in found):
        raise StrategyError(
            f"{type(optimizer).__name__} differs between ranks in its parameters, or in what state it has of them: "
            "make it, and load it, on every rank alike"
        )


def _sharded(state: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Return the state of one parameter with rank 0's values, each rank's part of them."""
    for key in sorted(state, key=str):
        value = state[key]
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = value.to(parameter.device_mesh.device_type, copy=True)
            dist.broadcast(value, src=0)
            state[key] = part_like(value, parameter)
    return state
