"""Keep what an evaluation puts out for each sample, in the order of the data, from all ranks."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..engine import DataError, Engine, Events, HandlerError, RunError, Strategy
from ._attachable import Attachable, Subscription
from ._monitor import require_number
from ._samples import Kept, concatenate, keep
from .saved_predictions import PartWriter, SavedPredictions, check_directory

__all__ = ["Predictions"]

logger = logging.getLogger("pellucid.handlers")

_NO_RUN = "no run has begun since it was made: run the evaluation engine it is attached to"


class Predictions(Attachable):
    """Gather what the step of an evaluation engine returns: each sample once, in the order of the data, from all ranks.

    The output is a tensor, or a tuple or mapping of tensors, whose first dimension is the samples; the result is of the
    same kind. Each batch is brought to the host when it is done, which waits for the device. At the end of the data all
    ranks gather, a collective, and then every rank has the whole :attr:`result`. A run that was stopped or has failed
    has none, and a new run begins afresh.

    Args:
        transform: a function of the step's output that returns what to keep of it. None: all of it.
        directory: write there, and keep only a few batches in memory: files ``part-00000.safetensors``, ... and an
            ``index.json``, which :class:`SavedPredictions` reads. What an earlier run has written there is removed when
            a run begins. On ranks only rank 0 writes the files; others need the directory for a temporary file.
        chunk_samples: how many samples a file holds.

    Raises:
        DataError: the directory holds files of these names that are not ours.

    Example:
        >>> predictions = Predictions(transform=lambda output: output[0].argmax(1)).attach(evaluator)
        >>> result = evaluator.run(val_loader)
        >>> len(predictions.result)
        40
    """

    def __init__(
        self,
        transform: Callable[[Any], Any] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        chunk_samples: int = 10_000,
    ) -> None:
        if transform is not None and not callable(transform):
            raise TypeError(f"transform={transform!r}: a function of the step's output was wanted")
        if directory is not None and (not isinstance(directory, str | os.PathLike) or not os.fspath(directory)):
            raise TypeError(f"directory={directory!r}: the path of a folder was wanted, such as 'runs/digits/test'")
        self._transform = transform
        self._directory = None if directory is None else Path(directory)
        self._chunk_samples: int = require_number("chunk_samples", chunk_samples, least=1, whole=True)
        if self._directory is not None:
            check_directory(self._directory)
        self._result: Any = None
        self._missing: str | None = _NO_RUN
        self._store: _Memory | _Spool | PartWriter | None = None

    @property
    def result(self) -> Any:
        """All that was kept: tensors on the host, or with ``directory`` a :class:`SavedPredictions`.

        Raises:
            RunError: the last run has not come to the end of its data.
        """
        if self._missing is not None:
            raise RunError(f"there are no predictions: {self._missing}")
        if self._result is None:
            raise RunError(
                f"rank 0 has written the predictions into its {self._directory}, which is not on this machine"
            )
        return self._result

    def attach(self, engine: Engine) -> Predictions:
        """Keep the outputs of ``engine``'s runs from now on, and return the handler itself.

        Raises:
            HandlerError: it is no evaluation engine.
        """
        if isinstance(engine, Engine) and engine.state.mode != "eval":
            raise HandlerError(
                "Predictions attaches to an Engine(..., mode='eval'): the outputs of one that trains are from "
                "differing weights, and its samples in no order"
            )
        return super().attach(engine)

    def subscriptions(self) -> Sequence[Subscription]:
        return (
            (Events.STARTED, self._forget),
            (Events.EPOCH_STARTED, self._begin),
            (Events.ITERATION_COMPLETED, self._keep),
            (Events.EPOCH_COMPLETED, self._gather),
            (
                Events.TERMINATE_SINGLE_EPOCH | Events.TERMINATE | Events.INTERRUPT | Events.EXCEPTION_RAISED,
                self._give_up,
            ),
        )

    def _forget(self, engine: Engine, batch: Any) -> None:
        self._drop("the run has not come to the end of its data")
        self._result = None

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._forget(engine, batch)
        if self._directory is None:
            self._store = _Memory()
        elif engine.strategy.peers is None:
            self._store = PartWriter(self._directory, self._chunk_samples)
        else:
            if engine.state.rank == 0:
                PartWriter(self._directory, self._chunk_samples)  # what an earlier run has left is not this run's
            self._store = _Spool(self._directory)

    def _keep(self, engine: Engine, batch: Any) -> None:
        store = self._store
        if store is None:
            return
        output = engine.state.output
        store.add(keep(output if self._transform is None else self._transform(output)))

    def _gather(self, engine: Engine, batch: Any) -> None:
        store, strategy = self._store, engine.strategy
        if store is None:
            return
        if isinstance(store, _Memory):
            everything = strategy.gather_batches(store.batches)
            if not everything:
                raise DataError("there was no batch to keep predictions of")
            whole = concatenate(everything)
            self._result = whole.layout.put_together(whole.tensors)
        else:
            assert self._directory is not None, "what is no memory is a directory"
            if isinstance(store, _Spool):
                self._write_of_all(store, self._directory, engine)
            else:
                store.finish()
            strategy.barrier()
            self._open_written(engine, self._directory)
        self._store = self._missing = None

    def _write_of_all(self, mine: _Spool, directory: Path, engine: Engine) -> None:
        """Let rank 0 write what all have kept, some batches of each at a time."""
        writer = PartWriter(directory, self._chunk_samples) if engine.state.rank == 0 else None
        for samples in _rounds(mine, engine.strategy, self._chunk_samples):
            if writer is not None:
                writer.add(samples)
        if writer is not None:
            writer.finish()
        mine.close()

    def _open_written(self, engine: Engine, directory: Path) -> None:
        try:
            self._result = SavedPredictions(directory)
        except DataError:
            if engine.state.rank == 0:
                raise
            # this rank's machine does not see what rank 0 has written

    def _give_up(self, engine: Engine, batch: Any) -> None:
        if self._store is None:
            return
        state = engine.state
        error = state.exception
        how = "was stopped" if error is None else f"has failed ({type(error).__name__})"
        reason = f"the run {how} in iteration {state.iteration}, before the end of its data"
        if state.rank == 0 and error is None:
            logger.warning("%r: %s, so nothing is kept", self, reason)
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        store, self._store = self._store, None
        self._missing = reason
        if store is not None:
            store.give_up()

    def __repr__(self) -> str:
        """Show where they go."""
        where = "" if self._directory is None else f"directory={str(self._directory)!r}"
        return f"Predictions({where})"


class _Memory:
    """Keeps batches in memory."""

    def __init__(self) -> None:
        self.batches: list[Kept] = []

    def add(self, samples: Kept) -> None:
        self.batches.append(samples)

    def give_up(self) -> None:
        self.batches = []


class _Spool:
    """Keeps batches in a file without a name, which the system removes however the process ends."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (it outlives this method)
        self.batches = 0
        self.largest = 0

    def add(self, samples: Kept) -> None:
        pickle.dump(samples, self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.batches += 1
        self.largest = max(self.largest, len(samples))

    def __iter__(self) -> Iterator[Kept]:
        self._file.seek(0)
        for _ in range(self.batches):
            yield pickle.load(self._file)

    def close(self) -> None:
        self._file.close()

    give_up = close


def _rounds(mine: _Spool, strategy: Strategy, chunk_samples: int) -> Iterator[Kept]:
    """Yield the batches of all ranks in the order of the data, on every rank. As many collectives on each."""
    sizes = strategy.gather((mine.batches, mine.largest))
    most, largest = max(batches for batches, _ in sizes), max(largest for _, largest in sizes)
    if not most:
        raise DataError("there was no batch to keep predictions of")
    at_once = max(1, chunk_samples // max(1, largest * strategy.data_world_size))
    batches = iter(mine)
    for begin in range(0, most, at_once):
        part = [next(batches) for _ in range(begin, min(begin + at_once, mine.batches))]
        yield from strategy.gather_batches(part)
