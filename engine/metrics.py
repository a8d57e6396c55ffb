"""``metrics=``: Ignite's and torchmetrics' metrics on an engine, published as one record at each epoch's end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from ignite.metrics import Metric
from torch import nn

from .errors import HandlerError
from .events import Events
from .metric_drivers import Driver, IgniteMetric, MetricsOverRanks, TorchMetric
from .nested import map_nested
from .records import is_recordable
from .strategies import alone

__all__ = ["attach_metrics", "load_metric_states", "metric_states"]


def attach_metrics(engine: Any, metrics: Any) -> dict[str, Any]:
    """Attach metrics by name, and let their values be recorded at each epoch's end; return them.

    The values of one epoch are one record, made before any ``EPOCH_COMPLETED`` handler of the user runs.

    Raises:
        HandlerError: not a mapping of names to Ignite or torchmetrics metrics.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise HandlerError(f'metrics= takes a mapping, {{"accuracy": Accuracy()}}, got {metrics!r}')
    drivers: list[Driver] = []
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            raise HandlerError(f"the name of a metric must be a text, got {name!r}")
        if isinstance(metric, Metric):
            if engine.strategy.peers is None or type(metric).attach is not Metric.attach:
                metric.attach(engine.ignite, name)  # those with an attach of their own know how to reduce
            else:
                drivers.append(IgniteMetric(metric, name))
        elif isinstance(metric, nn.Module) and all(hasattr(metric, verb) for verb in ("update", "compute", "reset")):
            metric.to(engine.device)
            drivers.append(TorchMetric(metric, name))
        else:
            raise HandlerError(
                f"metric {name!r} must be an instance of an Ignite or torchmetrics metric, got {metric!r}"
            )
    if drivers:
        MetricsOverRanks(drivers).attach(engine)
    names = tuple(metrics)
    if names:
        engine.add_event_handler(Events.EPOCH_COMPLETED, _Publisher(names).publish_metrics)
    return dict(metrics)


def metric_states(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each metric has taken in so far on this rank, by its own ``state_dict``. No collective."""
    with alone():
        return {name: _state_of(metric) for name, metric in metrics.items()}


def load_metric_states(metrics: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Let metrics go on from what ``metric_states`` has returned; those that it does not name are left alone."""
    with alone():
        for name, state in states.items():
            if name not in metrics:
                continue
            metric = metrics[name]
            if isinstance(metric, Metric):
                to_device = partial(torch.Tensor.to, device=metric._device)  # on which it takes in what comes
                metric.load_state_dict(map_nested(state, to_device))
            else:
                metric.load_state_dict(dict(state), strict=False)  # a copy: torchmetrics empties it
                for part in _parts_of(metric):
                    part._update_count = max(1, part._update_count)  # it warns where it thinks nothing has come


def _state_of(metric: Any) -> Any:
    if isinstance(metric, Metric):
        return metric.state_dict()
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


class _Publisher:
    """Records what the metrics have computed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def publish_metrics(self, engine: Any, batch: Any) -> None:
        computed = engine.ignite.state.metrics
        for name in self.names:
            self._take_out_parts(name, computed)
        values = _flat({name: computed[name] for name in self.names if name in computed})
        if values:
            engine.record(values)

    def _take_out_parts(self, name: str, computed: dict[str, Any]) -> None:
        """Take out what Ignite puts under the bare names of a metric's parts: they are recorded as ``name/part``."""
        parts = computed.get(name)
        if not isinstance(parts, Mapping):
            return
        for part in parts:
            if part not in self.names and computed.get(part) is parts[part]:
                del computed[part]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the numbers in ``values``; those of an inner mapping are named ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}/")
        elif is_recordable(value):
            flat[f"{prefix}{name}"] = value
    return flat
