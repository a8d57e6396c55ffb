"""Several devices in one process: each forward splits its batch over them, behind the module's own forward.

Two hooks on the module do what ``torch.nn.DataParallel`` does, out of the same parts (``scatter``, ``replicate``,
``parallel_apply``, ``gather``): before the forward the replicas on the further devices run on their parts of the
batch, then the module itself runs on the first part, and after it the outputs are brought together. ``DDP`` is faster
wherever several processes can be started.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import gather, parallel_apply, replicate
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ..errors import StrategyError
from .base import Model, modules_of
from .devices import accelerator_type, device_count, find_device
from .placed import Placed

__all__ = ["DataParallel"]


class DataParallel(Placed):
    """Splits each batch over several devices of this process. With one device it does what ``SingleDevice`` does.

    The first dimension of every tensor that the model is called with is split, and the outputs are joined along it.
    Buffers, such as batch statistics, are those of the first device's part. Every forward copies the weights to the
    further devices.

    Args:
        device_ids: indices of the accelerator; None: all there are. Weights and batches are on the first.
        precision: as for ``SingleDevice``.
        compile: as for ``SingleDevice``.
        scaler: as for ``SingleDevice``.

    Raises:
        StrategyError: there is no such device, or one is given twice.
    """

    name: ClassVar[str] = "dp"

    def __init__(
        self,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        precision: str = "32-true",
        compile: bool | Mapping[str, Any] = False,
        scaler: Mapping[str, Any] | None = None,
    ) -> None:
        if device_ids is not None and (isinstance(device_ids, str) or not device_ids):
            raise StrategyError(f"device_ids must be indices of the accelerator, such as [0, 1], got {device_ids!r}")
        devices = _all_devices() if device_ids is None else [find_device(_named(one)) for one in device_ids]
        if len(set(devices)) < len(devices):
            raise StrategyError(f"device_ids={list(device_ids or [])!r} gives a device twice")
        super().__init__(devices[0], precision, compile, scaler)
        self.devices = devices
        self._hooks: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: not the hooks, which belong to modules."""
        return {name: value for name, value in self.__dict__.items() if name != "_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was kept."""
        self.__dict__.update(state)
        self._hooks = weakref.WeakKeyDictionary()

    def prepare_model(self, model: Model) -> None:
        """Move ``model`` to the first device, and let its forward split batches over all of them.

        Raises:
            StrategyError: a parameter or buffer is on the meta device, where it has no values.
        """
        super().prepare_model(model)
        if len(self.devices) < 2:
            return
        for module in modules_of(model):
            if module not in self._hooks:
                self._hooks[module] = hooks = _Hooks(module, self.devices)
                weakref.finalize(self, hooks.take_off).atexit = False


class _Hooks:
    """The two hooks on a module. In copies of the module, replicas among them, they do nothing."""

    def __init__(self, module: nn.Module | None = None, devices: Sequence[torch.device] = ()) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._devices = devices
        self._others: list[list[Any]] = []  # outputs of the further devices, for each forward in progress
        self._handles = (
            ()
            if module is None
            else (
                module.register_forward_pre_hook(self.before_forward, with_kwargs=True),
                module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True),
            )
        )

    def take_off(self) -> None:
        for handle in self._handles:
            handle.remove()

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._module is None or self._module() is not module:
            return None
        self._others.append([])
        inputs, named = scatter_kwargs(args, kwargs, self._devices)
        if len(inputs) > 1:
            devices = self._devices[: len(inputs)]
            replicas = replicate(module, devices, detach=not torch.is_grad_enabled())
            self._others[-1] = parallel_apply(replicas[1:], inputs[1:], named[1:], devices[1:])
        return inputs[0], named[0]

    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._module is None or self._module() is not module:
            return None
        others = self._others.pop()
        return gather([output, *others], self._devices[0]) if others else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hooks:
        return _Hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hooks, ()


def _named(device: int | torch.device) -> str | torch.device:
    return device if isinstance(device, torch.device) else f"{accelerator_type() or 'cuda'}:{device}"


def _all_devices() -> list[torch.device]:
    accelerator = accelerator_type()
    return [torch.device(f"{accelerator}:{index}") for index in range(device_count(accelerator))] or [
        torch.device("cpu")
    ]
