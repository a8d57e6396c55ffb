"""Backward passes and steps where parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .precision import LossScaler, Stepper

__all__ = ["ShardedLossScaler", "ShardedStepper"]

Parameters = Callable[[], Iterable[nn.Parameter]]


class ShardedStepper(Stepper):
    """A stepper whose backward pass can be kept to some of the parameters.

    Args:
        parameters: gives all that are sharded.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        """Add the gradient of ``loss``. A collective."""
        with _only_into(inputs, self._parameters):
            super().backward(loss, None)


class ShardedLossScaler(LossScaler):
    """A loss scaler with which all ranks skip an update if one of them has found an overflow in its shard.

    Args:
        device: as for ``LossScaler``.
        parameters: gives all that are sharded.
        options: as for ``LossScaler``.
    """

    def __init__(self, device: torch.device, parameters: Parameters, **options: Any) -> None:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        super().__init__(device, **options)
        # the default of process_group is what the default group was when torch's module was imported
        self._scaler = ShardedGradScaler(device.type, process_group=None, **options)
        self._parameters = parameters
        self._local: dict[int, _Local] = {}  # of the optimizers of this window, by id

    def backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        """Add the gradient of the scaled loss. A collective."""
        with _only_into(inputs, self._parameters):
            super().backward(loss, None)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and note an overflow on any rank. A collective."""
        self._local[id(optimizer)] = local = _Local(optimizer)
        self._scaler.unscale_(local)  # type: ignore[arg-type]

    def step(self, optimizer: Optimizer) -> None:
        """Step unless a gradient has overflowed on any rank."""
        self._scaler.step(self._local[id(optimizer)])  # type: ignore[arg-type]

    def finish(self) -> None:
        """Adapt the scale to whether anything has overflowed."""
        super().finish()
        self._local.clear()

    def forget(self) -> None:
        """Forget which gradients have been unscaled, and what has overflowed. Waits for the device."""
        super().forget()
        self._local.clear()


class _Local:
    """What a ``GradScaler`` is to see of an optimizer: this rank's shards of the gradients, as plain tensors.

    Of sharded ones it would warn. Nor does a fused optimizer skip inside its step so, where nobody could see it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.step = optimizer.step
        self.param_groups = [{"params": [SimpleNamespace(grad=one) for one in _local_gradients(optimizer)]}]


@torch.no_grad()
def _local_gradients(optimizer: Optimizer) -> list[Tensor]:
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    return [one.to_local() if hasattr(one, "device_mesh") else one for one in gradients]


@contextmanager
def _only_into(inputs: list[Tensor] | None, parameters: Parameters) -> Iterator[None]:
    """Put the gradients of all parameters but ``inputs`` back as they were.

    The graph has the gathered weights in it and not the shards, so torch cannot be told to leave some out.
    """
    if inputs is None:
        yield
        return
    wanted = {id(one) for one in inputs}
    others = [(one, one.grad) for one in parameters() if id(one) not in wanted]
    for one, _ in others:
        one.grad = None
    try:
        yield
    finally:
        for one, gradient in others:
            one.grad = gradient
