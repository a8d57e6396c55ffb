"""One process, one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .placed import Placed

__all__ = ["SingleDevice"]


class SingleDevice(Placed):
    """Runs the model in this process, on one device.

    Args:
        device: such as ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or an index of the accelerator. None: where the first model
            prepared already is, if that is no CPU; else the accelerator of this machine; else the CPU. A model that
            its owner has spread over several devices is then left so, and batches go to its first parameter's device.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, or short ``"fp32"``, ``"bf16"``,
            ``"fp16"``; see :mod:`pellucid.engine.strategies.precision`.
        compile: compile each module in place (``module.compile()``); a mapping gives the options of ``torch.compile``.
            Names of parameters stay as they are.
        scaler: options of torch's ``GradScaler`` for ``"16-mixed"``, such as ``{"init_scale": 1024.0}``.

    Raises:
        StrategyError: there is no such device or precision, or ``scaler`` goes with another precision.
    """

    name: ClassVar[str] = "single"

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        *,
        precision: str = "32-true",
        compile: bool | Mapping[str, Any] = False,
        scaler: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, precision, compile, scaler)
