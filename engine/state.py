"""``engine.state``: what user code may read of a run, and the few fields it may write.

The *view* that steps and handlers are given reads through to the loop and lets only declared fields be written; the
*snapshot* is a frozen and picklable copy.
"""

from __future__ import annotations

import copy
import keyword
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from .errors import StateError, suggestion
from .nested import map_nested
from .records import MetricsView, Record

_PLAIN = frozenset({type(None), bool, int, float, str, torch.Tensor})

__all__ = ["RunStatus", "StateSnapshot", "StateView", "check_declared"]


@dataclass
class RunStatus:
    """What the engine knows of itself beside Ignite's counters. The engine alone writes it."""

    mode: str
    strategy: Any
    updates: int = 0
    updates_by_optimizer: dict[str, int] = field(default_factory=dict)
    last_record: Record | None = None
    is_running: bool = False
    update_due: bool = False
    updating: str | None = None
    depth: int = 0
    parent: StateView | None = None

    def see(self, record: Record) -> None:
        """Let a record be the last one."""
        self.last_record = record


def _field(path: str, doc: str, read: Callable[[Any], Any] | None = None) -> Any:
    get = attrgetter(path)
    return property(get if read is None else lambda view: read(get(view)), doc=doc)


class StateView:
    """The state of an engine as steps and handlers see it.

    All fields are read-only but those declared with ``Engine(..., state={"best": 0.0})``. Anything else, read or
    written, is a :class:`StateError` with the nearest name.
    """

    __slots__ = ("__weakref__", "_declared", "_loop", "_status")

    epoch: int = _field("_loop.state.epoch", "the epoch in work, from 1; after a run the last one")
    iteration: int = _field("_loop.state.iteration", "the batch in work, counted over all epochs from 1")
    epoch_iteration: int = _field("_loop.state.epoch_iteration", "the batch in work, counted in its epoch from 1")
    updates: int = _field("_status.updates", "optimizer updates made; one that a scaler skipped is none")
    updates_by_optimizer: Mapping[str, int] = _field(
        "_status.updates_by_optimizer", "the same for each optimizer by its name", lambda d: MappingProxyType(dict(d))
    )
    max_epochs: int | None = _field("_loop.state.max_epochs", "the run's limit of epochs")
    max_iters: int | None = _field("_loop.state.max_iters", "the run's limit of iterations")
    epoch_length: int | None = _field("_loop.state.epoch_length", "batches in an epoch, as asked for, else a hint")
    output: Any = _field(
        "_loop.state.output",
        "what the step returned, detached; None once the next batch is there, and outside of a run",
    )
    metrics: MetricsView = _field("_loop.state.metrics", "all metrics recorded, by name", MetricsView)
    last_record: Record | None = _field("_status.last_record", "what the last call of engine.record published")
    times: Mapping[str, float | None] = _field(
        "_loop.state.times", "seconds taken by the last epoch and by the run", lambda d: MappingProxyType(dict(d))
    )
    exception: BaseException | None = _field("_loop.error", "the error that is leaving the run, during that only")
    stop_reason: str | None = _field("_loop.ending", "completed, terminated, interrupted, failed; None before that")
    is_running: bool = _field("_status.is_running", "whether a run is in progress")
    update_due: bool = _field("_status.update_due", "whether this batch ends an accumulation window")
    updating: str | None = _field("_status.updating", "the optimizer whose update the UPDATE_* events are about")
    mode: str = _field("_status.mode", "train or eval")
    depth: int = _field("_status.depth", "how many runs are around this one")
    parent: StateView | None = _field("_status.parent", "the state of the run around this one")
    rank: int = _field("_status.strategy.rank", "this process among all")
    local_rank: int = _field("_status.strategy.local_rank", "this process among those of its machine")
    world_size: int = _field("_status.strategy.world_size", "the number of processes")
    device: torch.device = _field("_status.strategy.device", "where batches are when the step gets them")
    strategy: str = _field("_status.strategy.name", "the name of the device strategy")
    precision: str = _field("_status.strategy.precision", "such as 32-true")

    def __init__(self, loop: Any, status: RunStatus, declared: dict[str, Any]) -> None:
        """Look at the parts of an engine's state; made by the engine only."""
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_status", status)
        object.__setattr__(self, "_declared", declared)

    def __getattr__(self, name: str) -> Any:
        """Return a declared field; reached only for names that are no built-in field."""
        declared = object.__getattribute__(self, "_declared")
        if name in declared:
            return declared[name]
        raise StateError(_unknown(name, declared))

    def __setattr__(self, name: str, value: Any) -> None:
        """Write a declared field. Tensors in it are detached: a graph would keep a whole iteration alive."""
        if name in self._declared:
            if type(value) not in _PLAIN:
                _copied(name, value)  # what cannot be copied would fail at the end of the run
            self._declared[name] = _without_graph(value)
        else:
            _refuse_write(name, self._declared)

    def __delattr__(self, name: str) -> None:
        """Refuse: fields stay."""
        raise StateError(f"engine.state.{name} cannot be deleted: the fields of a state stay")

    def __dir__(self) -> list[str]:
        """List the fields, the declared ones too."""
        return [*FIELDS, *self._declared, "snapshot"]

    def snapshot(self) -> StateSnapshot:
        """Return a frozen copy that later iterations do not change. Does not wait for the device."""
        values = {name: _frozen(name, getattr(self, name)) for name in FIELDS}
        values |= {name: _copied(name, value) for name, value in self._declared.items()}
        return StateSnapshot(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSnapshot:
        """Copy as a snapshot: a copy that went on living would show another run."""
        return self.snapshot()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a snapshot."""
        return self.snapshot().__reduce__()

    def __repr__(self) -> str:
        """Show every field."""
        return _text("StateView", self)

    def _repr_html_(self) -> str:
        return _html("state", self)


FIELDS: tuple[str, ...] = tuple(name for name, value in vars(StateView).items() if isinstance(value, property))


class StateSnapshot:
    """A frozen copy of a state, with the same fields; it can be pickled.

    ``metrics`` and ``last_record`` read as in the live state. ``output`` is a copy; ``exception`` is its text.
    """

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        """Keep the values."""
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        """Return a field."""
        values = object.__getattribute__(self, "_values") if name != "_values" else {}
        if name in values:
            value = values[name]
            return MappingProxyType(value) if isinstance(value, dict) and name in FIELDS else value
        raise StateError(_unknown(name, {key: None for key in values if key not in FIELDS}, "the snapshot"))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        """Refuse: a snapshot is frozen."""
        raise StateError(f"a snapshot is frozen: {name} cannot be set to {value!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse: a snapshot is frozen."""
        raise StateError(f"a snapshot is frozen: {name} cannot be deleted")

    def __dir__(self) -> list[str]:
        """List the fields."""
        return list(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values."""
        return StateSnapshot, (self._values,)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSnapshot:
        """Return itself: nothing can change it."""
        return self

    def __repr__(self) -> str:
        """Show every field."""
        return _text("StateSnapshot", self)

    def _repr_html_(self) -> str:
        return _html("snapshot", self)


def check_declared(fields: Any) -> dict[str, Any]:
    """Return a deep copy of the user fields an engine was given.

    Raises:
        StateError: not a mapping of names to first values, or a name that is taken.
    """
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise StateError(f'state= takes the fields you declare and their first values, {{"best": 0.0}}, got {fields!r}')
    taken = set(dir(StateView)) | set(FIELDS)
    for name in fields:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            raise StateError(f"a declared field needs a plain name such as 'best', got {name!r}")
        if name in taken or hasattr(StateView, name) or name == "snapshot":
            raise StateError(f"state field {name!r} cannot be declared: engine.state.{name} exists already")
    return {name: _copied(name, value) for name, value in fields.items()}


def _unknown(name: str, declared: Mapping[str, Any], owner: str = "engine.state") -> str:
    return (
        f"{owner} has no field {name!r}{suggestion(name, [*FIELDS, *declared])} Fields you write are declared once: "
        f"Engine(..., state={{{name!r}: <first value>}}). Declared here: {', '.join(declared) or 'none'}"
    )


def _refuse_write(name: str, declared: Mapping[str, Any]) -> NoReturn:
    if name in FIELDS or name == "snapshot":
        remedy = {
            "metrics": "publish a number with engine.record({name: value})",
            "max_epochs": "give the limit to engine.run(...), or stop with engine.terminate()",
            "max_iters": "give the limit to engine.run(...), or stop with engine.terminate()",
        }.get(name, "it belongs to the loop")
        raise StateError(f"engine.state.{name} is read-only: {remedy}")
    raise StateError(_unknown(name, declared))


def _without_graph(value: Any) -> Any:
    return map_nested(value, lambda tensor: tensor if tensor.is_leaf else tensor.detach())


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(_without_graph(value))
    except Exception as error:
        raise StateError(
            f"the declared field {name!r} must be copyable data, but copying this {type(value).__name__} failed "
            f"({type(error).__name__}: {error}): keep it in a variable of your own"
        ) from error


def _copied_output(value: Any) -> Any:
    try:
        return copy.deepcopy(_without_graph(value))
    except Exception:  # a step may return what is no data: such an output is shown as it is, but for its tensors
        return map_nested(value, lambda tensor: tensor.detach().clone())


def _frozen(name: str, value: Any) -> Any:
    if name == "output":
        return _copied_output(value)
    if name == "exception":
        return None if value is None else f"{type(value).__name__}: {value}"
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, MetricsView):
        return value.copy()
    return value.snapshot() if isinstance(value, StateView) else value


def _rows(state: Any) -> Iterator[tuple[str, str]]:
    for name in (*FIELDS, *(name for name in dir(state) if name not in FIELDS and name != "snapshot")):
        value = getattr(state, name)
        if name == "parent" and value is not None:
            value = f"epoch {value.epoch}, iteration {value.iteration}"
        elif isinstance(value, MappingProxyType):
            value = dict(value)
        elif isinstance(value, torch.device):
            value = str(value)
        yield name, _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _text(title: str, state: Any) -> str:
    return "\n".join([f"{title}:", *(f"  {name}: {value}" for name, value in _rows(state))])


def _html(title: str, state: Any) -> str:
    from .display import table

    return table(title, _rows(state))
