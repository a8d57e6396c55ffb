"""How what ``bundle`` has collected is compared with an engine and put back into it, whole or not at all."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .bundle import handlers_of, models_of, names_of, optimizers_of, some
from .errors import CheckpointError, suggestion
from .folder import Content
from .optimizer_states import check_optimizer, load_optimizer, made_of
from .plain import from_plain
from .rng import RandomState, go_own_way
from .strategies import Strategy

__all__ = ["check", "check_weights", "restore"]

_log = logging.getLogger("pellucid.engine")


def check(engine: Any, content: Content, where: Any) -> None:
    """Compare what was saved with the engine it is to go into, before anything is changed.

    Raises:
        CheckpointError: it does not fit.
    """
    models, optimizers = models_of(engine), optimizers_of(engine)
    _same_names(f"the models in {where}", content.weights, models)
    for part, model in models.items():
        state, place = weights_of(content, part), f"{where}{part and f', model {part!r}'}"
        check_weights(model, state, place)
        _check_dtypes(model, state, place)
    saved = _get(content.training, "optimizers", dict, where)
    _same_names(f"the optimizers in {where}", saved, optimizers)
    built = _get(content.training, "built", dict, where)
    for name, optimizer in optimizers.items():
        check_optimizer(name, optimizer, saved[name], made_of(optimizer, names_of(engine)), built.get(name), where)
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


def weights_of(content: Content, part: str) -> dict[str, Any]:
    """Return the whole state dictionary of one model."""
    return {**content.weights[part], **from_plain(content.extra.get(part, {}), copy=False)}


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


def _same_names(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    missing = [name for name in present if name not in saved]
    unknown = [name for name in saved if name not in present]
    if not missing and not unknown:
        return
    nearest = _nearest(unknown[0], missing) if missing and unknown else "."
    raise CheckpointError(
        f"{what} do not fit: {some(missing)} missing there, {some(unknown)} unknown here{nearest} Build the engine's "
        "model and optimizers as they were when they were saved"
    )


def _nearest(name: str, known: list[str]) -> str:
    nested = next((one for one in known if one.endswith(f".{name}") or name.endswith(f".{one}")), None)
    return suggestion(name, known) if nested is None else f": is it {nested!r}?"


def _check_dtypes(model: nn.Module, state: Mapping[str, Any], where: str) -> None:
    """Refuse weights that would be rounded, or be numbers of another kind, in this model."""
    present = model.state_dict()
    for key, value in state.items():
        mine = present[key]
        if isinstance(value, Tensor) and isinstance(mine, Tensor) and value.dtype != mine.dtype and not is_lazy(mine):
            raise CheckpointError(
                f"the weights in {where} are of another dtype than the model's: {key!r} is {value.dtype} there and "
                f"{mine.dtype} here. Build the model as it was; load_weights(model, path) converts weights, and begins "
                "a new run"
            )


# ---------------------------------------------------------------------- putting back


def restore(engine: Any, content: Content, where: Any) -> None:
    """Put back what ``check`` has found to fit.

    Raises:
        CheckpointError: a handler or the engine does not take its state; nothing is changed then.
        Exception: from a handler's or a model's own code; likewise.
    """
    strategy: Strategy = engine.strategy
    training = content.training
    with ExitStack() as undo:
        _restore_handlers(engine, from_plain(training["handlers"], copy=False), where, undo)
        before = engine.state_dict()
        engine.load_state_dict(_state_of_rank(training, strategy, where))
        undo.callback(engine.load_state_dict, before)
        for name, optimizer in optimizers_of(engine).items():
            undo.callback(load_optimizer, optimizer, optimizer.state_dict(), strategy=None)
            load_optimizer(optimizer, from_plain(training["optimizers"][name], copy=False), strategy)
        # first those that are loaded by code of the user's, which may fail
        models = sorted(models_of(engine).items(), key=lambda pair: not content.extra.get(pair[0]))
        for part, model in models:
            if content.extra.get(part):
                undo.callback(model.load_state_dict, _copied(model.state_dict()))
            strategy.load_full_state_dict(model, weights_of(content, part))
        undo.pop_all()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) and not is_lazy(value) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _restore_handlers(engine: Any, saved: Mapping[str, Any], where: Any, undo: ExitStack) -> None:
    handlers = handlers_of(engine)
    for name, handler in handlers.items():
        if name in saved:
            undo.callback(handler.load_state_dict, copy.deepcopy(handler.state_dict()))
            handler.load_state_dict(saved[name])
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
