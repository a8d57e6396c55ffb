"""What of an engine and its ranks goes into a checkpoint, and how it is put back.

Everything that is the same on all ranks is saved once: weights, optimizers, the handlers' states. What belongs to a
rank (its random state, its place in the data, the gradients of a window in progress) is saved for each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .errors import CheckpointError, suggestion
from .folder import Content
from .plain import to_plain
from .rng import RandomState, go_own_way
from .strategies import Strategy

__all__ = ["check", "check_weights", "collect", "restore"]

_log = logging.getLogger("pellucid.engine")


# ---------------------------------------------------------------------- saving


def collect(engine: Any, copy: bool) -> Content | None:
    """Return what is to be saved of ``engine``, on the rank that writes; None on the others. A collective.

    Args:
        engine: at rest, or in an event.
        copy: give tensors memory of their own, so that training can go on while they are written.

    Raises:
        CheckpointError: a part of it holds what a weights-only loader would not read.
    """
    strategy: Strategy = engine.strategy
    states = {part: strategy.full_state_dict(model) for part, model in _models(engine).items()}
    optimizers = {name: strategy.whole(one.state_dict()) for name, one in _optimizers(engine).items()}
    handlers = {name: strategy.whole(one.state_dict()) for name, one in _handlers(engine).items()}
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
    }
    return Content(weights, extra, training)


def writes(strategy: Strategy) -> bool:
    """Say whether this rank is the one that writes files."""
    return strategy.peers is None or strategy.rank == 0


def _models(engine: Any) -> dict[str, nn.Module]:
    model = engine.model
    if model is None:
        return {}
    return dict(model) if isinstance(model, Mapping) else {"": model}


def _optimizers(engine: Any) -> dict[str, Optimizer]:
    optimizer = engine.optimizer
    if optimizer is None:
        return {}
    return dict(optimizer) if isinstance(optimizer, Mapping) else {"optimizer": optimizer}


def _handlers(engine: Any) -> dict[str, Any]:
    """Return the attached objects that have a state, by class and number: ``EMA``, ``EMA 2``."""
    inside = {id(module) for model in _models(engine).values() for module in model.modules()}
    inside |= set(map(id, _optimizers(engine).values())) | {id(engine)}
    found: dict[str, Any] = {}
    for one in engine.attached():
        has_state = callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))
        if not has_state or id(one) in inside or isinstance(one, type(engine)):
            continue
        name, number = type(one).__qualname__, 1
        while (key := name if number == 1 else f"{name} {number}") in found:
            number += 1
        found[key] = one
    return found


def _refuse_lazy(what: str, state: Mapping[str, Any]) -> None:
    lazy = [key for key, value in state.items() if is_lazy(value)]
    if lazy:
        raise CheckpointError(
            f"{what} has {_some(lazy)} without a shape yet, as lazy modules have before their first forward: call the "
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


# ---------------------------------------------------------------------- putting back


def check(engine: Any, content: Content, where: Any) -> None:
    """Compare what was saved with the engine it is to go into, before anything is changed.

    Raises:
        CheckpointError: it does not fit.
    """
    models, optimizers = _models(engine), _optimizers(engine)
    _same_names(f"the models in {where}", content.weights, models)
    for part, model in models.items():
        state = {**content.weights[part], **content.extra.get(part, {})}
        check_weights(model, state, f"{where}{part and f', model {part!r}'}")
    saved = _get(content.training, "optimizers", dict, where)
    _same_names(f"the optimizers in {where}", saved, optimizers)
    for name, optimizer in optimizers.items():
        _check_optimizer(name, optimizer, saved[name], where)
    _get(content.training, "handlers", dict, where)
    ranks = _get(content.training, "ranks", list, where)
    if not ranks or not all(
        isinstance(state, Mapping) and "gradients" in state.get("gradients", ()) for state in ranks
    ):
        raise CheckpointError(f"{where} was written by hand or is damaged: its 'ranks' are no states of an engine")


def _get(training: Mapping[str, Any], key: str, kind: type, where: Any) -> Any:
    value = training.get(key)
    if not isinstance(value, kind):
        raise CheckpointError(f"{where} was written by hand or is damaged: its {key!r} is a {type(value).__name__}")
    return value


def check_weights(model: nn.Module, state: Mapping[str, Any], where: Any) -> None:
    """Compare a saved state dictionary with a model's.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape.
    """
    present = model.state_dict()
    _same_names(f"the weights in {where}", state, present)
    for key, value in state.items():
        mine = present[key]
        if is_lazy(mine):
            continue
        if isinstance(value, Tensor) and isinstance(mine, Tensor) and value.shape != mine.shape:
            raise CheckpointError(
                f"the weights in {where} do not fit the model: {key!r} has the shape {tuple(value.shape)} there and "
                f"{tuple(mine.shape)} here. Build the model as it was when they were saved"
            )


def _check_optimizer(name: str, optimizer: Optimizer, saved: Any, where: Any) -> None:
    try:
        there = [len(group["params"]) for group in saved["param_groups"]]
        numbers = {number for group in saved["param_groups"] for number in group["params"]}
        # under other keys than a parameter's number an optimizer keeps what belongs to none
        makes_sense = all(
            not isinstance(key, int) or (key in numbers and isinstance(values, Mapping))
            for key, values in saved["state"].items()
        )
    except (LookupError, TypeError, AttributeError):
        makes_sense = False
    if not makes_sense:
        raise CheckpointError(f"{where} was written by hand or is damaged: {name!r} has no state of an optimizer")
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"optimizer {name!r} in {where} has parameter groups of {there} parameters, and this engine's has {here}: "
            "make it as it was when it was saved"
        )


def _same_names(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    missing = [name for name in present if name not in saved]
    unknown = [name for name in saved if name not in present]
    if not missing and not unknown:
        return
    nearest = _nearest(unknown[0], missing) if missing and unknown else "."
    raise CheckpointError(
        f"{what} do not fit: {_some(missing)} missing there, {_some(unknown)} unknown here{nearest} Build the engine's "
        "model and optimizers as they were when they were saved"
    )


def _nearest(name: str, known: list[str]) -> str:
    nested = next((one for one in known if one.endswith(f".{name}") or name.endswith(f".{one}")), None)
    return suggestion(name, known) if nested is None else f": is it {nested!r}?"


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) or "nothing"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def restore(engine: Any, content: Content, where: Any) -> None:
    """Put back what ``check`` has found to fit.

    Raises:
        CheckpointError: a handler or the engine does not take its state; nothing is changed then.
    """
    strategy: Strategy = engine.strategy
    training = content.training
    state = _state_of_rank(training, strategy, where)
    undo = _restore_handlers(engine, training["handlers"], where)
    try:
        engine.load_state_dict(state)
    except BaseException:
        undo()
        raise
    for name, optimizer in _optimizers(engine).items():
        _load_optimizer(optimizer, training["optimizers"][name], strategy)
    for part, model in _models(engine).items():
        strategy.load_full_state_dict(model, {**content.weights[part], **content.extra.get(part, {})})


def _load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], strategy: Strategy) -> None:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip(numbers, held, strict=True))
    state = {
        key: _parts_like(values, parameters[key], strategy) if key in parameters else values
        for key, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def _parts_like(values: Mapping[str, Any], parameter: Tensor, strategy: Strategy) -> dict[str, Any]:
    return {
        key: strategy.part_like(value, parameter) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def _restore_handlers(engine: Any, saved: Mapping[str, Any], where: Any) -> Any:
    """Give each handler its state; return what takes that back."""
    handlers = _handlers(engine)
    before: list[tuple[Any, Any]] = []

    def undo() -> None:
        for handler, state in reversed(before):
            handler.load_state_dict(state)

    try:
        for name, handler in handlers.items():
            if name in saved:
                state = handler.state_dict()
                handler.load_state_dict(saved[name])
                before.append((handler, state))
    except BaseException:
        undo()
        raise
    new, gone = [one for one in handlers if one not in saved], [one for one in saved if one not in handlers]
    if new or gone:
        _log.warning(
            "%s was saved with other handlers: %s",
            where,
            "; ".join(
                [f"{one} is attached and begins afresh" for one in new]
                + [f"the state of {one} is not used, as none is attached" for one in gone]
            ),
        )
    return undo


# ---------------------------------------------------------------------- another number of ranks


def _state_of_rank(training: Mapping[str, Any], strategy: Strategy, where: Any) -> dict[str, Any]:
    """Return the engine's state for this rank."""
    ranks: list[dict[str, Any]] = training["ranks"]
    here = 1 if strategy.peers is None else strategy.world_size
    rank = 0 if strategy.peers is None else strategy.rank
    first = ranks[0]
    if len(ranks) == here:
        state = ranks[rank]
        if state["gradients"]["gradients"] is None:
            state = {**state, "gradients": first["gradients"]}
        return state
    if rank == 0:
        _log.warning(
            "%s was saved on %d rank(s) and is resumed on %d: the run goes on with the same weights and at the same "
            "place in the data, but not to the bit as it would have",
            where,
            len(ranks),
            here,
        )
    state = {**first, "gradients": {**first["gradients"], "gradients": _mean_gradients(ranks)}}
    return _at_the_same_place(state, ranks, rank, training.get("data_world_size", 1), strategy.data_world_size)


def _mean_gradients(ranks: list[dict[str, Any]]) -> dict[str, list[Tensor | None]]:
    """Return the gradients of a window in progress that every rank is to have, so that their mean is as it was."""
    found = [state["gradients"]["gradients"] for state in ranks]
    found = [found[0] if one is None else one for one in found]
    means: dict[str, list[Tensor | None]] = {}
    for name, gradients in found[0].items():
        by_parameter = zip(gradients, zip(*(other[name] for other in found), strict=True), strict=True)
        means[name] = [None if first is None else _mean(first, each) for first, each in by_parameter]
    return means


def _mean(first: Tensor, gradients: tuple[Tensor | None, ...]) -> Tensor:
    return torch.stack([torch.zeros_like(first) if one is None else one for one in gradients]).mean(0)


def _at_the_same_place(
    state: dict[str, Any], ranks: list[dict[str, Any]], rank: int, saved_shares: int, shares: int
) -> dict[str, Any]:
    state = {**state, "epoch_iteration": state["epoch_iteration"] * saved_shares // shares}
    position = state["position"]
    if position is None:
        return state
    random = ranks[rank % len(ranks)]["position"]["random"]
    if rank >= len(ranks):
        random = _another_way(random, rank)
    batches = position["batches"] * saved_shares // shares
    # what had been drawn ahead, and where the data says it stands, was another share of it
    afresh = {"drawn": False, "ahead": [], "place": None, "place_opened": None}
    return {**state, "position": {**position, **afresh, "batches": batches, "random": random}}


def _another_way(random: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return a random state of its own for a rank that there was none of."""
    now = RandomState()
    try:
        RandomState.from_state_dict(random).restore()
        go_own_way(rank)
        return RandomState().state_dict()
    finally:
        now.restore()
