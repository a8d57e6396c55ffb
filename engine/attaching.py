"""What is looked at when a handler is attached: its signature, and in a notebook the cell it comes from."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from .errors import HandlerError
from .table import Registration

__all__ = ["check_signature", "replaced_by"]

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
