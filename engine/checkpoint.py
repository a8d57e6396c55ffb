"""``Engine.state_dict`` and ``load_state_dict``: explicit keys, tensors and plain numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ._loop import IgniteLoop, Standing
from .errors import CheckpointError, suggestion
from .limits import Limits
from .metric_states import load_metric_states, metric_states, metrics_on, runs_on
from .plain import from_plain, to_plain
from .position import Position
from .records import MetricsView
from .state import RunStatus
from .updates import Updates

__all__ = ["load_engine", "save_engine"]

_FORMAT = 1


def save_engine(
    loop: IgniteLoop,
    status: RunStatus,
    declared: Mapping[str, Any],
    limits: Limits,
    position: Position | None,
    updates: Updates,
    metrics: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything an engine must know to go on."""
    values = MetricsView(loop.state.metrics)
    standing = loop.standing()
    return {
        "format": _FORMAT,
        **standing._asdict(),
        "epoch_ends": loop.epoch_ends(),
        "updates": status.updates,
        "updates_by_optimizer": dict(status.updates_by_optimizer),
        "max_epochs": limits.max_epochs,
        "max_iters": limits.max_iters,
        "epoch_length": limits.epoch_length,
        "stop_reason": loop.ending,
        "fields": {name: to_plain(f"state field {name!r}", value) for name, value in declared.items()},
        "metrics": {name: to_plain(f"metric {name!r}", values[name]) for name in values},
        "metric_states": metric_states(
            {
                name: metric
                for name, metric in metrics_on(loop, metrics).items()
                if standing.epoch_open or runs_on(loop, metric)
            }
        ),
        "firings": dict(loop.firings),
        "gradients": updates.state_dict(loop.was_left_in_step(), loop.state.iteration > loop.done_iteration),
        "position": None if position is None else position.state_dict(),
    }


def load_engine(
    saved: Any,
    loop: IgniteLoop,
    status: RunStatus,
    declared: dict[str, Any],
    updates: Updates,
    metrics: Mapping[str, Any],
) -> tuple[Limits, Position | None]:
    """Check what was saved, then write it into the parts of an engine."""
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"an engine's state dictionary was wanted, got {type(saved).__name__}: {saved!r}")
    if "format" not in saved:
        names = ", ".join(map(repr, list(saved)[:4])) or "nothing"
        raise CheckpointError(f"this is no state dictionary of an Engine, but one with {names}: model and optimizer "
                              "load theirs by their own load_state_dict")  # fmt: skip
    if saved.get("format") != _FORMAT:
        raise CheckpointError(
            f"the state dictionary has format {saved.get('format')!r}, and this version of pellucid reads {_FORMAT}: "
            "load it with the version that wrote it"
        )
    present = save_engine(loop, status, declared, _limits_of(loop), None, updates, metrics)
    _same_names("the state dictionary", saved, present)
    _check_kinds(saved)
    _same_names("its declared fields", saved["fields"], declared)
    _same_names("its optimizers", saved["updates_by_optimizer"], status.updates_by_optimizer)
    updates.check_state(saved["gradients"])
    position = _position(saved["position"])
    limits = Limits(saved["max_epochs"], saved["max_iters"], saved["epoch_length"])
    try:
        _write(saved, loop, status, declared, updates, metrics)
    except BaseException:
        _write(present, loop, status, declared, updates, metrics)
        raise
    return limits, position


def _write(
    saved: Mapping[str, Any],
    loop: IgniteLoop,
    status: RunStatus,
    declared: dict[str, Any],
    updates: Updates,
    metrics: Mapping[str, Any],
) -> None:
    loop.set_standing(Standing(*(saved[name] for name in Standing._fields)))
    loop.flags = {"should_terminate_single_epoch": saved["epoch_ends"]}
    loop.ending = saved["stop_reason"]
    loop.firings = dict(saved["firings"])
    for name in ("max_epochs", "max_iters", "epoch_length"):
        setattr(loop.state, name, saved[name])
    loop.state.metrics.clear()
    loop.state.metrics.update(from_plain(saved["metrics"]))
    updates.load_state_dict(saved["gradients"])
    load_metric_states(metrics_on(loop, metrics), saved["metric_states"])
    status.updates = saved["updates"]
    status.updates_by_optimizer = dict(saved["updates_by_optimizer"])
    declared.update({name: from_plain(value, declared[name]) for name, value in saved["fields"].items()})


def _position(saved: Any) -> Position | None:
    try:
        return None if saved is None else Position.from_state_dict(saved)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"its position in the data cannot be read ({type(error).__name__}: {error}): it was written by hand or by "
            "another version"
        ) from error


def _limits_of(loop: IgniteLoop) -> Limits:
    return Limits(loop.state.max_epochs, loop.state.max_iters, loop.state.epoch_length)


def _check_kinds(saved: Mapping[str, Any]) -> None:
    for name in ("updates_by_optimizer", "fields", "metrics", "metric_states", "firings"):
        if not isinstance(saved[name], Mapping):
            raise CheckpointError(f"{name} must be a mapping, got {type(saved[name]).__name__}: {saved[name]!r}")
    counts = {name: 0 for name in ("epoch", "iteration", "epoch_iteration", "updates")}
    limits = {name: 1 for name in ("max_epochs", "max_iters", "epoch_length") if saved[name] is not None}
    for name, least in {**counts, **limits}.items():
        value = saved[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise CheckpointError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _same_names(what: str, saved: Iterable[str], wanted: Iterable[str]) -> None:
    saved, wanted = list(saved), list(wanted)
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted]
    if missing or extra:
        hint = suggestion(extra[0], missing) if missing and extra else "."
        raise CheckpointError(
            f"{what} and this engine do not fit: {missing or 'nothing'} missing, {extra or 'nothing'} unknown{hint} "
            "Add what is missing to the dictionary, take out what is unknown, or make the engine as it was"
        )
