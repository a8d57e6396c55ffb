"""What every strategy does on the device of this process: move, cast, compile, autocast, step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..errors import StrategyError
from ..nested import map_nested, move
from .base import Model, Strategy, modules_of
from .devices import default_device, find_device, first_without_values, parameter_devices
from .precision import Stepper, autocast_region, full_name, make_stepper, model_dtype

__all__ = ["Placed"]

_ASYNCHRONOUS = frozenset({"cuda", "xpu"})  # here a copy from pinned memory is done before the work that reads it


class Placed(Strategy):
    """A strategy with one device in this process; the arguments are those of ``SingleDevice``."""

    def __init__(
        self,
        device: str | int | torch.device | None,
        precision: str,
        compile: bool | Mapping[str, Any],
        scaler: Mapping[str, Any] | None,
    ) -> None:
        self.precision = full_name(precision)
        self._dtype = model_dtype(self.precision)
        if not isinstance(compile, bool | Mapping):
            raise StrategyError(f'compile= is a bool or options such as {{"backend": "eager"}}, got {compile!r}')
        self._compile = None if compile is False else dict(compile) if isinstance(compile, Mapping) else {}
        if not isinstance(scaler, Mapping | None):
            raise StrategyError(f'scaler= are options of GradScaler such as {{"init_scale": 1024.0}}, got {scaler!r}')
        self._scaler = None if scaler is None else dict(scaler)
        self._is_chosen = device is not None  # by the caller: then every model goes there
        self._is_settled = self._is_chosen
        self._settle(default_device() if device is None else find_device(device))
        if scaler is not None:
            if self.precision != "16-mixed":
                raise StrategyError(f"scaler={scaler!r} is for precision='16-mixed', not {self.precision!r}")
            self.make_stepper()  # refuses options that GradScaler does not have

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.device)!r}, precision={self.precision!r})"

    def prepare_model(self, model: Model) -> None:
        """Move what is elsewhere to :attr:`device`, in place. Waits for the device where something is moved.

        Raises:
            StrategyError: a parameter or buffer is on the meta device, where it has no values.
        """
        if (name := first_without_values(model)) is not None:
            raise StrategyError(
                f"{name!r} is on the meta device, where it has no values: call model.to_empty(device=...) and load or "
                "initialise the weights before the engine is made"
            )
        devices = parameter_devices(model)
        if not self._is_settled:
            self._settle(_home(devices) or self.device)
            self._is_settled = True
        if len(devices) > 1 and not self._is_chosen:
            self._cast_and_compile(model)
            return  # spread on purpose: its own hooks bring activations from device to device
        for module in modules_of(model):
            tensors = [*module.parameters(), *module.buffers()]
            if not tensors or any(tensor.device != self.device for tensor in tensors):
                module.to(self.device)
        self._cast_and_compile(model)

    def _cast_and_compile(self, model: Model) -> None:
        for module in modules_of(model):
            if self._dtype is not None:
                module.to(self._dtype)
            # private to torch; were it gone, a second engine would only compile the module once more
            compiled = getattr(module, "_compiled_call_impl", None) is not None
            if self._compile is not None and not compiled:
                module.compile(**self._compile)

    def prepare_batch(self, batch: Any) -> Any:
        """Return ``batch`` on :attr:`device`. Does not wait where the memory is pinned and the device can do so."""
        moved = move(batch, self.device, self._non_blocking)
        return moved if self._dtype is None else map_nested(moved, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def autocast(self) -> AbstractContextManager[None]:
        """Return the region of the forward pass; it does nothing unless the precision is mixed."""
        return autocast_region(self.precision, self.device)

    def make_stepper(self) -> Stepper:
        """Return what steps the optimizers of one engine."""
        return make_stepper(self.precision, self.device, self._scaler)

    def _settle(self, device: torch.device) -> None:
        self.device = device
        self._non_blocking = device.type in _ASYNCHRONOUS


def _home(devices: dict[torch.device, str]) -> torch.device | None:
    """Return where a model belongs that nobody asked to move, or None if it may go anywhere."""
    first = next(iter(devices), None)
    return None if first is None or (len(devices) == 1 and first.type == "cpu") else first
