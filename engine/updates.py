"""From the loss to the weights: backward, the optimizers' updates, and how they are counted.

An update is counted where it really happens, by torch's own step hooks, so ``engine.update()`` and a plain
``optimizer.step()`` in the user's step count alike, and one that a loss scaler skips does not count. The hooks are on
the optimizer for the length of a run only.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .errors import CheckpointError, RunError, UpdateError, suggestion
from .events import Events
from .optimizers import (
    drop_gradients,
    gradients_of,
    has_gradient,
    held_by,
    needs_closure,
    settings_of,
    trained_by,
    zero_gradients,
)
from .state import RunStatus
from .strategies import Strategy
from .windows import Weight, Window, multiply

__all__ = ["Updates"]

_log = logging.getLogger("pellucid.engine")


class Updates:
    """Makes and counts the updates of one engine.

    Args:
        optimizers: by name.
        strategy: does the arithmetic.
        model: what is trained.
        status: where the counts are kept.
        steps: batches in an accumulation window.
        iteration: says which iteration is in work.
        fire: fires an event of the engine.
        done: tells the loop that this iteration has changed the weights and cannot be repeated.
        current: whether the engine is the innermost one running; only then a step of a shared optimizer is its own.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        strategy: Strategy,
        model: Any,
        status: RunStatus,
        *,
        steps: int,
        iteration: Callable[[], int],
        fire: Callable[[Events], None],
        done: Callable[[], None],
        current: Callable[[], bool],
    ) -> None:
        self._optimizers = dict(optimizers)
        self._needs_closure = {name for name, one in self._optimizers.items() if needs_closure(one)}
        self._stepper = strategy.make_stepper()
        self._part_like = strategy.part_like
        self._status = status
        self._can_update = status.mode == "train" and bool(optimizers)
        self._together = None if strategy.peers is None else strategy  # with other ranks
        self._model = model
        self._window = Window(steps, None if self._together is None else strategy.mean)
        self._iteration = iteration
        self._fire = fire
        self._done = done
        self._current = current
        self._backward_in = 0  # the last iteration that called backward
        self._updated: set[str] = set()  # whose update was begun in this window
        self._stepping = False  # inside update(), which fires the events itself
        self._pending: list[tuple[nn.Parameter, Tensor]] = []  # gradients of a window that a stop has cut
        status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)

    # ------------------------------------------------------------------ what the step asks for

    def backward(self, loss: Tensor, weight: Weight | None = None, optimizer: str | None = None) -> None:
        """Add the gradient of ``loss`` to the window; see ``Engine.backward``."""
        if not self._can_update:
            self._refuse("backward")
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            _refuse_loss(loss)
        inputs = None if optimizer is None else trained_by(self._optimizers[self._name(optimizer)])
        window = self._window
        scaled = window.scaled(loss, weight)
        self._backward_in = self._iteration()
        if self._together is None:
            self._stepper.backward(scaled, inputs)
        else:
            self._together.before_backward(self._model, inputs)
            self._stepper.backward(scaled, inputs)
            self._together.after_backward(self._model)
        window.add_batch(weight)
        if window.count > 1:
            self._done()  # the gradient is among those of earlier batches and cannot be taken out again
        self._fire(Events.BACKWARD_COMPLETED)

    def update(self, name: str | None = None) -> bool:
        """Step an optimizer at the window's end; see ``Engine.update``."""
        if not self._can_update:
            self._refuse("update")
        name = self._name(name)
        self._require_run("update")
        if not self._window.due:
            return False
        optimizer = self._optimizers[name]
        if not has_gradient(optimizer):
            raise UpdateError(
                f"update of {name!r}: none of its parameters has a gradient. Call engine.backward(loss) first, with a "
                "loss that depends on them (an update before it in the same batch has used up the gradients)"
            )
        if name in self._needs_closure:
            raise UpdateError(
                f"update of {name!r}: {type(optimizer).__name__} computes the loss itself, several times in a step. "
                "Call engine.optimizer.step(closure) in the step instead"
            )
        if name in self._updated:
            self._finish_scale()  # a second update in one batch
        return self._update(name, optimizer)

    def _update(self, name: str, optimizer: Optimizer) -> bool:
        status, stepper = self._status, self._stepper
        self._updated.add(name)
        if self._together is not None:
            self._together.reduce_gradients(self._model, trained_by(optimizer))
        stepper.unscale(optimizer)
        correction = self._window.correction()
        if correction is not None:
            multiply(gradients_of(optimizer), correction)
        before = status.updates
        status.updating = name
        try:
            self._stepping = True
            self._fire(Events.UPDATE_STARTED)
            if has_gradient(optimizer):  # a handler may call the update off
                stepper.step(optimizer)
            self._stepping = False
            zero_gradients(optimizer)
            if len(self._updated) == len(self._optimizers):
                self._end_window()
            is_made = status.updates > before
            if is_made:
                self._fire(Events.UPDATE_COMPLETED)
        finally:
            self._stepping, status.updating = False, None
        return is_made

    def _end_window(self) -> None:
        self._finish_scale()
        self._window.clear()

    def _finish_scale(self) -> None:
        """Adapt the loss scale, after it is decided of each update whether it is made."""
        if self._stepper.scales and self._updated:
            self._stepper.finish()
            self._done()  # also when no update was made: the batch has changed the scale
        self._updated.clear()

    # ------------------------------------------------------------------ what the loop tells

    def accumulates(self) -> bool:
        """Say whether there are windows of several batches."""
        return self._window.steps > 1

    def follows_batches(self) -> bool:
        """Say whether batches must be announced: for windows, or for several optimizers, which end one together."""
        return self.accumulates() or len(self._optimizers) > 1 or self._window.owed

    def settings(self) -> dict[str, str]:
        """Return what the optimizers are told, in words that can be compared with other ranks'."""
        return {f"{name}.{key}": value for name, one in self._optimizers.items() for key, value in settings_of(one)}

    def begin_run(self) -> None:
        """Make the update that is owed from the run before."""
        if self._window.owed:
            self.flush()

    def begin_batch(self, remaining: int | None, is_last: bool) -> None:
        """Take a batch into the window, before its step."""
        self._window.begin_batch(remaining, is_last)
        self._status.update_due = self._window.due

    def end_batch(self) -> None:
        """End the window if this batch was its last, after its step."""
        if self._updated:
            self._end_window()

    def flush(self) -> None:
        """Make the update of a window that has ended without the step's knowing."""
        window = self._window
        if window.count and (window.steps > 1 or window.owed):
            for name, optimizer in self._optimizers.items():
                if has_gradient(optimizer):
                    self._update(name, optimizer)
        self._end_window()

    # ------------------------------------------------------------------ the length of a run

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the optimizers' steps for the length of a run, and bring the gradients of a cut window back."""
        handles = []
        for parameter, gradient in self._pending:
            parameter.grad = gradient
        self._pending = []
        try:
            for name, optimizer in self._optimizers.items():
                handles.append(optimizer.register_step_pre_hook(partial(self._before_step, name)))
                handles.append(optimizer.register_step_post_hook(partial(self._after_step, name)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cut(self, left_in_step: bool, undone: bool) -> None:
        """End a run: take the gradients of an unfinished window off the parameters, for the next run to bring back.

        Args:
            left_in_step: the step of the last batch has not returned.
            undone: that batch will come again: as the first of its window it leaves no gradient behind.
        """
        window = self._unfinished(left_in_step, undone)
        if self._is_spoilt(left_in_step and (undone or window.steps == 1)):
            self._warn_of_loss(undone)
            self._drop_all()
        if undone and self._updated:
            self._stepper.forget()
            self._updated.clear()
        self._finish_scale()
        self._window = window
        if window.steps > 1 or window.owed:
            held = [p for one in self._optimizers.values() for p in held_by(one) if p.grad is not None]
            # among ranks they may be views into memory that a later run sends from
            self._pending = [(p, p.grad if self._together is None else p.grad.clone()) for p in held]
            self._drop_all()

    def _unfinished(self, left_in_step: bool, undone: bool) -> Window:
        """Return the window as the next run is to find it."""
        window = copy.copy(self._window)
        if undone:
            window.begun = max(0, window.begun - 1)
        if self._is_spoilt(undone):
            window.forget_gradient()
        if self._updated and not undone:
            window.clear()
        # its update was not begun, though its last batch has joined
        is_full = left_in_step and not undone and window.due and window.count > 0
        window.owed |= window.steps > 1 and is_full
        return window

    def _is_spoilt(self, drops_batch: bool) -> bool:
        """Say whether the gradients are of no more use: changed for an update already, or of a batch to be dropped."""
        return bool(self._updated) or (drops_batch and self._backward_in == self._iteration())

    def _warn_of_loss(self, undone: bool) -> None:
        lost = self._window.count - (undone and self._window.has_batch)
        if lost and any(map(has_gradient, self._optimizers.values())):
            _log.warning(
                "the run was left amid a backward or an update: the gradients of the window are dropped, as it is not "
                "known what has changed in them (batches that will not come again: %d)",
                lost,
            )

    def _drop_all(self) -> None:
        for optimizer in self._optimizers.values():
            drop_gradients(optimizer)

    def reset(self) -> None:
        """Forget counts and an unfinished window."""
        self._status.updates = 0
        self._status.updates_by_optimizer = dict.fromkeys(self._optimizers, 0)
        self._window.clear()
        self._pending = []
        self._backward_in = 0

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

    def state_dict(self, left_in_step: bool, undone: bool) -> dict[str, Any]:
        """Return the loss scale and the unfinished window with its gradients, as tensors and plain numbers."""
        window = self._unfinished(left_in_step, undone)
        keeps = window.steps > 1 or window.owed
        if not keeps:
            window.clear()
        return {
            "scale": self._stepper.state_dict(),
            "window": window.state_dict(),
            "gradients": self._window_gradients() if keeps and not self._is_spoilt(undone) else {},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that saved gradients are of these optimizers.

        Raises:
            CheckpointError: they are not.
        """
        for name, gradients in state["gradients"].items():
            held = held_by(self._optimizers[name]) if name in self._optimizers else []
            fits = len(held) == len(gradients)
            if not fits or any(map(_has_other_shape, held, gradients)):
                raise CheckpointError(
                    f"the gradients it has of an unfinished window of optimizer {name!r} do not fit this engine's "
                    "parameters: load it into an engine with the model it was saved with"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""
        self._stepper.load_state_dict(state["scale"])
        self._window.load_state_dict(state["window"])
        self._backward_in = 0
        self._pending = [
            (parameter, self._part_like(gradient, parameter).to(parameter.device, copy=True))
            for name, gradients in state["gradients"].items()
            for parameter, gradient in zip(held_by(self._optimizers[name]), gradients, strict=True)
            if gradient is not None
        ]

    def _window_gradients(self) -> dict[str, list[Tensor | None]]:
        pending = {id(parameter): gradient for parameter, gradient in self._pending}
        found: dict[str, list[Tensor | None]] = {}
        for name, optimizer in self._optimizers.items():
            gradients = [pending.get(id(p), p.grad) for p in held_by(optimizer)]
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
            raise UpdateError(f"no optimizer {name!r}{suggestion(str(name), self._optimizers)} There are: {names}")
        return name

    def _require_run(self, verb: str) -> None:
        if not self._status.is_running:
            raise RunError(f"{verb}() was called outside of a run: updates are made, counted and announced inside one")

    def _refuse(self, verb: str) -> NoReturn:
        if self._status.mode != "train":
            raise UpdateError(f"{verb} was called in an evaluation engine, which makes no updates: use mode='train'")
        raise UpdateError(f"{verb} needs an optimizer, and this engine has none: Engine(step, model, optimizer=...)")


def _has_other_shape(parameter: nn.Parameter, gradient: Tensor | None) -> bool:
    return gradient is not None and not is_lazy(parameter) and gradient.shape != parameter.shape


def _refuse_loss(loss: Any) -> NoReturn:
    if not isinstance(loss, Tensor):
        raise UpdateError(f"backward takes the loss tensor of the step, got {type(loss).__name__}: {loss!r}")
    if loss.ndim != 0:
        raise UpdateError(
            f"backward takes a scalar loss of shape (), got shape {tuple(loss.shape)}: take its mean or sum first"
        )
    raise UpdateError(
        "the loss carries no graph, so no gradient can come of it: it was detached, made under no_grad, or "
        "does not depend on the model"
    )
