"""Events, their filters, and the table of handlers.

The names and filters are Ignite's; four events of the update are ours. An event is equal to Ignite's event of the
same name, so either ``Events`` may be used with either engine. What differs, and why:

- ``a | b`` makes a new list (Ignite's changes the left one when it is a list already).
- A numeric filter is kept as a ``range`` or a tuple, so that asking whether it is due is one fast look-up.
- The table notices every change, also one that an Ignite component makes on the lists by hand, and compiles an
  event's handlers into plain calls at the next firing.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ignite.engine.events import CallableEventWithFilter
from ignite.engine.events import EventEnum as IgniteEventEnum
from ignite.engine.events import EventsList as IgniteEventsList

from .errors import EventError, HandlerError, suggestion

__all__ = [
    "FIRING_ORDER",
    "Call",
    "EventEnum",
    "EventLike",
    "Events",
    "EventsList",
    "FilteredEvent",
    "Handle",
    "HandlerTable",
    "Registration",
    "check_custom_event",
    "check_signature",
    "event_name",
    "split_events",
]

Call = Callable[[Any, Any], Any]
When = range | tuple[int, ...] | Callable[[Any, int], bool] | None


class EventsList(IgniteEventsList):
    """Several events, made by ``|``; a handler attached to it is attached to each of them."""

    def __or__(self, other: Any) -> EventsList:
        """Return a new list with ``other`` added."""
        if not isinstance(other, CallableEventWithFilter | IgniteEventsList):
            return NotImplemented
        combined = EventsList()
        combined._events = [*self._events, *split_events(other)]
        return combined

    def __ror__(self, other: Any) -> EventsList:
        """Return a new list, also where the left one is Ignite's."""
        return EventsList().__or__(other).__or__(self)

    def __repr__(self) -> str:
        """Show the events as they were written."""
        return " | ".join(map(repr, self._events))


class FilteredEvent(CallableEventWithFilter):
    """An event with a filter: ``Events.ITERATION_COMPLETED(every=100)``.

    ``when`` says for which counts it is due: a ``range``, a tuple of counts, or the user's own function.
    """

    when: When
    text: str

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a second filter, which would take the place of the first."""
        raise EventError(f"{self.text} has its filter already: write one filter, or an event_filter of your own")

    def __or__(self, other: Any) -> EventsList:
        """Return a new list of this event and ``other``."""
        return EventsList().__or__(self).__or__(other)

    def __repr__(self) -> str:
        """Show the event as it was written."""
        return self.text


class EventEnum(IgniteEventEnum):
    """The base class of user-defined events, as Ignite's.

    Example:
        >>> class Backprop(EventEnum):
        ...     NORM_MEASURED = "norm_measured"
        >>> Backprop.NORM_MEASURED(every=10)
        Backprop.NORM_MEASURED(every=10)
    """

    def __call__(
        self,
        event_filter: Callable[[Any, int], bool] | None = None,
        every: int | None = None,
        once: int | Sequence[int] | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> CallableEventWithFilter:
        """Return this event with a filter on its count.

        Args:
            event_filter: ``(engine, count) -> bool``.
            every: due at every n-th count.
            once: due at this count, or at each of these counts, once in an engine's life (until ``reset``).
            before: due at counts below this one.
            after: due at counts above this one.

        Raises:
            EventError: more than one kind of filter, or a number that is no positive integer.
        """
        given = {"event_filter": event_filter, "every": every, "once": once, "before": before, "after": after}
        given = {name: value for name, value in given.items() if value is not None}
        text = f"{type(self).__name__}.{self.name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"
        try:
            numbers = list(once) if isinstance(once, Sequence) else once
            plain = super().__call__(event_filter, every, numbers, before, after)
        except (ValueError, TypeError) as error:
            raise EventError(f"{text}: {error}") from None
        return _filtered(plain, text, event_filter, every, once, before, after)

    def __or__(self, other: Any) -> EventsList:
        """Return a new list of this event and ``other``."""
        return EventsList().__or__(self).__or__(other)

    def __repr__(self) -> str:
        """Show the event as it is written in code."""
        return f"{type(self).__name__}.{self.name}"


def _filtered(
    plain: CallableEventWithFilter,
    text: str,
    event_filter: Callable[[Any, int], bool] | None,
    every: int | None,
    once: int | Sequence[int] | None,
    before: int | None,
    after: int | None,
) -> FilteredEvent:
    event = FilteredEvent(plain.value, plain.filter, plain.name)
    event.text = text
    if event_filter is not None:
        event.when = event_filter
    elif once is not None:
        event.when = (once,) if isinstance(once, int) else tuple(once)
    elif before is None and after is None:
        assert every is not None, "Ignite asks for one of its arguments"
        event.when = None if every == 1 else range(0, sys.maxsize, every)
    else:
        # with a border Ignite counts `every` from the first count inside it
        event.when = range((after or 0) + 1, sys.maxsize if before is None else before, every or 1)
    return event


class Events(EventEnum):
    """The events of a run. ``engine.describe()`` lists them in firing order with their handlers.

    ``batch`` is the batch in work for the events of an iteration, None for all others. Filters count epochs for
    ``STARTED``, ``EPOCH_*`` and ``COMPLETED``, iterations for ``GET_BATCH_*`` and ``ITERATION_*``, updates for
    ``UPDATE_*``; every other event, and a user's own, counts its own firings.
    """

    STARTED = "started"
    """a run has begun"""
    EPOCH_STARTED = "epoch_started"
    """an epoch has begun; its data is opened after this"""
    GET_BATCH_STARTED = "get_batch_started"
    """the next batch is about to be fetched"""
    GET_BATCH_COMPLETED = "get_batch_completed"
    """the batch is there, on ``engine.device``"""
    ITERATION_STARTED = "iteration_started"
    """the step is about to be called"""
    BACKWARD_COMPLETED = "backward_completed"
    """``engine.backward`` has added its gradient"""
    UPDATE_STARTED = "update_started"
    """an optimizer is about to step; gradients are whole and unscaled, so clipping goes here"""
    UPDATE_COMPLETED = "update_completed"
    """an optimizer has stepped; only for real updates"""
    ITERATION_COMPLETED = "iteration_completed"
    """the step has returned; its output is in ``engine.state.output``"""
    METRICS_RECORDED = "metrics_recorded"
    """``engine.record`` was called; the numbers are in ``engine.state.last_record``"""
    DATALOADER_STOP_ITERATION = "dataloader_stop_iteration"
    """the data has no more batches"""
    TERMINATE_SINGLE_EPOCH = "terminate_single_epoch"
    """``terminate_epoch`` takes effect"""
    EPOCH_COMPLETED = "epoch_completed"
    """an epoch has ended"""
    TERMINATE = "terminate"
    """``terminate`` takes effect"""
    INTERRUPT = "interrupt"
    """``interrupt`` takes effect"""
    EXCEPTION_RAISED = "exception_raised"
    """an error leaves the run; it is in ``engine.state.exception``"""
    COMPLETED = "completed"
    """the run has ended"""


EventLike = CallableEventWithFilter | IgniteEventsList | str

FIRING_ORDER: tuple[Events, ...] = tuple(Events)


def event_name(event: Any) -> str:
    """Return the name under which an event, filtered or not, or a string event is kept."""
    return event if isinstance(event, str) else event._name_


def split_events(event: Any) -> list[Any]:
    """Return the single events of an event or a ``|`` list of them."""
    return list(event) if isinstance(event, IgniteEventsList) else [event]


_RUN_LATER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def check_signature(function: Any, role: str) -> None:
    """Refuse a step or handler that cannot be called as ``(engine, batch)``, by looking, never by calling.

    Raises:
        HandlerError: not callable, a class, another signature, or a coroutine or generator function, which a plain
            call would not run.
    """
    if not callable(function):
        raise HandlerError(f"a {role} must be callable as {role}(engine, batch), got {function!r}")
    if isinstance(function, type):
        raise HandlerError(f"the {role} {function.__qualname__} is a class: pass an instance, or one of its methods")
    if any(runs_later(call) for call in (function, type(function).__call__) for runs_later in _RUN_LATER):
        raise HandlerError(
            f"{role} {function!r} is a coroutine or generator function: calling it runs nothing. "
            f"Write a plain function {role}(engine, batch)"
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            signature = inspect.signature(function)  # a decorator's, which passes on what it is given
    except (ValueError, TypeError):
        return  # some built-in callables have no signature to look at
    try:
        signature.bind(object(), object())
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise HandlerError(
            f"{role} {name}{signature} cannot be called as (engine, batch): {error}. "
            f"Every step and every handler takes exactly these two: def {name}(engine, batch)"
        ) from None


class Registration(tuple[Any, tuple[Any, ...], dict[str, Any]]):
    """One handler of ours on one event.

    It unpacks like the triples Ignite keeps, so Ignite's own components can walk the table.
    """

    event: Any
    when: When
    seen: set[int]

    def __new__(cls, handler: Call, event: Any) -> Registration:
        """Make the registration of ``handler`` on ``event``."""
        self = super().__new__(cls, (handler, (), {}))
        self.event = event
        self.when = getattr(event, "when", getattr(event, "filter", None))
        self.seen = set()  # counts a `once` filter has fired at
        return self

    def with_handler(self, handler: Call) -> Registration:
        """Return the same registration, filter and all, of what an Ignite component puts in the handler's place."""
        other = Registration(handler, self.event)
        other.seen = self.seen
        return other

    def is_same(self, other: Any) -> bool:
        """Say whether ``other`` is this registration, whatever has been put in the handler's place since."""
        return isinstance(other, Registration) and other.seen is self.seen

    @property
    def handler(self) -> Call:
        """The user's function."""
        handler: Call = self[0]
        return handler

    def is_due(self, engine: Any, count: int) -> bool:
        """Say whether the filter lets this count pass."""
        when = self.when
        if isinstance(when, range):
            return count in when
        if isinstance(when, tuple):
            due = count in when and count not in self.seen
            if due:
                self.seen.add(count)
            return due
        return when is None or bool(when(engine, count))


class Handlers(list[Any]):
    """The handlers of one event in firing order: ours, and Ignite's triples.

    ``calls`` are the handlers compiled to plain functions of ``(engine, batch)``; ``filters`` are the registrations
    that stand behind them where any handler has a filter, else None.
    """

    calls: tuple[Call, ...] | None = None
    filters: tuple[Registration | None, ...] | None = None
    quiet_from: int = 0
    quiet_until: int = 0

    def __setitem__(self, index: Any, entry: Any) -> None:
        """Put an entry in the place of another, as Ignite's profilers do to measure a handler."""
        self.calls = None
        old = None if isinstance(index, slice) else self[index]
        if isinstance(old, Registration) and not isinstance(entry, Registration):
            entry = old.with_handler(entry[0])
        super().__setitem__(index, entry)

    def compile(self) -> tuple[Call, ...]:
        """Turn the entries into plain calls; done at the first firing after a change."""
        ours = [entry if isinstance(entry, Registration) else None for entry in self]
        self.filters = tuple(ours) if any(entry is not None and entry.when is not None for entry in ours) else None
        self.calls = tuple(entry[0] if isinstance(entry, Registration) else _ignite_call(*entry) for entry in self)
        self.quiet_from = self.quiet_until = 0
        return self.calls

    def due(self, engine: Any, count: int) -> Iterable[Call]:
        """Yield the calls whose filter lets ``count`` pass, asking each filter just before its turn."""
        if self.quiet_from <= count < self.quiet_until:
            return ()
        return self._ask(engine, count)

    def _ask(self, engine: Any, count: int) -> Iterator[Call]:
        assert self.calls is not None and self.filters is not None
        calls, filters = self.calls, self.filters
        self.quiet_from, self.quiet_until = count + 1, min(_next_due(entry, count) for entry in filters)
        for call, entry in zip(calls, filters, strict=True):
            if entry is None or entry.is_due(engine, count):
                yield call


def _next_due(entry: Registration | None, count: int) -> int:
    """Return the next count at which an entry may be due, without which its filter need not be asked."""
    when = None if entry is None else entry.when
    if isinstance(when, range):
        passed = 0 if count < when.start else (count - when.start) // when.step + 1
        return when[passed] if passed < len(when) else sys.maxsize
    if isinstance(when, tuple):
        return min((n for n in when if n > count), default=sys.maxsize)
    return count + 1


def _changing(name: str) -> Any:
    def method(self: Handlers, *args: Any, **kwargs: Any) -> Any:
        self.calls = None
        return getattr(list, name)(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in ("append", "extend", "insert", "remove", "pop", "clear", "reverse", "sort", "__delitem__", "__iadd__",
              "__imul__"):  # fmt: skip
    setattr(Handlers, _name, _changing(_name))
del _name


def _ignite_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return a call of ``(engine, batch)`` for a handler kept in Ignite's convention."""
    if not (args and isinstance(args[0], weakref.ref)):
        return lambda engine, batch: func(*args, **kwargs)
    reference, rest = args[0], args[1:]

    def call(engine: Any, batch: Any) -> Any:
        return func(resolve(reference), *rest, **kwargs)

    return call


def resolve(reference: Any) -> Any:
    """Return what a weak reference to an engine points at."""
    engine = reference()
    if engine is None:
        raise RuntimeError("Engine reference not resolved. Cannot execute event handler.")
    return engine


class HandlerTable(defaultdict[Any, Handlers]):
    """All handlers of one engine: event -> :class:`Handlers`, also found by the event's bare name.

    It stands where Ignite keeps its ``_event_handlers``.
    """

    def __init__(self) -> None:
        """Make an empty table."""
        super().__init__(Handlers)
        self.by_name: dict[str, Handlers] = {}

    def __missing__(self, event: Any) -> Handlers:
        """Make the list of an event that has no handler yet."""
        self[event] = Handlers()
        return self[event]

    def __setitem__(self, event: Any, entries: Iterable[Any]) -> None:
        """Put a new list in place, as Ignite does when it removes a handler; what was ours in it stays ours."""
        handlers = entries if isinstance(entries, Handlers) else Handlers(_ours_again(entries, self.get(event, ())))
        super().__setitem__(event, handlers)
        self.by_name[event_name(event)] = handlers

    def registrations(self, event: Any = None) -> Iterator[Registration]:
        """Yield every handler of ours on this event, or on any, event by event."""
        for handlers in self.values() if event is None else (self.get(event, ()),):
            for entry in handlers:
                if isinstance(entry, Registration):
                    yield entry

    def drop(self, entry: Registration) -> bool:
        """Take one registration out; say whether it was there."""
        handlers = self[entry.event]
        kept = [other for other in handlers if not entry.is_same(other)]
        found = len(kept) < len(handlers)
        if found:
            handlers[:] = kept
        return found

    def forget_firings(self) -> None:
        """Let every ``once`` filter fire again, for an engine that begins afresh."""
        for entry in self.registrations():
            entry.seen.clear()
        for handlers in self.values():
            handlers.calls = None


def _ours_again(entries: Iterable[Any], earlier: Iterable[Any]) -> Iterator[Any]:
    """Yield entries, those that Ignite has made of our registrations, as triples of its own, as what they were."""
    ours = [entry for entry in earlier if isinstance(entry, Registration)]
    for entry in entries:
        found = next((one for one in ours if one == entry), None)
        if found is not None:
            ours.remove(found)
        yield found or entry


_H = TypeVar("_H", bound="Handle")


class Handle:
    """What ``add_event_handler`` returns: takes the handler off again.

    Also a context manager, for a handler that belongs to one run only. It keeps no engine alive.
    """

    def __init__(self, table: HandlerTable, entries: Sequence[Registration]) -> None:
        """Keep the entries and a weak reference to the table they are in."""
        self._table = weakref.ref(table)
        self._entries = tuple(entries)

    def remove(self) -> None:
        """Take the handler off; does nothing when it is off already."""
        table = self._table()
        if table is not None:
            for entry in self._entries:
                table.drop(entry)

    def __enter__(self: _H) -> _H:
        """Return the handle itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Take the handler off."""
        self.remove()


def find_event(event: Any, registered: dict[str, Any]) -> Any:
    """Return the event to attach to, or say which ones there are.

    Raises:
        EventError: not an event, or one that is not registered with this engine.
    """
    if not isinstance(event, CallableEventWithFilter | str):
        raise EventError(f"an event was wanted, such as Events.EPOCH_COMPLETED, got {event!r}")
    name = event_name(event)
    if name not in registered:
        raise EventError(
            f"this engine fires no event {name!r}{suggestion(name, registered)} Events of your own are registered "
            f"first: engine.register_events({name!r}). It fires: {', '.join(registered)}"
        )
    return registered[name] if isinstance(event, str) else event


def check_custom_event(event: Any) -> None:
    """Refuse what cannot be registered as an event.

    Raises:
        EventError: neither a text nor a member of an ``EventEnum``.
    """
    if not isinstance(event, str | IgniteEventEnum):
        raise EventError(f"register_events takes texts and members of an EventEnum, such as *MyEvents, got {event!r}")


def replaced_by(handler: Any, entries: Iterable[Registration]) -> list[Registration]:
    """Return those of an event's registrations that a re-run notebook cell means to replace by ``handler``.

    They are those of the same qualified name in ``__main__`` whose code object is another one: closures made in one
    loop share theirs and are all kept, and so are two functions of one name in one cell. Lambdas share their name, so
    of them only the very same one is replaced.
    """
    code = _main_code(handler)
    if code is None:
        return []
    name = handler.__qualname__
    is_lambda = name.endswith("<lambda>")

    def is_earlier(entry: Registration) -> bool:
        other = _main_code(entry.handler)
        if other is None or other is code or entry.handler.__qualname__ != name:
            return False
        same_cell = other.co_filename == code.co_filename
        if is_lambda:
            return same_cell and bool(other == code)
        return not same_cell or bool(other.co_firstlineno == code.co_firstlineno)

    return [entry for entry in entries if is_earlier(entry)]


def _main_code(handler: Any) -> Any:
    if getattr(handler, "__module__", None) != "__main__" or not hasattr(handler, "__qualname__"):
        return None
    return getattr(inspect.unwrap(handler), "__code__", None)  # a decorator's own code is the same for all it decorates
