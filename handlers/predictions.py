"""What an evaluation gives for every sample, in the order of the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..engine import Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._monitor import require_number

__all__ = ["Predictions", "SavedPredictions"]

_INDEX, _FORMAT = "index.json", 1
_ALONE = "predictions"  # the name of what is no mapping and no tuple


class Predictions(Attachable):
    """Keep what the step of an evaluation returns: each sample once, in the order of the data, from all ranks.

    The step returns a tensor whose first dimension is the samples, or a tuple or mapping of such. Each batch is brought
    to the host as it comes, which waits for the device. After a run that has completed all ranks have the whole; one
    that was stopped or has failed leaves nothing, and the next begins afresh.

    With a ``directory`` nothing is kept in memory beyond ``chunk_samples``: every rank writes files of its own batches
    there (all must see it), and ``result`` reads them batch by batch, in order.

    Args:
        transform: what of the step's output is kept; None: all of it.
        directory: where to write.
        chunk_samples: how many samples, at least, go into one file.

    Example:
        >>> predictions = Predictions(lambda output: output[0].argmax(1)).attach(evaluator)
        >>> evaluator.run(val_loader)
        >>> predictions.result.shape
        torch.Size([200])
    """

    def __init__(
        self,
        transform: Callable[[Any], Any] | None = None,
        *,
        directory: str | Path | None = None,
        chunk_samples: int = 10_000,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform={transform!r}: a function of the step's output was wanted")
        self._transform = transform
        self._directory = None if directory is None else Path(directory)
        self._chunk_samples: int = require_number("chunk_samples", chunk_samples, least=1, whole=True)
        self._kept: list[Any] = []  # of this run: batches, or where each is in which file
        self._chunk: _Chunk | None = None
        self._result: Any = None

    @property
    def result(self) -> Any:
        """What was kept of the last run: tensors on the CPU, or :class:`SavedPredictions` with a directory.

        Raises:
            HandlerError: no run has completed since it was attached, or since the last was begun.
        """
        if self._result is None:
            raise HandlerError(
                "Predictions: no evaluation has completed yet, or the last one did not: run it to its end"
            )
        return self._result

    def attach(self, engine: Engine) -> Predictions:
        """Listen to an evaluation engine, and return the handler itself.

        Raises:
            HandlerError: an engine that trains.
        """
        if isinstance(engine, Engine) and engine.state.mode != "eval":
            raise HandlerError(
                "Predictions attaches to an evaluation engine, Engine(..., mode='eval'): a training sees a sample in "
                "every epoch, and with another model each time"
            )
        return super().attach(engine)

    def _subscriptions(self) -> Sequence[Subscription]:
        return (
            (Events.STARTED, self._begin),
            (Events.ITERATION_COMPLETED, self._keep),
            (Events.COMPLETED, self._finish),
            (Events.TERMINATE | Events.INTERRUPT | Events.EXCEPTION_RAISED, self._drop),
        )

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._drop(engine, batch)
        self._result = None
        if self._directory is None:
            return
        if engine.state.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            for old in (self._directory / _INDEX, *self._directory.glob("part-*.safetensors")):
                old.unlink(missing_ok=True)
        engine.strategy.barrier()
        self._chunk = _Chunk(self._directory, engine.state.rank)

    def _keep(self, engine: Engine, batch: Any) -> None:
        output = engine.state.output
        kept = _on_host(output if self._transform is None else self._transform(output))  # waits for the device
        if self._chunk is None:
            self._kept.append(kept)
            return
        self._kept.append(self._chunk.add(kept))
        if self._chunk.samples >= self._chunk_samples:
            self._chunk.write()

    def _finish(self, engine: Engine, batch: Any) -> None:
        if engine.state.stop_reason not in (None, "completed"):
            return
        if self._chunk is not None:
            self._chunk.write()
        batches = engine.strategy.gather_batches(self._kept)
        self._drop(engine, batch)
        if self._directory is None:
            self._result = _joined(batches)
            return
        if engine.state.rank == 0:
            _write_index(self._directory / _INDEX, batches)
        engine.strategy.barrier()
        self._result = SavedPredictions(self._directory)

    def _drop(self, engine: Engine, batch: Any) -> None:
        self._kept, self._chunk = [], None

    def __repr__(self) -> str:
        """Show where they are kept."""
        return f"Predictions({'in memory' if self._directory is None else repr(str(self._directory))})"


class SavedPredictions:
    """Predictions in a directory, read one batch at a time: ``for batch in saved``. ``len()`` counts samples.

    Args:
        directory: where :class:`Predictions` has written them.

    Raises:
        HandlerError: there are none, or they are not complete.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            index = json.loads((self.directory / _INDEX).read_text())
        except (OSError, ValueError) as error:
            raise HandlerError(
                f"{self.directory} has no predictions of an evaluation that was run to its end ({error})"
            ) from error
        if index.get("format") != _FORMAT:
            raise HandlerError(f"{self.directory} has format {index.get('format')!r}, and this version reads {_FORMAT}")
        self._kind: str = index["kind"]
        self._batches: list[tuple[str, int, int]] = [(Path(file).name, a, b) for file, a, b in index["batches"]]

    def __len__(self) -> int:
        return sum(stop - start for _, start, stop in self._batches)

    def __iter__(self) -> Iterator[Any]:
        opened = ""
        file: Any = None
        for name, start, stop in self._batches:
            if name != opened:
                opened, file = name, safe_open(str(self.directory / name), framework="pt")
            names: list[str] = file.keys()
            yield _rebuilt(self._kind, {one: file.get_slice(one)[start:stop] for one in names})

    def load(self) -> Any:
        """Return all of them in memory."""
        return _joined(list(self))

    def __repr__(self) -> str:
        """Show where they are and how many."""
        return f"SavedPredictions({str(self.directory)!r}, {len(self)} samples)"


class _Chunk:
    """The file that is being filled on this rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._number = 0
        self._batches: list[Any] = []
        self.samples = 0

    def add(self, kept: Any) -> tuple[str, str, int, int]:
        """Add a batch; return its kind, and where it will be: file, first sample, end."""
        start = self.samples
        self._batches.append(kept)
        self.samples += len(_named(kept)[next(iter(_named(kept)))])
        return _kind(kept), f"part-{self._rank:03}-{self._number:05}.safetensors", start, self.samples

    def write(self) -> None:
        if self._batches:
            file = self._directory / f"part-{self._rank:03}-{self._number:05}.safetensors"
            save_file({name: one.contiguous() for name, one in _named(_joined(self._batches)).items()}, file)
            self._number += 1
        self._batches, self.samples = [], 0


def _write_index(path: Path, batches: Sequence[tuple[str, str, int, int]]) -> None:
    index = {"format": _FORMAT, "kind": batches[0][0], "batches": [where for _, *where in batches]}
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(index))
    beside.replace(path)


def _on_host(kept: Any) -> Any:
    """Return what is kept of a batch on the CPU.

    Raises:
        HandlerError: it is not made of tensors with as many samples each.
    """
    named = _named(kept)
    lengths = {one.shape[0] if isinstance(one, Tensor) and one.dim() else None for one in named.values()}
    if len(lengths) != 1 or None in lengths:
        shapes = {
            name: list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for name, one in named.items()
        }
        raise HandlerError(
            "Predictions: a tensor whose first dimension is the samples was wanted, or a tuple or mapping of such, all "
            f"of one length, got {shapes}: choose what is kept with transform="
        )
    return _rebuilt(_kind(kept), {name: one.detach().to("cpu", copy=True) for name, one in named.items()})


def _kind(kept: Any) -> str:
    if isinstance(kept, Mapping):
        return "mapping"
    return "tuple" if isinstance(kept, list | tuple) else "tensor"


def _named(kept: Any) -> dict[str, Any]:
    if isinstance(kept, Mapping):
        return {str(name): one for name, one in kept.items()}
    if isinstance(kept, list | tuple):
        return {str(place): one for place, one in enumerate(kept)}
    return {_ALONE: kept}


def _rebuilt(kind: str, named: Mapping[str, Any]) -> Any:
    if kind == "mapping":
        return dict(named)
    return tuple(named[str(place)] for place in range(len(named))) if kind == "tuple" else named[_ALONE]


def _joined(batches: Sequence[Any]) -> Any:
    """Return the batches as one.

    Raises:
        HandlerError: they do not fit together.
    """
    named = [_named(batch) for batch in batches]
    try:
        whole = {name: torch.cat([batch[name] for batch in named]) for name in named[0]}
    except (RuntimeError, KeyError) as error:
        raise HandlerError(
            f"Predictions: the batches do not fit together ({error}): bring them to one shape with transform=, by "
            "padding for example"
        ) from error
    return _rebuilt(_kind(batches[0]), whole)
