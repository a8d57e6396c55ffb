"""What of an engine and its ranks goes into a checkpoint; ``restoring`` puts it back.

Everything that is the same on all ranks is saved once: weights, optimizers, the handlers' states. What belongs to a
rank (its random state, its place in the data, the gradients of a window in progress) is saved for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from ignite.engine import Engine as IgniteEngine
from ignite.metrics import Metric
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .errors import CheckpointError
from .folder import Content
from .optimizer_states import made_of
from .plain import to_plain
from .strategies import Strategy

__all__ = ["collect", "handlers_of", "models_of", "names_of", "optimizers_of", "some", "writes"]


def collect(engine: Any, copy: bool) -> Content | None:
    """Return what is to be saved of ``engine``, on the rank that writes; None on the others. A collective.

    Args:
        engine: at rest, or in an event.
        copy: give tensors memory of their own, so that training can go on while they are written.

    Raises:
        CheckpointError: a part of it holds what a weights-only loader would not read.
    """
    strategy: Strategy = engine.strategy
    states = {part: strategy.full_state_dict(model) for part, model in models_of(engine).items()}
    optimizers = {name: strategy.whole(one.state_dict()) for name, one in optimizers_of(engine).items()}
    handlers = {name: strategy.whole(one.state_dict()) for name, one in handlers_of(engine).items()}
    mine = strategy.whole(engine.state_dict())
    ranks = strategy.gather(mine)
    if not writes(strategy):
        return None
    weights, extra = {}, {}
    for part, state in states.items():
        what = f"the state of model {part!r}" if part else "the model's state"
        _refuse_lazy(what, state)
        weights[part] = {key: _on_host(one, copy) for key, one in state.items() if _is_for_safetensors(one)}
        others = {key: one for key, one in state.items() if not _is_for_safetensors(one)}
        extra[part] = to_plain(what, others, copy=copy, host=True)
    training = {
        "optimizers": to_plain("the state of an optimizer", optimizers, copy=copy, host=True),
        "handlers": {
            name: to_plain(f"the state of {name}", state, copy=copy, host=True) for name, state in handlers.items()
        },
        "ranks": [_without_doubles(state, ranks[0], rank) for rank, state in enumerate(ranks)],
        "data_world_size": strategy.data_world_size,
        "built": {name: made_of(one, names_of(engine)) for name, one in optimizers_of(engine).items()},
    }
    return Content(weights, extra, training)


def writes(strategy: Strategy) -> bool:
    """Say whether this rank is the one that writes files."""
    return strategy.peers is None or strategy.rank == 0


def models_of(engine: Any) -> dict[str, nn.Module]:
    """Return the engine's models by name; one that is not in a mapping has the name ""."""
    model = engine.model
    if model is None:
        return {}
    return dict(model) if isinstance(model, Mapping) else {"": model}


def names_of(engine: Any) -> dict[int, str]:
    """Return what each parameter is called, by its id."""
    return {
        id(parameter): f"{part}.{name}" if part else name
        for part, model in models_of(engine).items()
        for name, parameter in model.named_parameters()
    }


def optimizers_of(engine: Any) -> dict[str, Optimizer]:
    """Return the engine's optimizers by name."""
    optimizer = engine.optimizer
    if optimizer is None:
        return {}
    return dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}


def handlers_of(engine: Any) -> dict[str, Any]:
    """Return the attached objects that have a state, by class and number: ``EMA``, ``EMA 2``."""
    inside = {id(module) for model in models_of(engine).values() for module in model.modules()}
    inside |= set(map(id, optimizers_of(engine).values())) | {id(engine)}
    found: dict[str, Any] = {}
    for one in engine.attached():
        has_state = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
        if not has_state or id(one) in inside or isinstance(one, type(engine) | IgniteEngine | Metric):
            continue  # metrics are the engine's part
        name, number = type(one).__qualname__, 1
        while (key := name if number == 1 else f"{name} {number}") in found:
            number += 1
        found[key] = one
    return found


def _refuse_lazy(what: str, state: Mapping[str, Any]) -> None:
    lazy = [key for key, value in state.items() if is_lazy(value)]
    if lazy:
        raise CheckpointError(
            f"{what} has {some(lazy)} without a shape yet, as lazy modules have before their first forward: call the "
            "model once before it is saved"
        )


def _is_for_safetensors(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex() and not _odd(value)


def _odd(tensor: Tensor) -> bool:
    return tensor.is_quantized or tensor.is_meta


def _on_host(tensor: Tensor, copy: bool) -> Tensor:
    return tensor.detach().to("cpu", copy=copy)


def _without_doubles(state: dict[str, Any], first: dict[str, Any], rank: int) -> dict[str, Any]:
    """Leave out gradients that are those of rank 0: where ranks have brought them together, all have the same."""
    gradients = state["gradients"]["gradients"]
    if rank and gradients and _same(gradients, first["gradients"]["gradients"]):
        return {**state, "gradients": {**state["gradients"], "gradients": None}}
    return state


def _same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    pairs = [pair for name in some for pair in zip(some[name], others[name], strict=True)]
    return all((one is None) == (other is None) and (one is None or torch.equal(one, other)) for one, other in pairs)


def some(names: Iterable[str]) -> str:
    """Return the first few of some names, for a message."""
    names = list(names)
    shown = ", ".join(map(repr, names[:5])) or "nothing"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
