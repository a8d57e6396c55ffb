"""From the loss to the weights: backward, the optimizers' updates, and how they are counted.

An update is counted where it really happens, by torch's own step hooks, so ``engine.update()`` and a plain
``optimizer.step()`` in the user's step count alike. The hooks are on the optimizer for the length of a run only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import UpdateError, suggestion
from .events import Events
from .state import RunStatus
from .strategies import Strategy
from .strategies.base import modules_of

__all__ = ["OptimizerFactory", "Optimizers", "Updates", "build_optimizers"]

OptimizerFactory = Callable[[Any], Optimizer]
Optimizers = Optimizer | Mapping[str, Optimizer] | None
_ONLY = "optimizer"  # the name of an optimizer that was not given in a mapping


class Updates:
    """Makes and counts the updates of one engine.

    Args:
        optimizers: by name.
        strategy: does the arithmetic.
        status: where the counts are kept.
        iteration: says which iteration is in work.
        fire: fires an event of the engine.
        done: tells the loop that this iteration has changed the weights and cannot be repeated.
        current: whether the engine is the innermost one running; only then a step of a shared optimizer is its own.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        strategy: Strategy,
        status: RunStatus,
        *,
        iteration: Callable[[], int],
        fire: Callable[[Events], None],
        done: Callable[[], None],
        current: Callable[[], bool],
    ) -> None:
        self._optimizers = dict(optimizers)
        self._strategy = strategy
        self._status = status
        self._iteration = iteration
        self._fire = fire
        self._done = done
        self._current = current
        self._backward_in = 0  # the last iteration that called backward
        self._stepping = False  # inside update(), which fires the events itself
        status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``; see ``Engine.backward``."""
        self._require_training("backward")
        if not isinstance(loss, Tensor):
            raise UpdateError(f"backward takes the loss tensor of the step, got {type(loss).__name__}: {loss!r}")
        if loss.ndim != 0:
            raise UpdateError(
                f"backward takes a scalar loss of shape (), got shape {tuple(loss.shape)}: take its mean or sum first"
            )
        if not loss.requires_grad:
            raise UpdateError(
                "the loss carries no graph, so no gradient can come of it: it was detached, made under no_grad, or "
                "does not depend on the model"
            )
        self._backward_in = self._iteration()
        self._strategy.backward(loss)
        self._fire(Events.BACKWARD_COMPLETED)

    def update(self, name: str | None = None) -> bool:
        """Step an optimizer and zero its gradients; see ``Engine.update``."""
        self._require_training("update")
        optimizer = self._optimizer(name)
        self._fire(Events.UPDATE_STARTED)
        before = self._status.updates
        self._stepping = True
        try:
            self._strategy.optimizer_step(optimizer)
        finally:
            self._stepping = False
        optimizer.zero_grad(set_to_none=True)
        updated = self._status.updates > before
        if updated:
            self._fire(Events.UPDATE_COMPLETED)
        return updated

    def drop_gradients(self) -> None:
        """Drop what ``backward`` has added in an iteration whose step did not return: its update will never come."""
        if self._backward_in == self._iteration():
            for optimizer in self._optimizers.values():
                optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Count from 0 again."""
        self._status.updates = 0
        self._status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the optimizers' steps for the length of a run."""
        handles = []
        try:
            for name, optimizer in self._optimizers.items():
                handles.append(optimizer.register_step_pre_hook(lambda *_: self._before_step()))
                handles.append(optimizer.register_step_post_hook(lambda *_, name=name: self._after_step(name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_step(self) -> None:
        if self._current() and not self._stepping:
            self._fire(Events.UPDATE_STARTED)

    def _after_step(self, name: str) -> None:
        if not self._current():
            return
        self._status.updates += 1
        self._status.updates_by_optimizer[name] += 1
        self._done()
        if not self._stepping:
            self._fire(Events.UPDATE_COMPLETED)

    def _optimizer(self, name: str | None) -> Optimizer:
        if name is None and len(self._optimizers) == 1:
            return next(iter(self._optimizers.values()))
        names = ", ".join(map(repr, self._optimizers))
        if name is None:
            raise UpdateError(f"this engine has several optimizers ({names}): say which, engine.update(name)")
        if name not in self._optimizers:
            raise UpdateError(f"no optimizer {name!r}{suggestion(name, self._optimizers)} There are: {names}")
        return self._optimizers[name]

    def _require_training(self, verb: str) -> None:
        if self._status.mode != "train":
            raise UpdateError(f"{verb} was called in an evaluation engine, which makes no updates: use mode='train'")
        if not self._optimizers:
            raise UpdateError(
                f"{verb} needs an optimizer, and this engine has none: Engine(step, model, optimizer=...)"
            )


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
    if len({id(one) for one in named.values()}) < len(named):
        raise UpdateError(f"one optimizer was given under several of the names {list(named)}: give each its own")
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


def _parameters(model: Any) -> list[torch.nn.Parameter]:
    seen: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        for parameter in module.parameters():
            seen[id(parameter)] = parameter
    return list(seen.values())
