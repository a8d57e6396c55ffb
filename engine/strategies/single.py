"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import StrategyError
from ..nested import move
from .base import Model, Strategy, modules_of
from .devices import default_device, find_device, first_without_values, parameter_devices

__all__ = ["SingleDevice"]

_FULL_PRECISION = nullcontext()
_ASYNCHRONOUS = frozenset({"cuda", "xpu"})  # here a copy from pinned memory is done before the work that reads it


class SingleDevice(Strategy):
    """Runs the model in this process, on one device, at full precision.

    Args:
        device: such as ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or an index of the accelerator. None: where the first model
            prepared already is, if that is no CPU; else the accelerator of this machine; else the CPU. A model that
            its owner has spread over several devices is then left so, and batches go to its first parameter's device.

    Raises:
        StrategyError: there is no such device.
    """

    name: ClassVar[str] = "single"

    def __init__(self, device: str | int | torch.device | None = None) -> None:
        self._is_chosen = device is not None  # by the caller: then every model goes there
        self._is_settled = self._is_chosen
        self._settle(default_device() if device is None else find_device(device))

    def __repr__(self) -> str:
        return f"SingleDevice({str(self.device)!r})"

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
            return  # spread on purpose: its own hooks bring activations from device to device
        for module in modules_of(model):
            tensors = [*module.parameters(), *module.buffers()]
            if not tensors or any(tensor.device != self.device for tensor in tensors):
                module.to(self.device)

    def prepare_batch(self, batch: Any) -> Any:
        """Return ``batch`` on :attr:`device`. Does not wait where the memory is pinned and the device can do so."""
        return move(batch, self.device, self._non_blocking)

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: full precision."""
        return _FULL_PRECISION

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to the ``.grad`` of the parameters. Does not wait for the device."""
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Update the parameters; always a real update. Does not wait for the device."""
        optimizer.step()
        return True

    def _settle(self, device: torch.device) -> None:
        self.device = device
        self._non_blocking = device.type in _ASYNCHRONOUS


def _home(devices: dict[torch.device, str]) -> torch.device | None:
    """Return where a model belongs that nobody asked to move, or None if it may go anywhere."""
    first = next(iter(devices), None)
    return None if first is None or (len(devices) == 1 and first.type == "cpu") else first
