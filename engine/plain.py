"""What may be saved: tensors, numbers, texts, and containers of these. A weights-only loader reads no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import CheckpointError

__all__ = ["to_plain"]


def to_plain(what: str, value: Any, *, copy: bool = True, host: bool = False) -> Any:
    """Return ``value`` made of what a weights-only loader reads; NumPy's values become Python's and torch's.

    Args:
        what: it is, for the message.
        value: anything.
        copy: give tensors memory of their own. Without it only those get it of which the memory is a part.
        host: bring tensors to the host.

    Raises:
        CheckpointError: there is something else in it.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, copy, host)
    if type(value) in (list, tuple, set):
        return type(value)(to_plain(what, item, copy=copy, host=host) for item in value)
    if isinstance(value, Mapping):
        return {key: to_plain(what, item, copy=copy, host=host) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # NumPy's
        return value.item() if value.ndim == 0 else torch.as_tensor(value).clone()
    raise CheckpointError(
        f"{what} holds a {type(value).__name__}, which a safe loader would not read: keep tensors, numbers, texts, "
        "lists and dicts in what is to be saved"
    )


def _plain_tensor(tensor: torch.Tensor, copy: bool, host: bool) -> torch.Tensor:
    tensor = tensor.detach()
    is_part = tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.to("cpu" if host else tensor.device, copy=copy or is_part)
