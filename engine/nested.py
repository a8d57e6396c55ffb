"""Batches and outputs as users make them: tensors inside dicts, tuples, dataclasses, and what other libraries add.

``move`` and ``detach`` run at every iteration, mostly on values that need nothing done. So they dispatch on
``type(value)``, and give back the very same object, at every level, where nothing changed: what needs no move is
neither copied nor rebuilt, and keeps its type whatever that is. The type alone decides, never ``isinstance``, so that
proxies and objects with a ``__getattr__`` of their own are not asked for what they do not have.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["detach", "map_nested", "move"]

_MAX_DEPTH = 100  # containers inside containers: no batch is as deep, one that contains itself is deeper

_PLAIN = frozenset({NoneType, bool, int, float, complex, str, bytes})
_FLAT = frozenset({tuple, list, dict})
_MISSING = object()
_NOT_A_LEAF = object()


def map_nested(value: Any, function: Callable[[Any], Any], *, leaf: type | tuple[type, ...] = Tensor) -> Any:
    """Replace each tensor in ``value`` by ``function(tensor)``, and keep everything around it.

    Looks into dicts and other mappings, lists, tuples, named tuples and dataclasses, subclasses of them too. Everything
    else (sets, arrays, modules, unknown objects) is left as it is.

    Args:
        value: anything.
        function: called once for each occurrence of a leaf, in order.
        leaf: the type or types to call ``function`` on.

    Returns:
        ``value`` itself if every leaf was replaced by itself, else containers of the same types around the new leaves.
        Where a part of ``value`` did not change, it is the same object.

    Raises:
        ValueError: ``value`` contains itself.
        TypeError: a container of this type cannot be rebuilt around other values.
    """
    return _Mapper(function, leaf).visit(value)


def move(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Bring each tensor in ``value`` to ``device``, as :func:`map_nested` does, and what has a ``.to`` method as well.

    An object that is no tensor but has ``.to`` (a ``PackedSequence``, a ``BatchEncoding``, a graph) is moved by it: in
    place, if its class works in place. A ``torch.nn.Module`` is left where it is.

    Waits for the device unless ``non_blocking`` is true and the memory is pinned.
    """
    kind = type(value)
    if kind is Tensor:
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    if kind in _PLAIN:
        return value
    if kind in _FLAT:  # the usual batch, looked through without a call
        for item in value.values() if kind is dict else value:
            if type(item) is Tensor:
                if item.device != device:
                    break
            elif type(item) not in _PLAIN:
                break
        else:
            return value
    return _Mover(device, non_blocking).visit(value)


def detach(value: Any) -> Any:
    """Detach each tensor in ``value`` that carries a graph; a tensor that needs no gradient is the same object after.

    Takes any object: what it does not know, what cannot be rebuilt and what contains itself is left as it is. Does not
    wait for the device.
    """
    kind = type(value)
    if kind is Tensor:
        return value.detach() if value.requires_grad else value
    if kind in _PLAIN:
        return value
    if kind in _FLAT:
        for item in value.values() if kind is dict else value:
            if type(item) is Tensor:
                if item.requires_grad:
                    break
            elif type(item) not in _PLAIN:
                break
        else:
            return value
    try:
        return _DETACHER.visit(value)
    except _ContainsItselfError:
        return value


class _ContainsItselfError(ValueError):
    """A container that is deeper than any that ends."""


class _Visitor:
    """Walks through a value; what is done with the leaves is in the subclasses."""

    __slots__ = ()
    skip: frozenset[type] = _PLAIN  # never a leaf, and nothing inside
    inside: frozenset[type] = _FLAT  # never a leaf

    def leaf(self, value: Any, kind: type) -> Any:
        """Return what replaces ``value``, or ``_NOT_A_LEAF``."""
        raise NotImplementedError

    def give_up(self, value: Any, error: Exception) -> Any:
        """Return what stands for a container that cannot be rebuilt, or raise."""
        raise TypeError(
            f"a {type(value).__qualname__} cannot be rebuilt around its changed values "
            f"({type(error).__name__}: {error}): give the class a method .to(device), or use a dict, list, tuple or "
            "dataclass instead"
        ) from error

    def visit(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in self.skip:
            return value
        if kind not in self.inside:
            done = self.leaf(value, kind)
            if done is not _NOT_A_LEAF:
                return done
        if depth > _MAX_DEPTH:
            raise _ContainsItselfError(
                f"a {kind.__qualname__} lies more than {_MAX_DEPTH} containers deep: does it contain itself?"
            )
        if kind is dict:
            return self._visit_named(value, value.items(), _with_items, depth + 1)
        if issubclass(kind, (tuple, list)):
            return self._visit_sequence(value, kind, depth + 1)
        if issubclass(kind, nn.Module):  # before the others: a module can be a dataclass
            return value
        if issubclass(kind, Mapping):
            return self._visit_named(value, value.items(), _with_items, depth + 1)
        if hasattr(kind, "__dataclass_fields__"):
            return self._visit_named(value, _field_values(value), _with_fields, depth + 1)
        return value

    def _visit_sequence(self, value: Any, kind: type, depth: int) -> Any:
        skip, visit = self.skip, self.visit
        items = [item if type(item) in skip else visit(item, depth) for item in value]
        if all(map(is_, value, items)):
            return value
        if kind is list:
            return items
        if kind is tuple:
            return tuple(items)
        return self._rebuild(value, _with_elements, items)

    def _visit_named(self, value: Any, items: Any, rebuild: Callable[[Any, Any], Any], depth: int) -> Any:
        skip, visit = self.skip, self.visit
        changed = {name: new for name, old in items if type(old) not in skip and (new := visit(old, depth)) is not old}
        return self._rebuild(value, rebuild, changed) if changed else value

    def _rebuild(self, value: Any, rebuild: Callable[[Any, Any], Any], changed: Any) -> Any:
        try:
            return rebuild(value, changed)
        except Exception as error:  # the class is the user's, and so is what its constructor raises
            return self.give_up(value, error)


class _Mapper(_Visitor):
    __slots__ = ("function", "inside", "kinds", "skip")

    def __init__(self, function: Callable[[Any], Any], kinds: type | tuple[type, ...]) -> None:
        self.function = function
        self.kinds = kinds
        self.skip = frozenset(kind for kind in _PLAIN if not issubclass(kind, kinds))
        self.inside = frozenset(kind for kind in _FLAT if not issubclass(kind, kinds))

    def leaf(self, value: Any, kind: type) -> Any:
        return self.function(value) if issubclass(kind, self.kinds) else _NOT_A_LEAF


class _Mover(_Visitor):
    __slots__ = ("device", "non_blocking")

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        self.device = device
        self.non_blocking = non_blocking

    def leaf(self, value: Any, kind: type) -> Any:
        if kind is Tensor or issubclass(kind, Tensor):
            return value if value.device == self.device else value.to(self.device, non_blocking=self.non_blocking)
        to = getattr(kind, "to", None)
        if not callable(to) or issubclass(kind, nn.Module):
            return _NOT_A_LEAF
        options = {"non_blocking": True} if self.non_blocking and _takes_non_blocking(to) else {}
        moved = value.to(self.device, **options)
        return value if moved is None else moved  # None: it moved itself


class _Detacher(_Visitor):
    __slots__ = ()

    def leaf(self, value: Any, kind: type) -> Any:
        if kind is Tensor or issubclass(kind, Tensor):
            return value.detach() if value.requires_grad else value
        return _NOT_A_LEAF

    def give_up(self, value: Any, error: Exception) -> Any:
        return value


_DETACHER = _Detacher()


def _field_values(value: Any) -> list[tuple[str, Any]]:
    named = ((field.name, getattr(value, field.name, _MISSING)) for field in fields(value))
    return [(name, old) for name, old in named if old is not _MISSING]


def _with_elements(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        new = _copied(value)
        new[:] = items
        return new
    make = getattr(type(value), "_make", type(value))  # named tuples; what torch.max(x, 0) returns has no _make
    return make(items)


def _with_items(value: Any, changed: dict[Any, Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})
    new = _copied(value)
    for key, item in changed.items():
        new[key] = item
    return new


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    new = _copied(value)  # not dataclasses.replace: it runs __post_init__ and refuses fields with init=False
    for name, item in changed.items():
        object.__setattr__(new, name, item)  # a frozen class forbids setattr
    return new


def _copied(value: Any) -> Any:
    """Return a shallow copy that is safe to write to."""
    new = copy.copy(value)
    if new is value or type(new) is not type(value):
        raise TypeError(f"copy.copy gives {'the same object' if new is value else f'a {type(new).__qualname__}'}")
    return new


@functools.lru_cache(maxsize=64)
def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    """Whether ``to`` has ``non_blocking``: without it a copy makes the host wait for all earlier device work."""
    try:
        parameters = inspect.signature(to).parameters
    except ValueError:  # written in C, without a signature
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
