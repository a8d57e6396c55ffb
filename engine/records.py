"""Records: the one way to publish a number, and how it is read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, NoReturn

import torch

from .errors import MetricError, RecordError, suggestion

__all__ = ["Announcements", "MetricsView", "Record", "check_record", "is_recordable"]

_MOST_RECORDS = 100  # that may come out of one


class MetricsView(Mapping[str, Any]):
    """Recorded metrics by name, read-only. A scalar reads as a Python number, anything larger as it is.

    Reading a number that lies on a device waits for the device, once; nothing else does.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        """Look at ``values``, which stay where they are."""
        self._values = values

    def __getitem__(self, name: str) -> Any:
        """Return a metric.

        Raises:
            MetricError: nobody has recorded a metric of this name.
        """
        try:
            value = self._values[name]
        except KeyError:
            recorded = ", ".join(map(repr, self._values)) or "nothing"
            raise MetricError(
                f"no metric {name!r} has been recorded{suggestion(str(name), self._values)} Recorded so far: {recorded}"
            ) from None
        number = _as_number(value)
        if number is not value:
            self._values[name] = number
        return number

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        """Refuse: metrics are recorded."""
        raise TypeError(f"metrics are read-only: publish a number with engine.record({{{name!r}: {value!r}}})")

    def __delitem__(self, name: str) -> NoReturn:
        """Refuse: what was recorded stays."""
        raise TypeError(f"metrics are read-only: {name!r} stays recorded")

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of their first record."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return how many metrics there are."""
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        """Say whether a metric was recorded, without reading it."""
        return name in self._values

    def raw(self) -> dict[str, Any]:
        """Return the values unread: tensors stay on their device, and nothing waits."""
        return dict(self._values)

    def copy(self) -> MetricsView:
        """Return a view of a copy, which later records do not change. Nothing waits."""
        return MetricsView(dict(self._values))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the numbers."""
        return MetricsView, ({name: self[name] for name in self},)

    def __repr__(self) -> str:
        """Show names and numbers."""
        return repr({name: self[name] for name in self})


@dataclass(frozen=True)
class Record:
    """What one call of ``engine.record`` published, and when.

    Attributes:
        values: the metrics of this call alone.
        epoch: the epoch, iteration and updates of the engine that recorded it, at that moment.
    """

    values: MetricsView
    epoch: int
    iteration: int
    updates: int


class Announcements:
    """Records on their way to the handlers of ``METRICS_RECORDED``: one after the other, also those a handler makes."""

    def __init__(self) -> None:
        """Start with none."""
        self._waiting: list[Record] = []

    def announce(self, record: Record, see: Callable[[Record], None], fire: Callable[[], None]) -> None:
        """Let ``record`` be seen as the last one and fire; a record made inside the firing waits for its end.

        Raises:
            RecordError: the handlers record something at every record, so that there would be no end.
        """
        self._waiting.append(record)
        if len(self._waiting) > 1:
            return
        announced = 0
        try:
            while self._waiting:
                see(self._waiting[0])
                fire()
                del self._waiting[0]
                announced += 1
                if announced > _MOST_RECORDS:
                    raise RecordError(
                        f"{announced} records came out of one: a handler of METRICS_RECORDED records at every record. "
                        "Let it look at engine.state.last_record first"
                    )
        finally:
            self._waiting.clear()


def _as_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 else value  # waits for the device
    if isinstance(value, Number):
        return value.item() if hasattr(value, "item") else value
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_record(metrics: Any) -> dict[str, Any]:
    """Return what ``engine.record`` keeps: numbers as they are, tensors and arrays detached and copied.

    Raises:
        RecordError: not a mapping, a name that is no text, a value that is no number, tensor or array.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        raise RecordError(f'record takes a mapping of names to numbers, such as {{"val/loss": 0.5}}, got {metrics!r}')
    kept = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise RecordError(f"the name of a metric must be a text, got {name!r} for the value {value!r}")
        kept[name] = _kept(name, value)
    return kept


def _kept(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # a copy: the tensor may be a running sum that goes on
    if isinstance(value, Number) or is_recordable(value):
        return copy.copy(value)
    raise RecordError(f"metric {name!r} must be a number, tensor or array, got {type(value).__name__}: {value!r}")


def is_recordable(value: Any) -> bool:
    """Say whether ``engine.record`` takes a value: a number, a tensor, an array of numbers."""
    if isinstance(value, torch.Tensor | Number):
        return True
    return hasattr(value, "ndim") and getattr(getattr(value, "dtype", None), "kind", "") in tuple("biufc")
