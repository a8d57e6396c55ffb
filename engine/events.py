"""Events and their filters.

The names and filters are Ignite's; four events of the update are ours. An event is equal to Ignite's event of the
same name, so either ``Events`` may be used with either engine. What differs, and why:

- ``a | b`` makes a new list (Ignite's changes the left one when it is a list already).
- A numeric filter is kept as a ``range`` or a tuple, so that asking whether it is due is one fast look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ignite.engine.events import CallableEventWithFilter
from ignite.engine.events import EventEnum as IgniteEventEnum
from ignite.engine.events import Events as IgniteEvents
from ignite.engine.events import EventsList as IgniteEventsList

from .errors import EventError, suggestion

__all__ = [
    "FIRING_ORDER",
    "EventEnum",
    "EventLike",
    "Events",
    "EventsList",
    "FilteredEvent",
    "When",
    "check_custom_event",
    "event_name",
    "find_event",
    "split_events",
]

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
        EventError: neither a text nor a member of an ``EventEnum``, or of a name that the loop's events have.
    """
    if not isinstance(event, str | IgniteEventEnum):
        raise EventError(f"register_events takes texts and members of an EventEnum, such as *MyEvents, got {event!r}")
    if event_name(event).upper() in Events.__members__ and not isinstance(event, Events | IgniteEvents):
        raise EventError(
            f"{event!r} has the name of an event of the loop, and would be taken for it: choose another one"
        )
