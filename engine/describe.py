"""What ``engine.describe()`` shows: every event in firing order, each with its handlers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

from .display import table
from .events import FIRING_ORDER
from .table import Handlers, HandlerTable, Registration

__all__ = ["Description"]


class Description:
    """The events of an engine in firing order with their handlers, as text or, in a notebook, as a table."""

    def __init__(self, title: str, table: HandlerTable, registered: dict[str, Any]) -> None:
        """Look at the handlers as they are now."""
        self.title = title
        built_in = [event.name for event in FIRING_ORDER]
        names = [*built_in, *(name for name in registered if name not in built_in)]
        none = Handlers()
        entries = {name: table.by_name.get(name, none).in_order() for name in names}
        self.rows = [(name, [_line(table, name, entry) for entry in entries[name]]) for name in names]

    def __str__(self) -> str:
        """Return one line for each event, one for each handler."""
        return "\n".join([self.title, *self._lines()])

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        for name, handlers in self.rows:
            yield f"  {name}" if handlers else f"  {name} -"
            for handler in handlers:
                yield f"    {handler}"

    def _repr_html_(self) -> str:
        return table(self.title, [(name, "\n".join(handlers) or "-") for name, handlers in self.rows])


def _line(handlers: HandlerTable, event: str, entry: Any) -> str:
    """Return a handler's name, its filter, where it is written, and its time if that is measured."""
    function = entry.handler if isinstance(entry, Registration) else entry[0]
    spent = None if handlers.watcher is None else handlers.watcher.spent(event, function)
    time = "" if spent is None else f"{1e3 * spent[1]:.1f} ms in {spent[0]} calls"
    return "  ".join(part for part in (_handler_text(entry), _source(function), time) if part)


def _source(function: Any) -> str:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return ""
    folder, _, file = code.co_filename.replace("\\", "/").rpartition("/")
    where = "cell, line " if "/ipykernel_" in folder else f"{file}:"
    return f"({where}{code.co_firstlineno})"


def _handler_text(entry: Any) -> str:
    if isinstance(entry, Registration):
        name = _qualified_name(entry.handler)
        return name if entry.when is None else f"{name}  {entry.event!r}"
    function = entry[0]
    behind_filter = getattr(function, "_parent", None)  # so Ignite keeps the handler of an event with a filter
    if isinstance(behind_filter, weakref.ref):
        function = behind_filter()
    return f"{_qualified_name(function)}  (Ignite)"


def _qualified_name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if inspect.ismethod(function) and not isinstance(owner, type):
        return f"{type(owner).__name__}.{function.__name__}"
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else repr(function)
