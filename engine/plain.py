"""What may be saved: tensors, numbers, texts, and containers of these. A weights-only loader reads no more."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import CheckpointError

__all__ = ["from_plain", "to_plain"]

_AS_THEY_ARE = (type(None), bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_KINDS: dict[type, Callable[[Any], Any]] = {OrderedDict: OrderedDict, Counter: Counter}
_NUMPY = "NumPy's dtype"
_NO_BYTES = {"no bytes": True}  # a pickle has other bytes as a text, and none as a call
_MOST_BITS = 255 * 8 - 1  # of a whole number, in torch's weights-only loader


def to_plain(what: str, value: Any, *, copy: bool = True, host: bool = False) -> Any:
    """Return ``value`` made of what a weights-only loader reads, and ``from_plain`` makes ``value`` of again.

    NumPy's arrays and scalars become torch's and Python's, with a note of what they were.

    Args:
        what: it is, for the message.
        value: anything.
        copy: give tensors memory of their own. Without it only those get it of which the memory is a part.
        host: bring tensors to the host.

    Raises:
        CheckpointError: there is something else in it.
    """

    def plain(item: Any) -> Any:
        return to_plain(what, item, copy=copy, host=host)

    if type(value) is bytes and not value:
        return dict(_NO_BYTES)
    if type(value) in _AS_THEY_ARE or (type(value) is int and value.bit_length() <= _MOST_BITS):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, copy, host)
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value) is set:
        return {_plain_key(what, item) for item in value}
    if isinstance(value, Mapping):
        items = {_plain_key(what, key): plain(item) for key, item in value.items()}
        return _KINDS.get(type(value), dict)(items)
    if _is_numpys(value):
        is_scalar = not hasattr(value, "__setitem__")
        native = value.astype(value.dtype.newbyteorder("="))  # torch has no other byte order
        return {_NUMPY: value.dtype.str, "value": native.item() if is_scalar else torch.from_numpy(native)}
    raise _refusal(what, value)


def _plain_tensor(tensor: torch.Tensor, copy: bool, host: bool) -> torch.Tensor:
    tensor = tensor.detach()
    is_part = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu" if host else tensor.device, copy=copy or is_part)


def _plain_key(what: str, key: Any) -> Any:
    """Return a key as it is found again: NumPy's numbers and texts are equal to Python's."""
    if type(key) in _AS_THEY_ARE or (type(key) is int and key.bit_length() <= _MOST_BITS):
        return key
    if type(key) is tuple:
        return tuple(_plain_key(what, item) for item in key)
    if _is_numpys(key) or type(key).__name__ == "str_":
        return key.item()
    raise _refusal(f"{what} has the key {key!r}, and" if not isinstance(key, int) else what, key)


def _is_numpys(value: Any) -> bool:
    """Say whether this is an array or a scalar of NumPy's, of numbers that torch and Python have too."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return False
    kind, size = value.dtype.kind, value.dtype.itemsize
    return kind in "biufc" and size <= (16 if kind == "c" else 8)


def _refusal(what: str, value: Any) -> CheckpointError:
    kind = f"of {value.bit_length()} bits" if type(value) is int else f"of type {type(value).__name__}"
    dtype = getattr(value, "dtype", None)
    return CheckpointError(
        f"{what} holds a value {kind}{'' if dtype is None else f' ({dtype})'}, which a safe loader would not read: "
        "keep tensors, numbers, texts, lists and dicts in what is to be saved"
    )


def from_plain(value: Any, present: Any = None, *, copy: bool = True) -> Any:
    """Return what ``to_plain`` was given.

    Args:
        value: what it returned.
        present: what stands in its place now: it says the device of a tensor, and how a ``defaultdict`` fills up.
        copy: give tensors memory of their own.
    """
    if isinstance(value, torch.Tensor):
        device = present.device if isinstance(present, torch.Tensor) else value.device
        return value.detach().to(device, copy=copy)
    if type(value) in (list, tuple):
        return type(value)(from_plain(item, copy=copy) for item in value)
    if not isinstance(value, Mapping):
        return set(value) if type(value) is set else value
    if value == _NO_BYTES:
        return b""
    if set(value) == {_NUMPY, "value"}:
        return _numpy_value(value[_NUMPY], value["value"])
    items = {key: from_plain(item, _present_at(present, key), copy=copy) for key, item in value.items()}
    if isinstance(present, defaultdict):
        return defaultdict(present.default_factory, items)
    return _KINDS.get(type(value), dict)(items)


def _present_at(present: Any, key: Any) -> Any:
    if isinstance(present, defaultdict) and key not in present:
        return None if present.default_factory is None else present.default_factory()
    return present.get(key) if isinstance(present, Mapping) else None


def _numpy_value(dtype: str, value: Any) -> Any:
    import numpy

    return value.numpy().astype(dtype) if isinstance(value, torch.Tensor) else numpy.dtype(dtype).type(value)
