"""How events reach their handlers: our table in the place of Ignite's lists, and what an error does.

``_fire_event`` walks compiled calls and does nothing at all for an event without handlers. Custom events keep their
counters to their engine. An error always leaves the run, after every ``EXCEPTION_RAISED`` handler has run once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ignite.engine import Engine as IgniteEngine
from ignite.engine import State

from .errors import RunError, suggestion
from .events import Events, event_name
from .table import Call, HandlerTable, Registration, resolve

__all__ = ["FiringEngine"]

# event -> what its filters count; events that are not here count their own firings
_COUNTERS: dict[str, str] = {event_name(event): attr for event, attr in State.event_to_attr.items()}


class FiringEngine(IgniteEngine):
    """Ignite's engine with our table of handlers. ``owner`` is the ``Engine`` that our handlers are given, if any."""

    def __init__(self, process_function: Callable[[Any, Any], Any]) -> None:
        """Make an engine around ``process_function(engine, batch)``."""
        self._counters = dict(_COUNTERS)
        self._counts: dict[str, Callable[[], int]] = {}
        self.firings: dict[str, int] = {}
        self.owner: Callable[[], Any] | None = None
        self.ending: str | None = None
        self.error: BaseException | None = None
        super().__init__(process_function)
        self._event_handlers: HandlerTable = HandlerTable()  # type: ignore[assignment]  # a dict of lists as Ignite's
        self._by_name = self._event_handlers.by_name

    def register_events(self, *event_names: Any, event_to_attr: dict[Any, str] | None = None) -> None:
        """Register events as Ignite does, but keep their counters to this engine."""
        super().register_events(*event_names, event_to_attr=None if isinstance(event_to_attr, dict) else event_to_attr)
        for event in event_names:
            if event_to_attr and event in event_to_attr:
                attribute = event_to_attr[event]
                self._counters[event_name(event)] = attribute
                if not hasattr(self.state, attribute):
                    setattr(self.state, attribute, 0)

    def _assert_allowed_event(self, event: Any) -> None:
        if event not in self._allowed_events:
            known = [event_name(one) for one in self._allowed_events]
            hint = suggestion(event_name(event), known) if isinstance(event, str) else ""
            raise ValueError(f"Event {event} is not a valid event for this Engine{hint}")

    def count(self, event: Any) -> int:
        """Return what a filter on ``event`` is asked with: its counter, or how often it has fired."""
        name = event_name(event)
        if name in self._counts:
            return self._counts[name]()
        attribute = self._counters.get(name)
        if attribute is None:
            return self.firings.get(name, 0)
        value: int = getattr(self.state, attribute)
        return value

    def count_with(self, event: Any, count: Callable[[], int]) -> None:
        """Let filters on an event be asked with a counter of the engine's."""
        self._counts[event_name(event)] = count

    def _handler_wrapper(self, handler: Callable[..., Any], event: Any, event_filter: Callable[..., Any]) -> Any:
        reference = weakref.ref(self)

        @functools.wraps(handler)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            engine = resolve(reference)
            return handler(*args, **kwargs) if event_filter(engine, engine.count(event)) else None

        wrapper._parent = weakref.ref(handler)  # type: ignore[attr-defined]
        return wrapper

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        self.last_event_name = event_name
        try:
            name = event_name._name_
        except AttributeError:
            name = event_name
        handlers = self._by_name.get(name)
        if name not in self._counters:
            self.firings[name] = self.firings.get(name, 0) + 1
        if not handlers:
            return
        calls: Iterable[Call] = handlers.calls or handlers.compile()
        engine = self if self.owner is None else self.owner()
        if event_args or event_kwargs:
            calls = [self._with_arguments(entry, event_args, event_kwargs) for entry in handlers.in_order()]
        elif handlers.filters is not None:
            calls = handlers.due(engine, self.count(event_name))
        batch = self.state.batch
        for call in calls:
            call(engine, batch)

    def _with_arguments(self, entry: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any, Any], Any]:
        """Return the call of one entry for the two events that hand arguments to Ignite's handlers."""
        func, own_args, own_kwargs = entry
        if isinstance(entry, Registration):
            return lambda engine, batch: func(engine, batch) if entry.is_due(engine, self.count(entry.event)) else None
        named = {**own_kwargs, **kwargs}
        if own_args and isinstance(own_args[0], weakref.ref):
            return lambda engine, batch: func(resolve(own_args[0]), *args, *own_args[1:], **named)
        return lambda engine, batch: func(*args, *own_args, **named)

    def _handle_exception(self, e: BaseException) -> None:
        """Let every ``EXCEPTION_RAISED`` handler run once, then let the first error leave, later ones chained to it."""
        e = _without_stop_iteration(e)
        self.error = e
        self.ending = "interrupted" if isinstance(e, KeyboardInterrupt) else "failed"
        event = Events.EXCEPTION_RAISED
        self.last_event_name = event  # type: ignore[assignment]  # equal to Ignite's
        self.firings[event.name] = self.firings.get(event.name, 0) + 1
        engine = self if self.owner is None else self.owner()
        for entry in self._event_handlers[event].in_order():
            try:
                self._with_arguments(entry, (e,), {})(engine, self.state.batch)
            except BaseException as later:
                with suppress(AttributeError):  # an exception class of the user's may be frozen
                    _chain(e, later)
        try:
            raise e
        finally:
            del e  # this frame is in its traceback: a name for it would be a cycle, and keep batch and model alive


def _without_stop_iteration(error: BaseException) -> BaseException:
    """Turn a ``StopIteration`` of user code, which would pass for an end of data, into an error with words.

    Out of a generator, and the loop is one, Python lets it leave as the cause of a RuntimeError of this text.
    """
    made_by_python = isinstance(error, RuntimeError) and str(error) == "generator raised StopIteration"
    cause = error.__cause__ if made_by_python else error
    if not isinstance(cause, StopIteration):
        return error
    wrapped = RunError(
        "StopIteration came out of a step, a handler or the data's own code, most likely from a bare next(...): catch "
        "it there, or give a default, next(iterator, None)"
    )
    wrapped.__cause__ = cause
    return wrapped


def _chain(first: BaseException, later: BaseException) -> None:
    """Append ``later`` to the errors that ``first`` is shown with."""
    shown = _shown_with(first)
    known = {id(error) for error in shown}
    if id(later) in known:
        return
    for error in _shown_with(later):
        if id(error) in known:
            break
        # it was raised while the first was being handled: what links back to that would make a ring
        if id(error.__context__) in known:
            error.__context__ = None
        if id(error.__cause__) in known:
            error.__cause__ = None
    shown[-1].__context__ = later
    shown[-1].__suppress_context__ = False


def _shown_with(error: BaseException) -> list[BaseException]:
    """Return an error and those that a traceback shows above it, back to the oldest."""
    shown: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and not any(following is other for other in shown):
        shown.append(following)
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return shown
