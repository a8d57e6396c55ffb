"""What is looked at when a handler is attached: its signature, and in a notebook the cell it comes from."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from .errors import HandlerError
from .table import Registration

__all__ = ["Place", "calling_place", "check_signature", "replaced_by"]

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
        if type(getattr(function, "__self__", None)).__module__.partition(".")[0] == "ignite":
            raise HandlerError(
                f"{type(function.__self__).__name__} is a component of Ignite: attach it to engine.ignite"
            ) from None
        name = getattr(function, "__name__", repr(function))
        raise HandlerError(
            f"{role} {name}{signature} cannot be called as (engine, batch): {error}. "
            f"Every step and every handler takes exactly these two: def {name}(engine, batch)"
        ) from None


class Place(NamedTuple):
    """The statement of a notebook cell that attaches a handler; run again, it has another code object.

    ``cell`` is the cell's name, where the notebook's front end sends it, and ``execution`` the number of its run.
    """

    code: CodeType
    line: int
    cell: str | None
    execution: int | None


def calling_place() -> Place | None:
    """Return the statement of a notebook cell from which this is called, None outside of notebooks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    if frame is None or "__file__" in frame.f_globals or frame.f_code.co_filename == "<stdin>":
        return None
    return Place(frame.f_code, frame.f_lineno, *_running_cell())


def _running_cell() -> tuple[str | None, int | None]:
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    shell: Any = get_shell()
    get_parent = getattr(shell, "get_parent", None)
    if get_parent is None:
        return None, None
    return get_parent().get("metadata", {}).get("cellId"), shell.execution_count


def replaced_by(
    handler: Any, place: Place | None, events: Sequence[Any], entries: Iterable[Registration]
) -> list[Registration]:
    """Return those of an engine's registrations that a re-run notebook cell means to replace by ``handler``.

    They are all that an earlier run of the same cell has attached, as far as the front end tells which cell it is; else
    those of the same qualified name that the same statement has attached before; and functions of the same
    qualified name in ``__main__`` whose code object is another one: closures made in one loop share theirs and are all
    kept, and so are two functions of one name in one cell. Lambdas share their name, so of them only the very same one
    is replaced.
    """
    return [
        entry
        for entry in entries
        if _same_cell(place, entry)
        or (
            any(entry.event == event for event in events)
            and (_same_statement(handler, place, entry) or _same_function(handler, entry))
        )
    ]


def _same_cell(place: Place | None, entry: Registration) -> bool:
    earlier = entry.place
    if place is None or earlier is None or place.cell is None:
        return False
    return bool(earlier.cell == place.cell and earlier.execution != place.execution)


def _same_statement(handler: Any, place: Place | None, entry: Registration) -> bool:
    """Say whether a cell that attaches a handler of some class is run again, unchanged."""
    if place is None or entry.place is None or entry.place.code is place.code:
        return False
    same_place = (entry.place.code.co_filename, entry.place.line) == (place.code.co_filename, place.line)
    name = getattr(handler, "__qualname__", None)
    return same_place and inspect.ismethod(handler) and getattr(entry.handler, "__qualname__", None) == name


def _same_function(handler: Any, entry: Registration) -> bool:
    code, other = _main_code(handler), _main_code(entry.handler)
    if code is None or other is None or other is code or entry.handler.__qualname__ != handler.__qualname__:
        return False
    same_cell = other.co_filename == code.co_filename
    if handler.__qualname__.endswith("<lambda>"):
        return same_cell and bool(other == code)
    return not same_cell or bool(other.co_firstlineno == code.co_firstlineno)


def _main_code(handler: Any) -> Any:
    if getattr(handler, "__module__", None) != "__main__" or not hasattr(handler, "__qualname__"):
        return None
    return getattr(inspect.unwrap(handler), "__code__", None)  # a decorator's own code is the same for all it decorates
