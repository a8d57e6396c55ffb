"""Reading the numbers among values that somebody wants to write down, all together."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

__all__ = ["read_scalars"]

_LONGEST_VECTOR = 100


def read_scalars(values: Mapping[str, Any]) -> tuple[dict[str, int | float], list[str]]:
    """Return the numbers by name, and the names of values that are none.

    A vector of up to 100 numbers counts as ``name/0``, ``name/1`` and so on. Waits for the device, once for all tensors
    of one device and type.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    read = _read_tensors({name: value.detach() for name, value in tensors.items() if _is_short(value)})
    numbers: dict[str, int | float] = {}
    others: list[str] = []
    for name, value in values.items():
        if name in tensors:
            plain = read.get(name)
        elif isinstance(value, Number):
            plain = _plain(value)
        else:
            plain = value.tolist() if hasattr(value, "tolist") and _is_short(value) else None
        if isinstance(plain, list):
            numbers.update({f"{name}/{place}": number for place, number in enumerate(plain)})
        elif isinstance(plain, int | float):
            numbers[name] = plain
        else:
            others.append(name)
    return numbers, others


def _is_short(value: Any) -> bool:
    kind = getattr(value.dtype, "kind", "")  # an array's; a tensor's dtype has none
    is_numeric = not value.dtype.is_complex if isinstance(value, torch.Tensor) else kind in tuple("biuf")
    return is_numeric and (value.ndim == 0 or (value.ndim == 1 and len(value) <= _LONGEST_VECTOR))


def _read_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(name)
    read: dict[str, Any] = {}
    for names in groups.values():
        if len(names) == 1:
            read[names[0]] = tensors[names[0]].tolist()  # waits for the device
            continue
        together = torch.cat([tensors[name].reshape(-1) for name in names]).tolist()  # waits for the device
        for name in names:
            count = tensors[name].numel()
            read[name] = together[:count] if tensors[name].ndim else together[0]
            del together[:count]
    return {name: _plain_all(value) for name, value in read.items()}


def _plain_all(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list) else _plain(value)


def _plain(value: Any) -> int | float | None:
    """Return a number as Python's int or float; None for a complex one."""
    if isinstance(value, bool):
        return int(value)
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, bool) else value
    try:
        return float(value)  # a fraction, a decimal
    except TypeError:
        return None
