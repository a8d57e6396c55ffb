"""Precision: in what type the forward runs, and how gradients get from a scaled loss to a real update.

``"32-true"`` computes in the model's own type. ``"bf16-mixed"`` and ``"16-mixed"`` run the forward under autocast, with
weights kept in full; ``"16-mixed"`` scales the loss so that small gradients do not vanish, and skips an update whose
gradients overflow (`Micikevicius et al., 2018 <https://arxiv.org/abs/1710.03740>`_). ``"bf16-true"`` casts the model
and its batches to bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import StrategyError

__all__ = ["PRECISIONS", "LossScaler", "Stepper", "autocast_region", "full_name", "make_stepper", "model_dtype"]

_SHORT = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_NOTHING = nullcontext()


def full_name(precision: str) -> str:
    """Return the full name of a precision.

    Raises:
        StrategyError: there is no such precision.
    """
    name = _SHORT.get(precision, precision) if isinstance(precision, str) else precision
    if name not in PRECISIONS:
        known = ", ".join(map(repr, (*PRECISIONS, *_SHORT)))
        raise StrategyError(f"precision={precision!r} does not exist: give one of {known}")
    return name


def autocast_region(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the region of the forward pass."""
    dtype = _AUTOCAST.get(precision)
    return _NOTHING if dtype is None else torch.autocast(device.type, dtype)


def model_dtype(precision: str) -> torch.dtype | None:
    """Return the type that the model and its batches are cast to, None to leave them as they are."""
    return torch.bfloat16 if precision == "bf16-true" else None


def make_stepper(precision: str, device: torch.device, scaler: Mapping[str, Any] | None = None) -> Stepper:
    """Return what steps the optimizers of one engine; ``scaler`` are options of torch's ``GradScaler``."""
    return LossScaler(device, **dict(scaler or {})) if precision == "16-mixed" else Stepper()


class Stepper:
    """Backward and optimizer steps of one engine, as they are without scaling. Nothing here waits for the device."""

    scales: bool = False

    def backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        """Add the gradient of ``loss``, to the ``inputs`` only if they are given."""
        loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring the gradients to their true scale; to be called once before a step."""

    def step(self, optimizer: Optimizer) -> None:
        """Step, or skip the step if a gradient has overflowed."""
        optimizer.step()

    def finish(self) -> None:
        """End a window, after all its optimizers have been stepped."""

    def forget(self) -> None:
        """Forget what was noted of gradients that are dropped, as if they had never been."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved."""


class LossScaler(Stepper):
    """Scales the loss and skips updates whose gradients overflow, by torch's ``GradScaler``.

    ``step`` waits for the device: whether the update is made depends on the gradients.
    """

    scales = True

    def __init__(self, device: torch.device, **options: Any) -> None:
        """Make a scaler for a device with ``GradScaler``'s options."""
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type, **options)
        self._skips = False

    def backward(self, loss: Tensor, inputs: list[Tensor] | None) -> None:
        """Add the gradient of the scaled loss."""
        self._scaler.scale(loss).backward(inputs=inputs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and note an overflow."""
        self._scaler.unscale_(optimizer)
        # a fused optimizer would be called, and skip inside: the step could not be told from a real one. Asked before
        # anybody has clipped the gradients, as GradScaler does
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._skips = is_fused and not _all_finite(optimizer)  # waits for the device

    def step(self, optimizer: Optimizer) -> None:
        """Step unless a gradient has overflowed."""
        if not self._skips:
            self._scaler.step(optimizer)

    def finish(self) -> None:
        """Adapt the scale to whether anything has overflowed."""
        self._scaler.update()

    def forget(self) -> None:
        """Forget which gradients have been unscaled, and what has overflowed. Waits for the device."""
        self._scaler.update(self.scale())

    def scale(self) -> float:
        """Return the present scale. Waits for the device."""
        return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its growth counter."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the scale and its growth counter."""
        self._scaler.load_state_dict(dict(state))
        self._scaler.scale(torch.zeros((), device=self._device))  # it makes its tensors when it first scales something


def _all_finite(optimizer: Optimizer) -> bool:
    flags: dict[torch.device, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                flags.setdefault(parameter.device, []).append(torch.isfinite(parameter.grad).all())
    return all(bool(torch.stack(on_one).all()) for on_one in flags.values())  # waits once for each device
