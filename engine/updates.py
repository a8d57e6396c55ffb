"""From the loss to the weights: backward, the optimizers' updates, and how they are counted.

An update is counted where it really happens, by torch's own step hooks, so ``engine.update()`` and a plain
``optimizer.step()`` in the user's step count alike, and one that a loss scaler skips does not count. The hooks are on
the optimizer for the length of a run only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import UpdateError, suggestion
from .events import Events
from .state import RunStatus
from .strategies import Strategy
from .windows import Weight, Window, multiply

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
        steps: batches in an accumulation window.
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
        steps: int,
        fire: Callable[[Events], None],
        done: Callable[[], None],
        current: Callable[[], bool],
    ) -> None:
        self._optimizers = dict(optimizers)
        self._stepper = strategy.make_stepper()
        self._status = status
        self._window = Window(steps)
        self._fire = fire
        self._done = done
        self._current = current
        self._updated: set[str] = set()  # in this window
        self._stepping = False  # inside update(), which fires the events itself
        self._pending: list[tuple[nn.Parameter, Tensor]] = []  # gradients of a window that a stop has cut
        status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)

    # ------------------------------------------------------------------ what the step asks for

    def backward(self, loss: Tensor, weight: Weight | None = None, optimizer: str | None = None) -> None:
        """Add the gradient of ``loss`` to the window; see ``Engine.backward``."""
        self._require_training("backward")
        _check_loss(loss)
        inputs = None if optimizer is None else _held_by(self._optimizer(optimizer))
        window = self._window
        self._stepper.backward(window.scaled(loss, weight), inputs)
        window.add_batch(weight)
        if window.count > 1:
            self._done()  # the gradient is among those of earlier batches and cannot be taken out again
        self._fire(Events.BACKWARD_COMPLETED)

    def update(self, name: str | None = None) -> bool:
        """Step an optimizer at the window's end; see ``Engine.update``."""
        self._require_training("update")
        name = self._name(name)
        if not self._window.due:
            return False
        if name in self._updated:
            self._finish_scale()  # a second update in one batch
        updated = self._step(name)
        if len(self._optimizers) == 1:
            self.end_window()
        return updated

    def _step(self, name: str) -> bool:
        optimizer, status, stepper = self._optimizers[name], self._status, self._stepper
        if not _has_gradient(optimizer):
            raise UpdateError(
                f"update of {name!r}: none of its parameters has a gradient. Call engine.backward(loss) first, with a "
                "loss that depends on them"
            )
        self._updated.add(name)
        stepper.unscale(optimizer)
        correction = self._window.correction()
        if correction is not None:
            multiply([p.grad for p in _held_by(optimizer) if p.grad is not None], correction)
        before = status.updates
        status.updating = name
        self._stepping = True
        try:
            self._fire(Events.UPDATE_STARTED)
            stepper.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
            updated = status.updates > before
            if updated:
                self._fire(Events.UPDATE_COMPLETED)
        finally:
            self._stepping, status.updating = False, None
        return updated

    # ------------------------------------------------------------------ what the loop tells

    def follows_batches(self) -> bool:
        """Say whether batches must be announced: windows of several batches, or several optimizers with one scale."""
        return self._window.steps > 1 or (self._stepper.scales and len(self._optimizers) > 1)

    def begin_batch(self, remaining: int | None, is_last: bool) -> None:
        """Take a batch into the window, before its step."""
        self._window.begin_batch(remaining, is_last)
        self._status.update_due = self._window.due

    def end_batch(self) -> None:
        """End the window if this batch was its last, after its step."""
        if self._window.due and self._updated:
            self.end_window()

    def end_window(self) -> None:
        """Begin a new window with the next batch."""
        self._finish_scale()
        self._window.clear()

    def flush(self) -> None:
        """Make the update of a window that the end of the epoch has cut, if the step could not know of the end."""
        window = self._window
        if window.steps == 1 or not window.count:
            window.clear()
            return
        window.due = True
        for name in self._optimizers:
            if name not in self._updated:
                self._step(name)
        self.end_window()

    def _finish_scale(self) -> None:
        if self._updated:
            self._stepper.finish()
        self._updated.clear()

    # ------------------------------------------------------------------ the length of a run

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the optimizers' steps for the length of a run, and bring the gradients of a cut window back."""
        handles = []
        for parameter, gradient in self._pending:
            parameter.grad = gradient
        self._pending = []
        self._window.due = self._window.steps == 1 or self._window.due
        try:
            for name, optimizer in self._optimizers.items():
                handles.append(optimizer.register_step_pre_hook(partial(self._before_step, name)))
                handles.append(optimizer.register_step_post_hook(partial(self._after_step, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cut(self, batch_is_undone: bool) -> None:
        """Take the gradients of an unfinished window off the parameters, for the next run to bring back.

        A batch that was begun but not done will come again: as the first of its window it leaves nothing behind.
        """
        window = self._window
        held = [p for optimizer in self._optimizers.values() for p in _held_by(optimizer) if p.grad is not None]
        if batch_is_undone and window.has_batch:
            window.forget_gradient()  # of this batch alone: with others it would count as done
            _drop_gradients(held)
        if window.steps == 1:
            return
        window.begun -= batch_is_undone
        self._pending = [(p, p.grad) for p in held if p.grad is not None]
        _drop_gradients(held)

    def reset(self) -> None:
        """Forget counts and an unfinished window."""
        self._status.updates = 0
        self._status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)
        self._window.clear()
        self._pending = []

    def _before_step(self, name: str, *_: Any) -> None:
        if self._stepping or not self._current():
            return
        if self._window.steps > 1 or self._stepper.scales:
            raise UpdateError(
                "optimizer.step() was called by the step itself, where accumulation windows or a loss scale need "
                "engine.backward(loss) and engine.update()"
            )
        self._status.updating = name
        self._fire(Events.UPDATE_STARTED)

    def _after_step(self, name: str, *_: Any) -> None:
        if not self._stepping and not self._current():
            return
        self._status.updates += 1
        self._status.updates_by_optimizer[name] += 1
        self._done()
        if not self._stepping:
            self._fire(Events.UPDATE_COMPLETED)
            self._status.updating = None

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the unfinished window with its gradients, as tensors and plain numbers."""
        return {
            "scale": self._stepper.state_dict(),
            "window": self._window.state_dict(),
            "gradients": self._window_gradients(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self._stepper.load_state_dict(state["scale"])
        self._window.load_state_dict(state["window"])
        gradients = state["gradients"]
        self._pending = []
        for name, optimizer in self._optimizers.items():
            for parameter, gradient in zip(_held_by(optimizer), gradients.get(name, ()), strict=False):
                if gradient is not None:
                    self._pending.append((parameter, gradient.to(parameter.device, copy=True)))

    def _window_gradients(self) -> dict[str, list[Tensor | None]]:
        if self._window.steps == 1 or not self._window.count:
            return {}
        pending = {id(p): gradient for p, gradient in self._pending}
        found: dict[str, list[Tensor | None]] = {}
        for name, optimizer in self._optimizers.items():
            gradients = [pending.get(id(p), p.grad) for p in _held_by(optimizer)]
            found[name] = [None if gradient is None else gradient.detach().clone() for gradient in gradients]
        return found

    # ------------------------------------------------------------------ names and checks

    def _name(self, name: str | None) -> str:
        if name is None and len(self._optimizers) == 1:
            return next(iter(self._optimizers))
        names = ", ".join(map(repr, self._optimizers))
        if name is None:
            raise UpdateError(f"this engine has several optimizers ({names}): say which, engine.update(name)")
        if name not in self._optimizers:
            raise UpdateError(f"no optimizer {name!r}{suggestion(name, self._optimizers)} There are: {names}")
        return name

    def _optimizer(self, name: str) -> Optimizer:
        return self._optimizers[self._name(name)]

    def _require_training(self, verb: str) -> None:
        if self._status.mode != "train":
            raise UpdateError(f"{verb} was called in an evaluation engine, which makes no updates: use mode='train'")
        if not self._optimizers:
            raise UpdateError(
                f"{verb} needs an optimizer, and this engine has none: Engine(step, model, optimizer=...)"
            )


def _check_loss(loss: Any) -> None:
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


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _has_gradient(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def _held_by(optimizer: Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
    modules: list[nn.Module] = list(model.values()) if isinstance(model, Mapping) else [model] if model else []
    seen: dict[int, nn.Parameter] = {}
    for module in modules:
        for parameter in module.parameters():
            seen[id(parameter)] = parameter
    return list(seen.values())
