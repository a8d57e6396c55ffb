"""What may be saved: tensors, numbers, texts, and containers of these. A weights-only loader reads no more."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .errors import CheckpointError

__all__ = ["from_plain", "to_plain"]

_AS_THEY_ARE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_KINDS: dict[type, Callable[[Any], Any]] = {OrderedDict: OrderedDict, Counter: Counter}
_NUMPY = "NumPy's dtype"


def to_plain(what: str, value: Any, *, copy: bool = True, host: bool = False, numpy: bool = False) -> Any:
    """Return ``value`` made of what a weights-only loader reads; NumPy's values become Python's and torch's.

    Args:
        what: it is, for the message.
        value: anything.
        copy: give tensors memory of their own. Without it only those get it of which the memory is a part.
        host: bring tensors to the host.
        numpy: note what NumPy's values were, for ``from_plain`` to make them that again.

    Raises:
        CheckpointError: there is something else in it.
    """

    def plain(item: Any) -> Any:
        return to_plain(what, item, copy=copy, host=host, numpy=numpy)

    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, copy, host)
    if type(value) in (list, tuple, set):
        return type(value)(plain(item) for item in value)
    if isinstance(value, Mapping):
        items = {key: plain(item) for key, item in value.items()}
        return _KINDS.get(type(value), dict)(items)
    if hasattr(value, "dtype") and hasattr(value, "tolist") and value.dtype.kind in "biufc":  # NumPy's
        converted = value.item() if value.ndim == 0 else torch.from_numpy(value.copy())
        return {_NUMPY: str(value.dtype), "value": converted} if numpy else converted
    raise CheckpointError(
        f"{what} holds a value of type {type(value).__name__}, which a safe loader would not read: keep tensors, "
        "numbers, texts, lists and dicts in what is to be saved"
    )


def _plain_tensor(tensor: torch.Tensor, copy: bool, host: bool) -> torch.Tensor:
    tensor = tensor.detach()
    is_part = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu" if host else tensor.device, copy=copy or is_part)


def from_plain(value: Any, present: Any = None) -> Any:
    """Return a copy of what ``to_plain`` was given with ``numpy=True``.

    Args:
        value: what it returned.
        present: what stands in its place now: it says the device of a tensor, and how a ``defaultdict`` fills up.
    """
    if isinstance(value, torch.Tensor):
        device = present.device if isinstance(present, torch.Tensor) else value.device
        return value.detach().to(device, copy=True)
    if type(value) in (list, tuple, set):
        return type(value)(from_plain(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    if set(value) == {_NUMPY, "value"}:
        return _numpy_value(value[_NUMPY], value["value"])
    items = {key: from_plain(item) for key, item in value.items()}
    if isinstance(present, defaultdict):
        return defaultdict(present.default_factory, items)
    return _KINDS.get(type(value), dict)(items)


def _numpy_value(dtype: str, value: Any) -> Any:
    import numpy

    return value.numpy().astype(dtype) if isinstance(value, torch.Tensor) else numpy.dtype(dtype).type(value)
