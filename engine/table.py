"""The table of handlers: who is called when an event fires, in what order, under which filter.

It stands where Ignite keeps its own lists and looks like them, so that any Ignite component can walk and change it. It
notices every change, also one made on the lists by hand, and compiles an event's handlers into plain calls at the next
firing.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Any, Protocol, TypeVar

from .events import When, event_name

__all__ = ["Call", "CallWatcher", "Handle", "HandlerTable", "Registration", "resolve"]

Call = Callable[[Any, Any], Any]


class CallWatcher(Protocol):
    """What measures the calls of an engine's handlers: see :meth:`Engine.watch_calls`."""

    def around(self, event: str, handler: Callable[..., Any], call: Call) -> Call:
        """Return what is called as ``(engine, batch)`` in the place of ``call``, and calls it."""

    def spent(self, event: str, handler: Callable[..., Any]) -> tuple[int, float] | None:
        """Return how often a handler was called and the seconds it took in all; None if that is not known."""


class Registration(tuple[Any, tuple[Any, ...], dict[str, Any]]):
    """One handler of ours on one event.

    It unpacks like the triples Ignite keeps, so Ignite's own components can walk the table.
    """

    event: Any
    when: When
    seen: set[int]
    place: Any
    last: bool

    def __new__(cls, handler: Call, event: Any, place: Any = None, last: bool = False) -> Registration:
        """Make the registration of ``handler`` on ``event``, attached at this place of a notebook.

        One that is ``last`` is called after all others.
        """
        self = super().__new__(cls, (handler, (), {}))
        self.event = event
        self.place = place
        self.last = last
        self.when = getattr(event, "when", getattr(event, "filter", None))
        self.seen = set()  # counts a `once` filter has fired at
        return self

    def with_handler(self, handler: Call) -> Registration:
        """Return the same registration, filter and all, of what an Ignite component puts in the handler's place."""
        other = Registration(handler, self.event, self.place, self.last)
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

    @property
    def short_name(self) -> str:
        """The handler's class, if it is a method, else the function's name."""
        owner = getattr(self.handler, "__self__", None)
        return type(owner).__name__ if owner is not None else getattr(self.handler, "__qualname__", repr(self.handler))

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
    watcher: CallWatcher | None = None
    event: str = ""
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
        entries = self.in_order()
        ours = [entry if isinstance(entry, Registration) else None for entry in entries]
        self.filters = tuple(ours) if any(entry is not None and entry.when is not None for entry in ours) else None
        calls = [entry[0] if isinstance(entry, Registration) else _ignite_call(*entry) for entry in entries]
        watcher, event = self.watcher, self.event
        if watcher is not None:
            calls = [watcher.around(event, entry[0], call) for entry, call in zip(entries, calls, strict=True)]
        self.calls = tuple(calls)
        self.quiet_from = self.quiet_until = 0
        return self.calls

    def in_order(self) -> list[Any]:
        """Return the entries in the order they are called: as attached, then those that are to be last."""
        return sorted(self, key=_is_last)

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


def _is_last(entry: Any) -> bool:
    return isinstance(entry, Registration) and entry.last


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
        self.watcher: CallWatcher | None = None

    def __missing__(self, event: Any) -> Handlers:
        """Make the list of an event that has no handler yet."""
        self[event] = Handlers()
        return self[event]

    def __setitem__(self, event: Any, entries: Iterable[Any]) -> None:
        """Put a new list in place, as Ignite does when it removes a handler; what was ours in it stays ours."""
        handlers = entries if isinstance(entries, Handlers) else Handlers(_ours_again(entries, self.get(event, ())))
        super().__setitem__(event, handlers)
        handlers.watcher, handlers.event = self.watcher, event_name(event)
        self.by_name[event_name(event)] = handlers

    def registrations(self, event: Any = None) -> Iterator[Registration]:
        """Yield every handler of ours on this event, or on any, event by event."""
        for handlers in self.values() if event is None else (self.get(event, ()),):
            for entry in handlers:
                if isinstance(entry, Registration):
                    yield entry

    def owners(self) -> Iterator[object]:
        """Yield the object behind each handler, ours and Ignite's: of a method its instance, else what is called."""
        for handlers in self.values():
            for func, *_ in handlers:
                owner = _owner(func)
                if owner is not None:
                    yield owner

    def watch(self, watcher: CallWatcher | None) -> None:
        """Let ``watcher`` be around every call from the next firing on; None: nothing."""
        self.watcher = watcher
        for handlers in self.values():
            handlers.watcher, handlers.calls = watcher, None

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


def _owner(handler: Any) -> object | None:
    if isinstance(handler, FunctionType):
        handler = inspect.unwrap(handler)  # a filter of Ignite's is around it
    while isinstance(handler, partial):
        handler = handler.func
    owner = getattr(handler, "__self__", handler)
    return None if isinstance(owner, FunctionType | BuiltinFunctionType | ModuleType | type) else owner


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
