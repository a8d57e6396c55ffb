"""How metrics are reset, updated and computed in a run, also over ranks that have seen different amounts of data.

Ignite's and torchmetrics' metrics reduce over the ranks by themselves, under two conditions that an evaluation without
padding does not always meet: every rank has seen a batch, and what is gathered has one shape everywhere. Where a rank
has seen none, all ranks compute from all outputs; where Ignite gathers predictions, that is done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from ignite.metrics import EpochMetric, Metric, MetricsLambda, RunningAverage

from .errors import DataError
from .events import Events
from .nested import map_nested
from .strategies import alone

__all__ = ["Driver", "IgniteMetric", "MetricsOverRanks", "RunningMetric", "TorchMetric"]


class Driver(Protocol):
    """One metric of an engine."""

    def reset(self, engine: Any) -> None:
        """Begin afresh."""

    def update(self, engine: Any) -> None:
        """Take in ``engine.state.output``."""

    def compute(self, engine: Any, together: bool) -> None:
        """Put the value where Ignite's metrics put theirs; a collective if it is to be over all ranks ``together``."""


class IgniteMetric:
    """A metric of Ignite's, or one that is computed from several, such as ``Fbeta``."""

    def __init__(self, metric: Metric, name: str) -> None:
        self._metric = metric
        self._name = name
        self._parts = _parts_of(metric)  # which are given the outputs

    def reset(self, engine: Any) -> None:
        """Begin afresh."""
        for part in self._parts:
            part.started(engine.ignite)

    def update(self, engine: Any) -> None:
        """Take in the step's output."""
        for part in self._parts:
            part.iteration_completed(engine.ignite)

    def compute(self, engine: Any, together: bool) -> None:
        """Compute the value."""
        if together:
            for part in self._parts:
                if isinstance(part, EpochMetric):
                    self._compute_from_all(engine, part)
        self._metric.completed(engine.ignite, self._name)

    def _compute_from_all(self, engine: Any, metric: EpochMetric) -> None:
        """Let it compute, and keep the result, from the predictions of all ranks: Ignite's own needs as many on each.

        Where they are kept is private to Ignite; a test tells when that changes.
        """
        peers, mine = engine.strategy.peers, (metric._predictions, metric._targets)
        parts = peers.gather(map_nested(mine, _on_host), "the predictions of a metric")
        device = metric._device
        try:
            metric._predictions, metric._targets = (
                [tensor.to(device) for rank in parts for tensor in rank[which]] for which in (0, 1)
            )
            with alone():
                metric.compute()
        finally:
            metric._predictions, metric._targets = mine


class RunningMetric:
    """A running average of Ignite's: of this rank's batches in an epoch, of all ranks' at its end.

    Ignite's own takes the mean over the ranks at each batch, which comes to the same where all have as many, and never
    ends where they have not.
    """

    def __init__(self, metric: RunningAverage, name: str) -> None:
        self._metric = metric
        self._name = name

    def reset(self, engine: Any) -> None:
        """Begin afresh with the first epoch, or with each if it is bound to one."""
        if self._metric.epoch_bound or engine.state.iteration == 0:
            self._metric.started(engine.ignite)

    def update(self, engine: Any) -> None:
        """Take in the step's output, and show the average so far."""
        with alone():
            if self._metric.src is not None:
                self._metric.src.iteration_completed(engine.ignite)
            self._metric.iteration_completed(engine.ignite)
            self._metric.completed(engine.ignite, self._name)

    def compute(self, engine: Any, together: bool) -> None:
        """Compute the mean over the ranks."""
        with alone():
            self._metric.completed(engine.ignite, self._name)
        if together:
            metrics = engine.ignite.state.metrics
            values = engine.strategy.peers.gather(metrics[self._name], "a running average")
            metrics[self._name] = sum(values[1:], values[0]) / len(values)


class TorchMetric:
    """A metric of torchmetrics: a tuple from the step becomes ``update(*output)``, a dict ``update(**output)``.

    A dict with ``y_pred`` and ``y``, as Ignite's metrics take it too, becomes ``update(y_pred, y)``.
    """

    def __init__(self, metric: Any, name: str) -> None:
        self._metric = metric
        self._name = name

    def reset(self, engine: Any) -> None:
        """Begin afresh."""
        self._metric.reset()

    def update(self, engine: Any) -> None:
        """Take in the step's output."""
        output = engine.state.output
        if isinstance(output, Mapping) and {"y_pred", "y"} <= output.keys():
            self._metric.update(output["y_pred"], output["y"])
        elif isinstance(output, Mapping):
            self._metric.update(**output)
        elif isinstance(output, tuple | list):
            self._metric.update(*output)
        else:
            self._metric.update(output)

    def compute(self, engine: Any, together: bool) -> None:
        """Compute the value."""
        if together:
            value = self._metric.compute()
        else:
            with self._on_its_own():
                value = self._metric.compute()
        engine.ignite.state.metrics[self._name] = value

    @contextmanager
    def _on_its_own(self) -> Iterator[None]:
        """Keep the metric, or each of a collection, from looking for other ranks."""
        parts = [part for part in self._metric.modules() if hasattr(part, "distributed_available_fn")]
        before = [part.distributed_available_fn for part in parts]
        try:
            for part in parts:
                part.distributed_available_fn = _is_not
            yield
        finally:
            for part, one in zip(parts, before, strict=True):
                part.distributed_available_fn = one


class MetricsOverRanks:
    """Drives metrics through the epochs of an engine."""

    def __init__(self, drivers: Iterable[Driver]) -> None:
        self._drivers = tuple(drivers)

    def attach(self, engine: Any) -> None:
        """Begin."""
        engine.add_event_handler(Events.EPOCH_STARTED, self.reset_metrics)
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.update_metrics)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self.compute_metrics)

    def reset_metrics(self, engine: Any, batch: Any) -> None:
        """Begin afresh."""
        for driver in self._drivers:
            driver.reset(engine)

    def update_metrics(self, engine: Any, batch: Any) -> None:
        """Take in the step's output."""
        for driver in self._drivers:
            driver.update(engine)

    def compute_metrics(self, engine: Any, batch: Any) -> None:
        """Compute the values, the same on all ranks. A collective where there are several.

        Raises:
            DataError: a rank had no data while others had several batches.
        """
        peers = engine.strategy.peers
        if peers is not None:
            counts = peers.gather(engine.state.epoch_iteration, "the metrics of an epoch")
            if min(counts) == 0:
                with alone():
                    self._compute_from_outputs(engine, counts)
                return
        for driver in self._drivers:
            driver.compute(engine, together=peers is not None)

    def _compute_from_outputs(self, engine: Any, counts: list[int]) -> None:
        """Compute on every rank from the outputs of all, of which there is one each at most."""
        if max(counts) > 1:
            raise DataError(
                f"the ranks had {counts} batches: a rank without data cannot take part in the metrics. Let every rank "
                "have at least one batch, or give the whole data to all and let the engine share it out"
            )
        state = engine.ignite.state
        mine, device = state.output, engine.device
        outputs = engine.strategy.peers.gather(
            map_nested(mine, _on_host) if engine.state.epoch_iteration else None, "the outputs of an epoch"
        )
        self.reset_metrics(engine, None)
        try:
            for output, count in zip(outputs, counts, strict=True):
                if count:
                    state.output = map_nested(output, lambda tensor: tensor.to(device))
                    self.update_metrics(engine, None)
        finally:
            state.output = mine
        for driver in self._drivers:
            driver.compute(engine, together=False)


def _parts_of(metric: Metric) -> list[Metric]:
    """Return the metrics that one is computed from, each once: itself, unless it is of several."""
    if not isinstance(metric, MetricsLambda):
        return [metric]
    inside = (one for one in (*metric.args, *metric.kwargs.values()) if isinstance(one, Metric))
    return list({id(part): part for one in inside for part in _parts_of(one)}.values())


def _is_not() -> bool:
    return False


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
