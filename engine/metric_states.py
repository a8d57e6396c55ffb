"""What metrics have taken in so far in an epoch, for a run that goes on in the middle of it.

Of Ignite's metrics all attributes are kept that can be saved: the ``state_dict`` they have themselves leaves out what
their authors did not list, and does not take back lists of another length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from ignite.metrics import Metric, RunningAverage
from torch import nn

from .errors import CheckpointError
from .events import Events
from .nested import map_nested
from .plain import from_plain, to_plain
from .strategies import alone

__all__ = ["load_metric_states", "metric_states", "metrics_on", "runs_on"]

_log = logging.getLogger("pellucid.engine")
_INSIDE, _OWN = "metrics inside", "its own state"


def metrics_on(loop: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an engine by name, and those that are attached to ``engine.ignite``, by class and place."""
    found = dict(metrics)
    known = {
        id(part) for metric in metrics.values() if isinstance(metric, Metric) for part in (metric, *_parts(metric))
    }
    for owner in loop._event_handlers.owners():
        if isinstance(owner, Metric) and id(owner) not in known:
            known.add(id(owner))
            found[f"{type(owner).__qualname__} {len(found)} on engine.ignite"] = owner
    return found


def runs_on(loop: Any, metric: Any) -> bool:
    """Say whether a metric goes over the epochs' borders, as a running average does."""
    if isinstance(metric, RunningAverage):
        return not metric.epoch_bound
    return isinstance(metric, Metric) and bool(loop.has_event_handler(metric.started, Events.STARTED))


def metric_states(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each metric has taken in so far on this rank, plain. No collective."""
    with alone():
        return {name: _state_of(name, metric) for name, metric in metrics.items()}


def load_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Let metrics go on from what ``metric_states`` has returned; those that it does not name are left alone."""
    with alone():
        for name, state in states.items():
            if name in metrics:
                _load(name, metrics[name], state)


def _state_of(name: str, metric: Any) -> Any:
    if not isinstance(metric, Metric):
        return to_plain(f"metric {name!r}", _state_of_torchmetric(metric))
    if type(metric).state_dict is not Metric.state_dict:
        return {_OWN: to_plain(f"metric {name!r}", metric.state_dict())}
    attributes, left_out = {}, []
    for key, value in vars(metric).items():
        if key == "_device" or _metrics_in(value):
            continue
        try:
            attributes[key] = to_plain(key, value)
        except CheckpointError:
            if not callable(value) and not hasattr(type(value), "add_event_handler"):
                left_out.append(f"{key} ({type(value).__name__})")
    inside = [_state_of(name, one) for one in _inside(metric)]
    return {"attributes": attributes, "left_out": left_out, _INSIDE: inside}


def _load(name: str, metric: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(metric, Metric):
        metric.load_state_dict(from_plain(state), strict=False)
        for part in _parts_of(metric):
            part._update_count = max(1, part._update_count)  # it warns where it thinks nothing has come
        return
    if _OWN in state:
        metric.load_state_dict(from_plain(state[_OWN]))
        return
    if state["left_out"]:
        _log.warning(
            "metric %r goes on in mid-epoch without its %s, which cannot be saved: its value at the end of this epoch "
            "may be another. Let it keep tensors, numbers, lists and dicts, or give it a state_dict",
            name,
            ", ".join(state["left_out"]),
        )
    to_device = partial(torch.Tensor.to, device=metric._device)  # on which it takes in what comes
    for key, value in state["attributes"].items():
        if key in vars(metric):
            setattr(metric, key, map_nested(from_plain(value), to_device))
    for one, inner in zip(_inside(metric), state[_INSIDE], strict=True):
        _load(name, one, inner)


def _inside(metric: Metric) -> list[Metric]:
    """Return the metrics that one is made of, in order."""
    return [one for value in vars(metric).values() for one in _metrics_in(value) if one is not metric]


def _parts(metric: Metric) -> list[Metric]:
    """Return the metrics that one is made of, and those that these are made of."""
    return [part for one in _inside(metric) for part in (one, *_parts(one))]


def _metrics_in(value: Any) -> list[Metric]:
    if isinstance(value, Metric):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [part for part in parts if isinstance(part, Metric)]


def _state_of_torchmetric(metric: Any) -> Any:
    persistence = [dict(part._persistent) for part in _parts_of(metric)]
    try:
        for part in _parts_of(metric):
            part.persistent(True)
        return metric.state_dict()
    finally:
        for part, before in zip(_parts_of(metric), persistence, strict=True):
            part._persistent.update(before)


def _parts_of(metric: nn.Module) -> list[Any]:
    """Return torchmetrics' own of the modules in one: a collection has several."""
    return [part for part in metric.modules() if hasattr(part, "persistent") and hasattr(part, "_update_count")]
