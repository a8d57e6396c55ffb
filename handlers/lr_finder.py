"""Find a learning rate: train a copy of the model with rising rates, and look where the loss falls fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ..engine import Engine, Events, HandlerError, RunError, StateView, Step
from ._monitor import require_number, require_positive
from ._optimizers import optimizers_of, rates_of, set_rates
from ._trial import REMEDY, fresh_optimizers, require_engine, run_untouched

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["LRFinder", "LRFinderResult"]

Data = Iterable[Any] | Callable[[StateView], Iterable[Any]]


class LRFinder:
    """Train a copy of an engine's model with rates from ``min_lr`` to ``max_lr``, an iteration each (`Smith, 2015
    <https://arxiv.org/abs/1506.01186>`_).

    The engine's model, optimizer and state, the random state and the data's own generators stay untouched to the bit,
    whether the engine is at rest or in the middle of a run. Each batch is an update, without accumulation. The host
    waits for the device once an iteration, to read the loss.

    Args:
        min_lr: the first rate.
        max_lr: the last rate.
        iterations: how many rates are tried; the data begins again where it is shorter.
        mode: ``"exp"``: each rate is the one before times a factor; ``"linear"``: plus a step.
        smooth: how much the losses are smoothed, from 0 (not at all) to below 1.
        diverge: stop when the smoothed loss is above this many times its smallest value, or the loss not finite.
        output: where the loss is in the step's output, a key or a function of it. None: ``output["loss"]`` if it is a
            mapping, else the output itself.
        optimizer: the optimizer whose rates are tried; None: all of them. Of several parameter groups the one with
            the largest rate gets the rate tried, and the others keep their proportion to it.

    Example:
        >>> result = LRFinder(iterations=30).run(trainer, loader)
        >>> result.plot().savefig("rates.png")
    """

    def __init__(
        self,
        min_lr: float = 1e-6,
        max_lr: float = 1.0,
        *,
        iterations: int = 100,
        mode: Literal["exp", "linear"] = "exp",
        smooth: float = 0.9,
        diverge: float = 4.0,
        output: str | Callable[[Any], Any] | None = None,
        optimizer: str | None = None,
    ) -> None:
        self._min = require_positive("min_lr", min_lr)
        self._max: float = require_number("max_lr", max_lr, least=min_lr)
        self._iterations: int = require_number("iterations", iterations, least=2, whole=True)
        self._smooth: float = require_number("smooth", smooth, least=0)
        self._diverge: float = require_number("diverge", diverge, least=1)
        if mode not in ("exp", "linear"):
            raise ValueError(f"mode={mode!r}: 'exp' or 'linear' was wanted")
        if smooth >= 1:
            raise ValueError(f"smooth={smooth!r}: a number below 1 was wanted")
        self._mode: Literal["exp", "linear"] = mode
        self._output = output
        self._only = optimizer

    def run(self, engine: Engine, data: Data, step: Step | None = None) -> LRFinderResult:
        """Try the rates and return what came of them.

        Args:
            engine: the training engine, at rest or running.
            data: as for ``Engine.run``.
            step: another step than the engine's. Both must use ``engine.model`` and ``engine.optimizer`` of the engine
                they are called with.

        Raises:
            HandlerError: the engine makes no updates; its optimizer cannot be made anew for the copy; the step updates
                something else than the copy.
        """
        require_engine("LRFinder", engine)
        optimizers = fresh_optimizers(engine, self._only)
        inner = engine.fork(step, mode="train", model="copy", optimizer=optimizers, name="lr finder")
        shares = {name: _shares(one) for name, one in optimizers_of(engine).items() if self._only in (None, name)}
        search = _Search(self._rates(), shares, _LossOf(self._output), self._smooth, self._diverge)
        inner.add_event_handler(Events.ITERATION_STARTED, search.set_rates)
        inner.add_event_handler(Events.ITERATION_COMPLETED, search.read_loss)
        run_untouched(engine, lambda: inner.run(data, max_iters=self._iterations))
        if search.losses and not inner.state.updates:
            raise HandlerError(f"the step has updated nothing of the copy: {REMEDY}")
        smoothed = _smoothed_both_ways(search.losses, self._smooth)
        rates = search.rates[: len(search.losses)]
        return LRFinderResult(tuple(rates), tuple(search.losses), tuple(smoothed), search.diverged, self._mode)

    def _rates(self) -> list[float]:
        parts = [index / (self._iterations - 1) for index in range(self._iterations)]
        if self._mode == "linear":
            return [self._min + (self._max - self._min) * part for part in parts]
        return [self._min * (self._max / self._min) ** part for part in parts]

    def __repr__(self) -> str:
        """Show the range."""
        return f"LRFinder({self._min:g}, {self._max:g}, iterations={self._iterations}, mode={self._mode!r})"


@dataclass(frozen=True, repr=False)
class LRFinderResult:
    """What the loss was at each rate.

    Attributes:
        rates: the rates tried, rising.
        losses: the loss of the batch trained at each, from before its update.
        smoothed: the losses, smoothed in both directions, so that the curve does not lag behind.
        diverged: whether the search has stopped because the loss grew too large or was not finite.
        mode: how the rates rise, ``"exp"`` or ``"linear"``.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    diverged: bool
    mode: Literal["exp", "linear"]

    def suggestion(self) -> float:
        """Return the rate at which the smoothed loss falls fastest on its way to its minimum.

        Raises:
            RunError: the loss has not fallen.
        """
        index = self._steepest()
        if index is None:
            raise RunError(
                f"no rate to suggest: the loss has not fallen over the {len(self.rates)} rates tried. Look at plot(), "
                "and try a lower min_lr, a higher max_lr or more iterations"
            )
        return self.rates[index]

    def _steepest(self) -> int | None:
        smoothed = self.smoothed
        lowest = smoothed.index(min(smoothed)) if smoothed else 0
        falls = {i: smoothed[i - 1] - smoothed[i + 1] for i in range(1, min(lowest + 1, len(smoothed) - 1))}
        index = max(falls, key=lambda i: falls[i], default=None)
        return None if index is None or falls[index] <= 0 else index

    def plot(self, *, ax: Axes | None = None, title: str | None = None) -> Figure:
        """Draw the loss over the rates, with the suggestion marked if there is one, and return the figure.

        As that of ``History.plot`` it is not kept by ``matplotlib.pyplot``.

        Raises:
            ImportError: matplotlib is not installed.
            RunError: there is nothing to draw, as the first loss was not finite already.
        """
        try:
            from ._rate_curve import draw_rates
        except ImportError as error:
            raise ImportError(
                "LRFinderResult.plot needs matplotlib, which is not installed: pip install 'pellucid[notebook]'"
            ) from error
        if not self.rates:
            raise RunError("nothing to draw: the first loss was not finite")
        return draw_rates(self, self._steepest(), ax=ax, title=title)

    def __repr__(self) -> str:
        """Show how many rates were tried, and the suggestion."""
        index = self._steepest()
        found = "none" if index is None else f"{self.rates[index]:.3g}"
        return f"LRFinderResult({len(self.rates)} rates, suggestion: {found}, diverged: {self.diverged})"


class _Search:
    """One search: sets the rates, reads the losses, and stops when they diverge."""

    def __init__(
        self,
        rates: Sequence[float],
        shares: Mapping[str, Sequence[float]],
        loss_of: Callable[[Any], float],
        smooth: float,
        diverge: float,
    ) -> None:
        self.rates = rates
        self.losses: list[float] = []
        self.diverged = False
        self._shares = shares
        self._loss_of = loss_of
        self._smooth = smooth
        self._diverge = diverge

    def set_rates(self, engine: Engine, batch: Any) -> None:
        rate = self.rates[engine.state.iteration - 1]
        for name, optimizer in optimizers_of(engine).items():
            if name in self._shares:
                set_rates(optimizer, [rate * share for share in self._shares[name]])

    def read_loss(self, engine: Engine, batch: Any) -> None:
        loss = self._loss_of(engine.state.output)  # waits for the device
        if math.isfinite(loss):
            self.losses.append(loss)
        if not math.isfinite(loss) or self._is_too_large():
            self.diverged = True
            engine.terminate()

    def _is_too_large(self) -> bool:
        smoothed = _smoothed(self.losses, self._smooth)
        best = min(smoothed)
        return smoothed[-1] > best + (self._diverge - 1) * abs(best)


class _LossOf:
    """Finds the loss in a step's output."""

    def __init__(self, where: str | Callable[[Any], Any] | None) -> None:
        self._where = where

    def __call__(self, output: Any) -> float:
        where = self._where
        if callable(where):
            value = where(output)
        elif where is None and not isinstance(output, Mapping):
            value = output
        else:
            value = output.get(where or "loss") if isinstance(output, Mapping) else None
        if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
            what = f"output[{where or 'loss'!r}] of " if isinstance(output, Mapping) and not callable(where) else ""
            raise HandlerError(
                f"no loss, one number, in {what}the step's output {type(output).__name__}: say where it is, "
                f"LRFinder(output=...)"
            )
        return float(value)


def _smoothed(values: Sequence[float], smooth: float) -> list[float]:
    """Return the exponential moving mean, each value corrected for the few it is the mean of."""
    mean, means = 0.0, []
    for made, value in enumerate(values, start=1):
        mean = smooth * mean + (1 - smooth) * value
        means.append(mean / (1 - smooth**made))
    return means


def _smoothed_both_ways(losses: Sequence[float], smooth: float) -> list[float]:
    """Return the losses smoothed forward and back, so that the curve does not lag behind.

    Losses after the smallest are cut off at the largest before it: on its way back a loss that has diverged would hide
    the fall.
    """
    if not losses:
        return []
    highest = max(losses[: losses.index(min(losses)) + 1])
    return _smoothed(_smoothed([min(loss, highest) for loss in losses], smooth)[::-1], smooth)[::-1]


def _shares(optimizer: Optimizer) -> list[float]:
    rates = rates_of(optimizer)
    largest = max(rates)
    return [rate / largest if largest else 1.0 for rate in rates]
