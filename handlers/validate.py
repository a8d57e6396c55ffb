"""Run an evaluation inside a training run, and record its metrics there."""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Number
from typing import Any, Protocol

import torch
from ignite.engine.events import EventsList

from ..engine import DataError, Engine, EventError, EventLike, Events, HandlerError, StateView
from ._attachable import Attachable, Subscription
from ._monitor import require_number

__all__ = ["Validate"]

logger = logging.getLogger("pellucid.handlers")


class Weights(Protocol):
    """Other weights for a model, such as :class:`EMA`'s averages."""

    def applied(self, model: Any) -> AbstractContextManager[None]:
        """Have them in ``model``, in place, and its own put back on leaving."""


class Validate(Attachable):
    """Run ``evaluator`` over ``data`` at an event of the engine it is attached to, and record its metrics there.

    The evaluation is an inner run: it changes nothing of the outer one. Its metrics are recorded in one
    ``engine.record``, at the outer run's iteration, under ``prefix`` + name, without waiting for the device. An
    evaluation that did not complete (it terminated, say) records nothing and says so; its errors go through.

    Args:
        evaluator: an engine of ``mode="eval"``.
        data: an iterable, or a callable ``state -> iterable``, as in ``Engine.run``.
        every: the event to evaluate at: plain, filtered (``Events.EPOCH_COMPLETED(every=5)``), or several with ``|``.
        prefix: put before each metric's name.
        epoch_length: the number of batches of one evaluation. None: all of ``data``.
        weights: an :class:`EMA`, to evaluate with its averaged weights; the model's own are put back to the bit.

    Raises:
        HandlerError: ``evaluator`` is no evaluation engine.
        DataError: ``data`` cannot be gone through again and again.
        EventError: ``every`` is ``METRICS_RECORDED``, which this handler makes happen.

    Example:
        >>> Validate(evaluator, val_loader, every=Events.EPOCH_COMPLETED, prefix="val/").attach(trainer)
    """

    def __init__(
        self,
        evaluator: Engine,
        data: Iterable[Any] | Callable[[StateView], Iterable[Any]],
        *,
        every: EventLike = Events.EPOCH_COMPLETED,
        prefix: str = "val/",
        epoch_length: int | None = None,
        weights: Weights | None = None,
    ) -> None:
        _check_evaluator(evaluator)
        _check_data(data, epoch_length)
        _check_event(every)
        if not isinstance(prefix, str):
            raise TypeError(f"prefix={prefix!r}: a string was wanted, such as 'val/'")
        if epoch_length is not None:
            require_number("epoch_length", epoch_length, least=1, whole=True)
        if weights is not None and not hasattr(weights, "applied"):
            raise TypeError(f"weights={weights!r}: an EMA was wanted")
        self.evaluator = evaluator
        self._data = data
        self._every = every
        self._prefix = prefix
        self._epoch_length = epoch_length
        self._weights = weights
        self._records: tuple[str, ...] = (glob.escape(prefix) + "*",)

    @property
    def records(self) -> tuple[str, ...]:
        """The names it records: those of the last evaluation, before the first one a pattern such as ``"val/*"``."""
        return self._records

    def attach(self, engine: Engine) -> Validate:
        """Evaluate at the events of ``engine`` from now on, and return the handler itself.

        Raises:
            HandlerError: ``engine`` is the evaluator, or has this handler already.
            EventError: ``engine`` has no such event.
        """
        if engine is self.evaluator:
            raise HandlerError("Validate cannot be attached to its own evaluator: attach it to the engine that trains")
        return super().attach(engine)

    def subscriptions(self) -> Sequence[Subscription]:
        return ((self._every, self._evaluate),)

    def _evaluate(self, engine: Engine, batch: Any) -> None:
        with nullcontext() if self._weights is None else self._weights.applied(self.evaluator.model):
            result = self.evaluator.run(self._data, epoch_length=self._epoch_length)
        if result.stop_reason != "completed":
            logger.warning("%r: the evaluation was %s, so nothing of it is recorded", self, result.stop_reason)
            return
        values = self.evaluator.state.metrics.raw()
        metrics = {self._prefix + name: value for name, value in values.items() if _can_be_recorded(value)}
        self._records = tuple(metrics)
        if metrics:
            engine.record(metrics)

    def __repr__(self) -> str:
        """Show when it evaluates, and under which prefix."""
        return f"Validate(every={self._every!r}, prefix={self._prefix!r})"


def _can_be_recorded(value: Any) -> bool:
    # an Ignite metric may also compute a mapping or a text, which is no number to follow
    return isinstance(value, Number | torch.Tensor) or hasattr(value, "__array__")


def _check_evaluator(evaluator: Engine) -> None:
    if not isinstance(evaluator, Engine):
        raise HandlerError(f"evaluator: an Engine was wanted, got {evaluator!r}")
    if evaluator.state.mode != "eval":
        raise HandlerError(
            f"evaluator: an Engine(..., mode='eval') was wanted, got one of mode {evaluator.state.mode!r}, whose runs "
            f"would train"
        )


def _check_data(data: Any, epoch_length: int | None) -> None:
    if not isinstance(data, Iterable) and not callable(data):
        raise DataError(f"data: an iterable or a callable state -> iterable was wanted, got {data!r}")
    if isinstance(data, Iterator) and epoch_length is None:
        raise DataError(
            f"data: {type(data).__name__} can be gone through only once: every later evaluation would find it empty. "
            f"Give the iterable itself, or a callable that makes a new one: lambda state: ..."
        )


def _check_event(every: EventLike) -> None:
    events = every if isinstance(every, EventsList) else (every,)
    if any(event == Events.METRICS_RECORDED for event in events):
        raise EventError("every=METRICS_RECORDED: each evaluation records metrics, which would start the next one")
