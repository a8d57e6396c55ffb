"""``metrics=``: Ignite's and torchmetrics' metrics on an engine, published as one record at each epoch's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite.metrics import Metric, MetricsLambda, RunningAverage
from torch import nn

from .errors import HandlerError
from .events import Events
from .metric_drivers import Driver, IgniteMetric, MetricsOverRanks, RunningMetric, TorchMetric
from .records import is_recordable

__all__ = ["attach_metrics"]


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
            driver = None if engine.strategy.peers is None else _over_ranks(metric, name)
            if driver is None:
                metric.attach(engine.ignite, name)
            else:
                drivers.append(driver)
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


def _over_ranks(metric: Metric, name: str) -> Driver | None:
    """Return what drives a metric where there are several ranks; None: it knows itself, by an attach of its own."""
    if isinstance(metric, RunningAverage):
        return RunningMetric(metric, name)
    if isinstance(metric, MetricsLambda) or type(metric).attach is Metric.attach:
        return IgniteMetric(metric, name)
    return None


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
