"""Which devices exist, and where a model is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import StrategyError
from .base import Model

__all__ = [
    "accelerator_type",
    "current_index",
    "default_device",
    "device_count",
    "find_device",
    "first_without_values",
    "parameter_devices",
]


def accelerator_type() -> str | None:
    """Return the type of accelerator that this torch is for, or None. Neither looks for a device nor sets one up."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, which raises where later versions return None
        return None
    return None if accelerator is None else accelerator.type


def default_device() -> torch.device:
    """Return the accelerator of this machine, at its current index, or the CPU if there is none."""
    accelerator = accelerator_type()
    return _with_index(torch.device(accelerator)) if accelerator and device_count(accelerator) else torch.device("cpu")


def find_device(device: str | int | torch.device) -> torch.device:
    """Return the device in the form that a tensor on it reports: with an index, but for the CPU.

    Raises:
        StrategyError: there is no such device here.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise StrategyError(f"device={device!r} is no device; here are {_existing()}") from error
    count = device_count(found.type)
    if not count or (found.index or 0) >= count:
        raise StrategyError(f"device={device!r} does not exist here; here are {_existing()}")
    return torch.device("cpu") if found.type == "cpu" else _with_index(found)


def parameter_devices(model: Model) -> dict[torch.device, str]:
    """Return each device that holds parameters (or buffers, if there are none), with the first name found there."""
    parameters, buffers = _named_tensors(model)
    places: dict[torch.device, str] = {}
    for name, tensor in parameters or buffers:
        places.setdefault(tensor.device, name)
    return places


def first_without_values(model: Model) -> str | None:
    """Return the name of the first parameter or buffer on the meta device, or None."""
    parameters, buffers = _named_tensors(model)
    return next((name for name, tensor in [*parameters, *buffers] if tensor.is_meta), None)


def current_index(device_type: str) -> int | None:
    """Return the index of the current device of this type, or None while torch has not set the type up."""
    module = getattr(torch, device_type, None)
    is_initialized = getattr(module, "is_initialized", None)  # not every type has it, and those have one device
    if is_initialized is None or not is_initialized():
        return None
    index: int = torch.get_device_module(device_type).current_device()
    return index


def _named_tensors(model: Model) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    parameters: list[tuple[str, torch.Tensor]] = []
    buffers: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.items() if isinstance(model, Mapping) else [("", model)]:
        parameters += module.named_parameters(prefix)
        buffers += module.named_buffers(prefix)
    return parameters, buffers


def _with_index(device: torch.device) -> torch.device:
    has_index = ":" in str(device)  # torch's annotations deny that an index may be None
    return device if has_index else torch.device(device.type, current_index(device.type) or 0)


def device_count(device_type: str | None) -> int:
    """Return how many devices of this type are here; of no type, none."""
    module = None if device_type is None else getattr(torch, device_type, None)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _existing() -> str:
    accelerator = accelerator_type()
    names = ["cpu"]
    if accelerator is not None:
        names += [f"{accelerator}:{index}" for index in range(device_count(accelerator))]
    return ", ".join(map(repr, names))
