"""Pictures of what a model makes of some samples, again and again while it trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import DataError, Engine, EventLike, Events, StateView, Step, supervised_evaluation_step
from ._attachable import Attachable, Subscription
from ._monitor import require_number
from ._pictures import PicturePath, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SamplePredictions"]

logger = logging.getLogger("pellucid.handlers")

Data = Iterable[Any] | Callable[[StateView], Iterable[Any]] | Mapping[str, Any] | Tensor


class SamplePredictions(Attachable):
    """Draw some images with the labels predicted for them and the true ones, at an event.

    The prediction is an inner run in evaluation mode, so the run around it is the same to the bit with and without it.
    Every rank must come to the event; rank 0 draws, and it alone reads from the device. Images from 0 to 1 are shown as
    they are, bytes too, and others each over its own range.

    Args:
        data: one batch, or an iterable of batches (a callable ``state -> iterable`` too), whose first is taken each
            time: a loader that shuffles shows other samples each time.
        step: called as ``step(engine, batch)``; returns ``(y_pred, y)``, ``{"y_pred": ..., "y": ...}``, or the
            predictions alone: scores of shape (N, C), or classes as whole numbers of shape (N,). None: for batches
            ``(x, y)``, the model of ``x``.
        images: a function of the batch that returns the images: shape (N, C, H, W) with 1, 3 or 4 channels, or
            (N, H, W). None: the first tensor in the batch.
        classes: their names. None: numbers.
        every: the event.
        samples: how many are shown, at most.
        columns: how many stand side by side. None: as fits.
        path: where to save each picture; ``{epoch}``, ``{iteration}`` and ``{updates}`` in it are filled in. Without
            one of them there is one file, of the newest.
        callback: called as ``callback(engine, figure)`` with each picture, on rank 0.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> pictures = SamplePredictions(val_loader, images=lambda batch: batch[0].view(-1, 2, 4)).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> pictures.figure.get_suptitle()
        'epoch 1, iteration 10: ... of 4 right'
    """

    def __init__(
        self,
        data: Data,
        *,
        step: Step | None = None,
        images: Callable[[Any], Tensor] | None = None,
        classes: Sequence[str] | None = None,
        every: EventLike = Events.EPOCH_COMPLETED,
        samples: int = 16,
        columns: int | None = None,
        path: str | os.PathLike[str] | None = None,
        callback: Callable[[Engine, Figure], Any] | None = None,
    ) -> None:
        require_matplotlib("SamplePredictions")
        for argument, given in (("step", step), ("images", images), ("callback", callback)):
            if given is not None and not callable(given):
                raise TypeError(f"{argument}={given!r}: a function was wanted")
        self._data = _check_data(data)
        self._step = supervised_evaluation_step if step is None else step
        self._images = images or _first_tensor
        self._classes = None if classes is None else _check_classes(classes)
        self._every = every
        self._samples: int = require_number("samples", samples, least=1, whole=True)
        if columns is not None:
            require_number("columns", columns, least=1, whole=True)
        self._columns = columns
        self._path = None if path is None else PicturePath(path)
        self._callback = callback
        self._figure: Figure | None = None

    @property
    def figure(self) -> Figure | None:
        """The newest picture; None before the first, and on other ranks than 0. pyplot does not know of it."""
        return self._figure

    def subscriptions(self) -> Sequence[Subscription]:
        return ((self._every, self._look),)

    def _look(self, engine: Engine, batch: Any) -> None:
        inner = engine.fork(self._step, name=f"{engine.name}/samples")
        taken = _Taken(self._images, self._samples)
        if engine.state.rank == 0:
            inner.add_event_handler(Events.ITERATION_COMPLETED, taken.take)
        result = inner.run(self._data, limit_batches=1)
        if engine.state.rank != 0:
            return
        if taken.images is None or taken.predicted is None:
            logger.warning("%r: the prediction was %s, so there is no picture of it", self, result.stop_reason)
            return
        self._figure = self._draw(engine.state, taken.images, taken.predicted, taken.true)
        if self._path is not None:
            self._path.save(self._figure, engine.state)
        if self._callback is not None:
            self._callback(engine, self._figure)

    def _draw(self, state: StateView, images: Tensor, predicted: Tensor, true: Tensor | None) -> Figure:
        from ._sample_grid import draw_samples, shown_image

        title = f"epoch {state.epoch}, iteration {state.iteration}"
        if true is not None:
            title += f": {int((predicted == true).sum())} of {len(true)} right"
        return draw_samples(
            [shown_image(image) for image in images.numpy()],
            self._labels(predicted),
            None if true is None else self._labels(true),
            columns=self._columns,
            title=title,
        )

    def _labels(self, numbers: Tensor) -> list[str]:
        classes = self._classes
        if classes is None:
            return [str(number) for number in numbers.tolist()]
        for number in numbers.tolist():
            if not 0 <= number < len(classes):
                raise DataError(f"classes= names {len(classes)} classes, and there is a class {number}: name them all")
        return [classes[number] for number in numbers.tolist()]

    def __repr__(self) -> str:
        """Show when it draws, and where to."""
        path = "" if self._path is None else f", path={self._path.pattern!r}"
        return f"SamplePredictions(every={self._every!r}{path})"


class _Taken:
    """Takes the samples of a batch to the host when its prediction is there."""

    def __init__(self, images: Callable[[Any], Tensor], samples: int) -> None:
        self._images_of = images
        self._samples = samples
        self.images: Tensor | None = None
        self.predicted: Tensor | None = None
        self.true: Tensor | None = None

    def take(self, engine: Engine, batch: Any) -> None:
        predicted, true = _pair(engine.state.output)
        images = _check_images(self._images_of(batch))
        for what, tensor in (("predictions", predicted), ("true labels", true)):
            if tensor is not None and len(tensor) != len(images):
                raise DataError(f"{len(images)} images and {len(tensor)} {what}: as many were wanted")
        self.images = _some(images, self._samples)  # these wait for the device
        self.predicted = _classes_of(_some(predicted, self._samples), "predictions")
        self.true = None if true is None else _classes_of(_some(true, self._samples), "true labels")


def _some(tensor: Tensor, samples: int) -> Tensor:
    host = tensor[:samples].detach().cpu()
    return host.float() if host.dtype == torch.bfloat16 else host.clone()


def _pair(output: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(output, Mapping):
        output = (output.get("y_pred"), output.get("y"))
    predicted, true = (*output, None)[:2] if isinstance(output, tuple | list) and output else (output, None)
    for tensor, may_be_none in ((predicted, False), (true, True)):
        if not (isinstance(tensor, Tensor) and tensor.dim()) and not (may_be_none and tensor is None):
            raise DataError(
                f"SamplePredictions(step=...): (y_pred, y), {{'y_pred': ..., 'y': ...}} or predictions alone were "
                f"wanted, tensors whose first dimension is the samples; there was a {type(tensor).__name__}"
            )
    return predicted, true


def _classes_of(tensor: Tensor, what: str) -> Tensor:
    is_whole = not tensor.is_floating_point() and not tensor.is_complex()
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        return tensor.argmax(1)
    if is_whole and tensor.numel() == len(tensor):
        return tensor.reshape(-1).long()
    raise DataError(
        f"{what} of shape {tuple(tensor.shape)} and {tensor.dtype}: scores of shape (N, C) were wanted, or classes as "
        "whole numbers of shape (N,). Let step= return the classes, such as (scores > 0).long()"
    )


def _check_images(images: Any) -> Tensor:
    shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or not (len(shape) == 3 or (len(shape) == 4 and shape[1] in (1, 3, 4))):
        raise DataError(
            f"images of shape {shape}: (N, C, H, W) with 1, 3 or 4 channels, or (N, H, W) was wanted. "
            "SamplePredictions(images=...), a function of the batch, makes them, such as batch[0].permute(0, 3, 1, 2)"
        )
    return _bytes_to_unit(images)


def _bytes_to_unit(images: Tensor) -> Tensor:
    return images / 255 if images.dtype == torch.uint8 else images


def _first_tensor(batch: Any) -> Any:
    found = next(_tensors(batch), None)
    return batch if found is None else found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def _check_data(data: Any) -> Any:
    """Return what an engine runs over.

    Raises:
        DataError: it is neither a batch nor can it be gone through again and again.
    """
    is_batch = isinstance(data, Tensor | Mapping) or (
        isinstance(data, tuple | list) and bool(data) and isinstance(data[0], Tensor)
    )
    if is_batch:
        return [data]
    if isinstance(data, Iterator) or not (isinstance(data, Iterable) or callable(data)):
        raise DataError(
            f"data={data!r}: a batch, such as (images, labels), or an iterable of batches was wanted that can be gone "
            "through again and again"
        )
    return data


def _check_classes(classes: Any) -> tuple[str, ...]:
    if (
        isinstance(classes, str)
        or not isinstance(classes, Sequence)
        or not all(isinstance(one, str) for one in classes)
    ):
        raise TypeError(f"classes={classes!r}: a sequence of names was wanted, such as ['cat', 'dog']")
    return tuple(classes)
