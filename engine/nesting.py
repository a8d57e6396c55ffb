"""Inner runs: which engines are running in this thread, and what a run puts back when it ends.

A run that starts while another one is running in the same thread must not change it. In one ``finally``, whatever
happened inside: the train/eval flag of every sub-module; gradients that were pending; grad and inference mode, autocast
and its weight cache, the current device; the random state of Python, NumPy, torch and every device; the data's own
generators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from .errors import RunError
from .rng import GeneratorStates, RandomState
from .state import StateView
from .strategies.ambient import fresh_modes

__all__ = ["Running", "active", "refuse_reentry", "run_scope"]

_active: ContextVar[tuple[Any, ...]] = ContextVar("pellucid_active", default=())


class Running(Protocol):
    """What nesting asks of an engine."""

    @property
    def state(self) -> StateView:
        """The engine's state."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules it was given."""

    @property
    def name(self) -> str:
        """What it is called in messages."""


def active() -> tuple[Any, ...]:
    """Return the engines that are running in this thread, the outermost first."""
    return _active.get()


def refuse_reentry(engine: Running) -> None:
    """Refuse to start an engine inside itself, or an inner training that would change the outer run's model.

    Raises:
        RunError: as above; the outer run is intact and may go on.
    """
    outer = active()
    if engine.state.is_running or any(engine is other for other in outer):
        raise RunError(
            f"engine {engine.name!r} is running already and cannot be started again inside itself; nothing was "
            "changed. engine.fork(step) makes an engine with the same model and fresh state for an inner run"
        )
    if engine.state.mode != "train" or not outer:
        return
    inside = {id(module) for other in outer for root in other.modules for module in root.modules()}
    if any(id(module) in inside for root in engine.modules for module in root.modules()):
        raise RunError(
            f"engine {engine.name!r} trains the model of the run around it, which an inner run must not change. Train "
            'a copy: engine.fork(step, mode="train", model="copy", optimizer=lambda params: SGD(params, lr))'
        )


@contextmanager
def run_scope(engine: Running, data: Any) -> Iterator[None]:
    """Make an engine the running one; as an inner run, put everything back in the end."""
    outer = active()
    train = engine.state.mode == "train"
    with ExitStack() as stack:
        stack.callback(_active.reset, _active.set((*outer, engine)))
        if outer:
            stack.callback(GeneratorStates(data).restore, data)
            stack.callback(RandomState().restore)
        if outer or not train:
            flags = _flags(engine.modules)
            stack.callback(_restore_flags, flags)
        if outer and not train:
            stack.callback(_restore_gradients, _take_gradients(engine.modules))
        stack.enter_context(fresh_modes(train) if outer else _outermost_modes(train))
        _set_flags(engine.modules, train)
        yield


def _outermost_modes(train: bool) -> Any:
    """A run on its own keeps what is set around it, but gradients are on in training and off in evaluation."""
    return fresh_modes(train) if train and torch.is_inference_mode_enabled() else torch.set_grad_enabled(train)


def _flags(roots: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    return [(module, module.training) for root in roots for module in root.modules()]


def _set_flags(roots: Iterable[nn.Module], train: bool) -> None:
    for root in roots:
        if train and not root.training:
            root.train()
        elif not train and any(module.training for module in root.modules()):
            root.eval()


def _restore_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, training in flags:
        if module.training != training:
            module.training = training


def _take_gradients(roots: Iterable[nn.Module]) -> list[tuple[nn.Parameter, torch.Tensor | None]]:
    """Take pending gradients off the parameters: a backward inside must not add to them."""
    gradients = [(parameter, parameter.grad) for root in roots for parameter in root.parameters()]
    for parameter, gradient in gradients:
        if gradient is not None:
            parameter.grad = None
    return gradients


def _restore_gradients(gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient
