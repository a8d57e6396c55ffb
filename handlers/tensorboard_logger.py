"""Write recorded metrics, outputs, weights and images for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import Engine, EventLike
from ._attachable import Subscription
from ._logger import Counts, Logger
from ._optional import import_optional
from ._output import Output
from ._tracking import check_hparams

__all__ = ["TensorBoardLogger"]

_FLUSH_SEC = 10


class TensorBoardLogger(Logger):
    """Write every recorded metric, and values of the training step's output, as scalars for TensorBoard.

    Everything is written at the iteration of the outermost training, so that an evaluation's point stands where the
    training stood, and one on its own stands where the last training ended. Only rank 0 writes. The files are closed
    however a run is left; the next run adds one, as TensorBoard expects.

    Args:
        directory: what ``tensorboard --logdir`` is given, or a folder in it.
        output: values of the training step's output: a name, several, or a function of the output that returns names
            and numbers. Names are keys if the output is a mapping, places if it is a tuple of as many values.
        every: write the output at every n-th iteration, which waits for the device.
        prefix: stands before the names of output values. None: the engine's name, as in ``train/loss``.
        histograms: when to write histograms of all weights and gradients, such as
            ``Events.UPDATE_STARTED(every=1000)``: later in an iteration gradients may be gone. A collective in sharding
            strategies. Waits for the device.
        hparams: names and values shown in the tab of hyper-parameters.

    Raises:
        ImportError: tensorboard is not installed.

    Example:
        >>> log = TensorBoardLogger("runs/digits", output="loss", every=10).attach(trainer)
        >>> @trainer.on(Events.EPOCH_COMPLETED)
        ... def show(engine, batch):
        ...     log.add_text(engine, "note", f"epoch {engine.state.epoch} is done")
        >>> result = trainer.run(loader, max_epochs=2)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        output: Output = None,
        every: int = 100,
        prefix: str | None = None,
        histograms: EventLike | None = None,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(output=output, every=every, prefix=prefix)
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise TypeError(f"directory={directory!r}: the path of a folder was wanted, such as 'runs/digits'")
        self._directory = Path(directory)
        self._histograms = histograms
        self._hparams = check_hparams(hparams)
        self._make_writer = import_optional(
            "torch.utils.tensorboard", user="TensorBoardLogger", extra="tensorboard"
        ).SummaryWriter
        self._writer: Any = None
        self._has_hparams = False

    @property
    def writer(self) -> Any:
        """The ``torch.utils.tensorboard.SummaryWriter``; None while nothing is written, and on other ranks."""
        return self._writer

    def _more_subscriptions(self) -> Sequence[Subscription]:
        return () if self._histograms is None else ((self._histograms, self._log_histograms),)

    # ------------------------------------------------------------------ what users write themselves

    def add_text(self, engine: Engine, name: str, text: str) -> None:
        """Write a text (Markdown) where ``engine``'s outermost training stands."""
        if engine.state.rank == 0:
            counts = self._ready(engine)
            self._writer.add_text(name, text, counts.iteration)

    def add_image(self, engine: Engine, name: str, image: Any, *, dataformats: str = "CHW") -> None:
        """Write an image where ``engine``'s outermost training stands. Waits for the device.

        Args:
            engine: the one whose handler calls this.
            name: what it is shown as.
            image: shape (3, height, width): uint8, or floats between 0 and 1.
            dataformats: another order of its axes, such as ``"HWC"`` or ``"HW"``; with an N several are put together.
        """
        if engine.state.rank == 0:
            counts = self._ready(engine)
            add = self._writer.add_images if "N" in dataformats else self._writer.add_image
            add(name, _on_host(image), counts.iteration, dataformats=dataformats)

    def add_figure(self, engine: Engine, name: str, figure: Any) -> None:
        """Write a matplotlib figure as an image, and leave it open."""
        if engine.state.rank == 0:
            counts = self._ready(engine)
            self._writer.add_figure(name, figure, counts.iteration, close=False)

    def add_histogram(self, engine: Engine, name: str, values: Any) -> None:
        """Write the distribution of a tensor's finite values. Waits for the device."""
        if engine.state.rank == 0:
            self._add_histogram(self._ready(engine), name, torch.as_tensor(values))

    def _add_histogram(self, counts: Counts, name: str, values: Tensor) -> None:
        values = values.detach().float().cpu()  # waits for the device
        finite = values[values.isfinite()]
        if finite.numel() < values.numel():
            self._tell_once(name, f"{name!r} has values that are not finite, which its histogram leaves out")
        if finite.numel():
            self._writer.add_histogram(name, finite, counts.iteration)

    def _log_histograms(self, engine: Engine, batch: Any) -> None:
        parameters = list(_parameters(engine.model))
        weights = {f"weights/{name}": one.detach() for name, one in parameters}
        gradients = {f"gradients/{name}": one.grad for name, one in parameters if one.grad is not None}
        values = engine.strategy.whole({**weights, **gradients})
        if engine.state.rank != 0:
            return
        counts = self._ready(engine)
        for name, value in values.items():
            self._add_histogram(counts, name, value)

    # ------------------------------------------------------------------ the back end

    def _open(self, engine: Engine, is_training: bool) -> None:
        # what an earlier process wrote beyond the checkpoint is hidden, as it comes again
        purge = self._counts.iteration + 1 if self._goes_on and self._counts.iteration else None
        self._writer = self._make_writer(str(self._directory), purge_step=purge, flush_secs=_FLUSH_SEC)
        if self._hparams and not self._has_hparams:
            self._has_hparams = True
            self._writer.add_hparams(self._hparams, {}, run_name=".")

    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, counts.iteration)

    def _flush(self) -> None:
        self._writer.flush()

    def _close(self, ending: str) -> None:
        writer, self._writer = self._writer, None
        writer.close()

    def __repr__(self) -> str:
        """Show where it writes, and what."""
        return f"TensorBoardLogger({str(self._directory)!r}, {self._shown()})"


def _parameters(model: Any) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(model, Mapping):
        for part, module in model.items():
            yield from ((f"{part}/{name}", one) for name, one in module.named_parameters())
    elif model is not None:
        yield from model.named_parameters()


def _on_host(image: Any) -> Any:
    return image.detach().cpu() if isinstance(image, Tensor) else image  # waits for the device
