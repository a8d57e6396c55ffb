"""``metrics=``: Ignite's and torchmetrics' metrics on an engine, published as one record at each epoch's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite.metrics import Metric
from torch import nn

from .errors import HandlerError
from .events import Events
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
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            raise HandlerError(f"the name of a metric must be a text, got {name!r}")
        if isinstance(metric, Metric):
            metric.attach(engine.ignite, name)
        elif isinstance(metric, nn.Module) and all(hasattr(metric, verb) for verb in ("update", "compute", "reset")):
            _TorchMetric(metric, name).attach(engine)
        else:
            raise HandlerError(
                f"metric {name!r} must be an instance of an Ignite or torchmetrics metric, got {metric!r}"
            )
    names = tuple(metrics)
    if names:
        engine.add_event_handler(Events.EPOCH_COMPLETED, _Publisher(names).publish_metrics)
    return dict(metrics)


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


class _TorchMetric:
    """Drives a torchmetrics metric: a tuple from the step becomes ``update(*output)``, a dict ``update(**output)``.

    A dict with ``y_pred`` and ``y``, as Ignite's metrics take it too, becomes ``update(y_pred, y)``.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self.metric = metric
        self.name = name

    def attach(self, engine: Any) -> None:
        self.metric.to(engine.device)
        engine.add_event_handler(Events.EPOCH_STARTED, self.reset)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.compute)

    def reset(self, engine: Any, batch: Any) -> None:
        self.metric.reset()

    def update(self, engine: Any, batch: Any) -> None:
        output = engine.state.output
        if isinstance(output, Mapping) and {"y_pred", "y"} <= output.keys():
            self.metric.update(output["y_pred"], output["y"])
        elif isinstance(output, Mapping):
            self.metric.update(**output)
        elif isinstance(output, tuple | list):
            self.metric.update(*output)
        else:
            self.metric.update(output)

    def compute(self, engine: Any, batch: Any) -> None:
        engine.ignite.state.metrics[self.name] = self.metric.compute()
