"""Training a copy of an engine's model for a while, so that nothing of the engine, its run and its data changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..engine import Engine, HandlerError
from ._optimizers import optimizers_of, parameters_of

__all__ = ["REMEDY", "Factory", "fresh_optimizers", "require_engine", "run_untouched"]

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
REMEDY = "it must use engine.model and engine.update() of the engine it is called with, not those outside"


def require_engine(name: str, engine: Any) -> None:
    """Refuse what is no engine.

    Raises:
        HandlerError: as above.
    """
    if not isinstance(engine, Engine):
        raise HandlerError(f"{name}.run tries on the model of an Engine, got {type(engine).__name__}: {engine!r}")


def fresh_optimizers(engine: Engine, only: str | None = None) -> Factory | dict[str, Factory]:
    """Return what makes the engine's optimizers anew, for a copy of its model.

    Args:
        engine: a training engine.
        only: the name of an optimizer that it must have.

    Raises:
        HandlerError: it makes no updates, or an optimizer holds what is not the model's.
    """
    optimizers = optimizers_of(engine, only)
    factories = {name: _anew(one, _parameters(engine.model, name)) for name, one in optimizers.items()}
    return factories if isinstance(engine.optimizer, Mapping) else next(iter(factories.values()))


def run_untouched(engine: Engine, trial: Callable[[], Any]) -> None:
    """Call ``trial`` in an inner run, with the engine's own optimizers locked and its gradients put back after it."""
    # an inner run puts back all random state, and the data's own: so let there be a run around it in any case
    around = Engine(lambda *_: trial(), mode="eval", name="around a trial")
    with _locked(optimizers_of(engine).values()):
        around.run(epoch_length=1)


def _parameters(model: Any, name: str) -> list[nn.Parameter]:
    """Return, in order, what an optimizer factory of this name is given the copies of."""
    part = model[name] if isinstance(model, Mapping) and name in model else model
    modules = list(part.values()) if isinstance(part, Mapping) else [part]
    found = {id(p): p for module in modules for p in module.parameters()}
    return list(found.values())


def _anew(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Factory:
    """Return a factory of a fresh optimizer with the same options, for copies of ``parameters``."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    if any(id(parameter) not in places for parameter in parameters_of(optimizer)):
        raise HandlerError(
            f"the {type(optimizer).__name__} holds parameters that are not the model's, and there would be no copy of "
            "them: put their module into the model, Engine(step, {'net': ..., 'loss': ...})"
        )
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}

    def make(copies: Iterable[nn.Parameter]) -> Optimizer:
        new = list(copies)
        groups = []
        for group in optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            groups.append({**copy.deepcopy(options), "params": [new[places[id(p)]] for p in group["params"]]})
        try:
            return type(optimizer)(groups, **copy.deepcopy(defaults))
        except (TypeError, ValueError) as error:
            raise HandlerError(
                f"a {type(optimizer).__name__} cannot be made anew from its groups and defaults ({error}): train a "
                "copy yourself, engine.fork(step, mode='train', model='copy', optimizer=...)"
            ) from error

    return make


@contextmanager
def _locked(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Refuse steps of these optimizers, and put back the gradients of what they hold."""
    optimizers = list(optimizers)
    gradients = [(p, p.grad) for optimizer in optimizers for p in parameters_of(optimizer)]
    for parameter, _ in gradients:
        parameter.grad = None
    hooks = [optimizer.register_step_pre_hook(_refuse) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _refuse(*_: Any) -> None:
    raise HandlerError(f"the step was about to update the outer model, not the copy: {REMEDY}")
