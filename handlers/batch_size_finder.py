"""Find the largest batch that fits into memory: train a copy of the model with larger and larger ones."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..engine import FSDP, DataError, Engine, Events, HandlerError, SingleDevice, Step
from ._batches import count_samples
from ._monitor import require_number
from ._trial import REMEDY, fresh_optimizers, require_engine, run_untouched

__all__ = ["BatchSizeFinder", "BatchSizeResult"]

# what PyTorch says where it raises no OutOfMemoryError: the CPU, CUDA and its libraries, Apple's MPS
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "_STATUS_ALLOC_FAILED", "Invalid buffer size")


class BatchSizeFinder:
    """Double the batch size until memory runs out, then halve the gap to the first that was too large.

    Each size is tried for a few iterations on a copy of the model, with an optimizer of its own. The engine's model,
    optimizer and state, the random state and the data's own generators stay untouched to the bit. The copy takes memory
    beside the model and its optimizer, so what is found is on the safe side; leave some room anyway, as memory gets
    fragmented in a long run. On several ranks each tries on its own, without the others' buffers, and all take the
    smallest.

    Args:
        min_batch_size: the first size; if it does not fit, it is an error. Batch normalisation does not train on one
            sample.
        max_batch_size: the last size.
        iterations: how many updates each size must survive; the second one has the optimizer's state in memory too.
        refine: how often the gap between the largest that fits and the smallest that does not is halved; 0: never, and
            the result is ``min_batch_size`` times a power of two.

    Example:
        >>> def make_data(size):
        ...     return torch.utils.data.DataLoader(loader.dataset, size, shuffle=True)
        >>> result = BatchSizeFinder(max_batch_size=8).run(trainer, make_data)
        >>> result.batch_size
        8
    """

    def __init__(
        self, min_batch_size: int = 2, max_batch_size: int = 65536, *, iterations: int = 3, refine: int = 2
    ) -> None:
        self._min: int = require_number("min_batch_size", min_batch_size, least=1, whole=True)
        self._max: int = require_number("max_batch_size", max_batch_size, least=min_batch_size, whole=True)
        self._iterations: int = require_number("iterations", iterations, least=1, whole=True)
        self._refine: int = require_number("refine", refine, least=0, whole=True)

    def run(
        self, engine: Engine, make_data: Callable[[int], Iterable[Any]], step: Step | None = None
    ) -> BatchSizeResult:
        """Try the sizes and return what came of them. All ranks must call it.

        Args:
            engine: the training engine, at rest or running.
            make_data: given a batch size, returns an iterable of such batches.
            step: another step than the engine's. Both must use ``engine.model`` and ``engine.update()`` of the engine
                they are called with.

        Raises:
            HandlerError: even ``min_batch_size`` does not fit; the engine makes no updates; its optimizer cannot be
                made anew for the copy; the model is sharded over ranks, of which none can try alone.
            DataError: there is no batch of ``min_batch_size`` in the data.
        """
        require_engine("BatchSizeFinder", engine)
        if not callable(make_data):
            raise TypeError(
                f"make_data={make_data!r}: a function of the batch size was wanted, such as "
                "lambda size: DataLoader(dataset, size, shuffle=True)"
            )
        if isinstance(engine.strategy, FSDP) and engine.state.world_size > 1:
            raise HandlerError(
                "BatchSizeFinder tries sizes on each rank alone, which a model that FSDP shares out over several ranks "
                "does not allow: try sizes in runs of their own, trainer.run(loader, limit_batches=3)"
            )
        search = _Search(engine, make_data, step, self._iterations)
        run_untouched(engine, lambda: self._search(search))
        return search.result(self._min, self._max)

    def _search(self, search: _Search) -> None:
        size = self._min
        while search.fits(size) and size < self._max:
            size = min(2 * size, self._max)
        for _ in range(self._refine):
            fitting, too_large = search.largest_fitting, search.smallest_too_large
            if fitting is None or too_large is None or too_large - fitting < 2:
                return
            search.fits((fitting + too_large) // 2)

    def __repr__(self) -> str:
        """Show the range."""
        return f"BatchSizeFinder({self._min}, {self._max}, iterations={self._iterations}, refine={self._refine})"


@dataclass(frozen=True)
class BatchSizeResult:
    """What came of each size.

    Attributes:
        batch_size: the largest that fits, on every rank.
        trials: each size that was tried, in this order, and whether it fits; one that the data has no batch of (with
            ``drop_last``) does not.
        limited_by: what keeps it from being larger: ``"memory"``, ``"max_batch_size"``, or ``"data"``, which had no
            larger batch.
    """

    batch_size: int
    trials: tuple[tuple[int, bool], ...]
    limited_by: Literal["memory", "max_batch_size", "data"]


class _Search:
    """One search: tries sizes, and remembers what came of them."""

    def __init__(
        self, engine: Engine, make_data: Callable[[int], Iterable[Any]], step: Step | None, iterations: int
    ) -> None:
        self._engine = engine
        self._make_data = make_data
        self._step = step
        self._iterations = iterations
        self._trials: dict[int, bool] = {}
        self._most_samples: int | None = None  # in a batch that was asked to have more
        self._without_data: set[int] = set()  # sizes that the data has no batch of

    @property
    def largest_fitting(self) -> int | None:
        return max((size for size, fits in self._trials.items() if fits), default=None)

    @property
    def smallest_too_large(self) -> int | None:
        return min((size for size, fits in self._trials.items() if not fits), default=None)

    def fits(self, size: int) -> bool:
        """Try a size on every rank, and say whether to go on. A collective."""
        outcomes = self._engine.strategy.gather(self._try(size))
        self._trials[size] = all(outcome == "fits" or isinstance(outcome, int) for outcome in outcomes)
        if "no data" in outcomes and "no memory" not in outcomes:
            self._without_data.add(size)
        short = [outcome for outcome in outcomes if isinstance(outcome, int)]
        if short and self._trials[size]:
            self._most_samples = min(short)
        return self._trials[size] and not short

    def _try(self, size: int) -> Literal["fits", "no memory", "no data"] | int:
        """Train a copy; a number: it fits, but the batch had only so many samples."""
        try:
            return self._train(size) or "fits"
        except DataError:
            if not self._trials:
                raise
            return "no data"
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
        _free(self._engine.device)
        return "no memory"

    def _train(self, size: int) -> int | None:
        """Train a copy; return how many samples its first batch had if these were fewer than asked for."""
        engine, found = self._engine, []
        alone = None
        if engine.state.world_size > 1:
            alone = SingleDevice(engine.device, precision=engine.state.precision)
        optimizers = fresh_optimizers(engine)
        inner = engine.fork(
            self._step, mode="train", model="copy", optimizer=optimizers, strategy=alone, name=f"batch size {size}"
        )

        @inner.on(Events.ITERATION_STARTED)
        def count(engine: Engine, batch: Any) -> None:
            samples = count_samples(batch)
            if engine.state.iteration == 1 and samples is not None and samples < size:
                found.append(samples)

        inner.run(self._make_data(size), max_iters=self._iterations)
        if not inner.state.updates:
            raise HandlerError(f"the step has updated nothing of the copy: {REMEDY}")
        return found[0] if found else None

    def result(self, first: int, last: int) -> BatchSizeResult:
        """Return what came of it.

        Raises:
            HandlerError: nothing fits.
        """
        fitting = self.largest_fitting
        if fitting is None:
            raise HandlerError(
                f"even a batch of {first} does not fit into memory: give a smaller min_batch_size, or make the model "
                "smaller (bf16 precision, activation checkpointing, FSDP)"
            )
        trials = tuple(self._trials.items())
        if self._most_samples is not None:
            return BatchSizeResult(min(fitting, max(self._most_samples, 1)), trials, "data")
        if self.smallest_too_large in self._without_data:
            return BatchSizeResult(fitting, trials, "data")
        return BatchSizeResult(fitting, trials, "max_batch_size" if fitting == last else "memory")


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)


def _free(device: torch.device) -> None:
    """Give back what a trial that failed has left: its error's traceback may keep it in cycles."""
    gc.collect()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()
