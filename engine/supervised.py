"""Ready-made steps and engines for the usual case: a batch is ``(x, y)``, the loss is ``loss_fn(model(x), y)``.

The steps are public, to be used in an ``Engine`` of one's own or as a model for other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch import Tensor, nn

from .engine import Engine, Step
from .errors import DataError, HandlerError

__all__ = [
    "create_supervised_evaluator",
    "create_supervised_trainer",
    "supervised_evaluation_step",
    "supervised_training_step",
]

LossFunction = Callable[[Any, Any], Tensor]


def supervised_training_step(loss_fn: LossFunction) -> Step:
    """Return a step that makes one update from a batch ``(x, y)`` and returns ``{"loss", "y_pred", "y"}``.

    Raises:
        HandlerError: ``loss_fn`` cannot be called, or is a class.
    """
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise HandlerError(
            f"loss_fn is called as loss_fn(y_pred, y), such as F.cross_entropy or nn.MSELoss(), got {loss_fn!r}"
        )

    def train_step(engine: Engine, batch: Any) -> dict[str, Any]:
        x, y = _pair(batch)
        with engine.autocast():
            y_pred = engine.model(x)
            loss = loss_fn(y_pred, y)
        engine.backward(loss)
        engine.update()
        return {"loss": loss, "y_pred": y_pred, "y": y}

    return train_step


def supervised_evaluation_step(engine: Engine, batch: Any) -> tuple[Any, Any]:
    """Return ``(model(x), y)`` for a batch ``(x, y)``: what Ignite's and torchmetrics' metrics take."""
    x, y = _pair(batch)
    with engine.autocast():
        return engine.model(x), y


def create_supervised_trainer(
    model: nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    **options: Any,
) -> Engine:
    """Return a training engine for batches ``(x, y)``; its output is ``{"loss", "y_pred", "y"}``.

    Args:
        model: the module.
        optimizer: an optimizer, or a factory ``params -> optimizer``.
        loss_fn: called as ``loss_fn(y_pred, y)``; a scalar tensor.
        options: further arguments of :class:`Engine`.
    """
    return Engine(supervised_training_step(loss_fn), model, optimizer=optimizer, **options)


def create_supervised_evaluator(model: nn.Module, metrics: Mapping[str, Any] | None = None, **options: Any) -> Engine:
    """Return an evaluation engine for batches ``(x, y)``; its output is ``(y_pred, y)``.

    Args:
        model: the module.
        metrics: name -> Ignite or torchmetrics metric.
        options: further arguments of :class:`Engine`.
    """
    return Engine(supervised_evaluation_step, model, mode="eval", metrics=metrics, **options)


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = "" if isinstance(batch, Tensor) or not isinstance(batch, Sized) else f" of {len(batch)}"
        raise DataError(
            f"the supervised steps take batches (x, y), got a {type(batch).__name__}{size}: write a step of your own "
            "for others"
        )
    x, y = batch
    return x, y
