"""Keep gradients from growing too large, and record how large they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_

from ..engine import Engine, Events
from ._attachable import Attachable, Subscription
from ._monitor import require_number, require_positive
from ._optimizers import is_nth_update, metric_name, metric_patterns, optimizers_of, parameters_of, the_updating

__all__ = ["GradientClip"]


class GradientClip(Attachable):
    """Clip the gradients of each update, all parameters of the optimizer taken together.

    It acts at ``UPDATE_STARTED``, where the gradients are whole (the window's mean) and unscaled, and does not wait
    for the device: the norm is recorded as a tensor, read when somebody asks for the number. It is the norm before
    clipping; that of an update which the loss scale skips is inf or NaN.

    Args:
        max_norm: scale all gradients down together so that their norm is at most this (`Pascanu et al., 2013
            <https://arxiv.org/abs/1211.5063>`_). ``math.inf`` measures only.
        max_value: cut each entry off at ± this instead.
        norm_type: the p of the norm; ``math.inf`` for the largest entry.
        record: the name to record the norm under. Where the engine has a mapping of optimizers, their names come
            before it: ``"generator/gradient_norm"``. None: nothing is recorded.
        record_every: record at every n-th update only.
        optimizer: act only on the updates of the optimizer of this name.

    Raises:
        TypeError: not exactly one of ``max_norm`` and ``max_value`` is given.

    Example:
        >>> GradientClip(max_norm=1.0).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> norm = result.metrics["gradient_norm"]
    """

    def __init__(
        self,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        norm_type: float = 2.0,
        record: str | None = "gradient_norm",
        record_every: int = 1,
        optimizer: str | None = None,
    ) -> None:
        if (max_norm is None) == (max_value is None):
            raise TypeError(f"max_norm={max_norm!r}, max_value={max_value!r}: exactly one of them was wanted")
        self._max_norm = None if max_norm is None else require_positive("max_norm", max_norm)
        self._max_value = None if max_value is None else require_positive("max_value", max_value)
        self._norm_type = require_positive("norm_type", norm_type)
        self._record = record
        self._record_every: int = require_number("record_every", record_every, least=1, whole=True)
        self._only = optimizer

    @property
    def records(self) -> tuple[str, ...]:
        """The names it records, as patterns."""
        return () if self._record is None else metric_patterns(self._record)

    def attach(self, engine: Engine) -> GradientClip:
        """Clip the gradients of ``engine``'s updates from now on, and return the handler itself.

        Raises:
            HandlerError: the engine has no such optimizer, or has this handler already.
        """
        optimizers_of(engine, self._only)
        return super().attach(engine)

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.UPDATE_STARTED, self._clip),)

    def _clip(self, engine: Engine, batch: Any) -> None:
        if self._only is not None and engine.state.updating != self._only:
            return
        parameters = parameters_of(the_updating(engine))
        is_due = self._record is not None and is_nth_update(engine, self._record_every)
        norm: Tensor | None = None
        if self._max_norm is not None:
            norm = engine.strategy.clip_gradients(parameters, self._max_norm, self._norm_type)
        elif is_due:
            norm = engine.strategy.clip_gradients(parameters, None, self._norm_type)
        if self._max_value is not None:
            clip_grad_value_(parameters, self._max_value)
        if is_due:
            engine.record({metric_name(engine, engine.state.updating, str(self._record)): norm})

    def __repr__(self) -> str:
        """Show the limit."""
        limit = f"max_value={self._max_value}" if self._max_norm is None else f"max_norm={self._max_norm}"
        return f"GradientClip({limit})"
