"""The curve of a learning-rate search with matplotlib. Imported only when somebody plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ._curves import CurvesFigure

__all__ = ["draw_rates"]


class Result(Protocol):
    """What is drawn of a search."""

    @property
    def rates(self) -> tuple[float, ...]:
        """The rates."""

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss at each."""

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The same, smoothed."""

    @property
    def mode(self) -> str:
        """How the rates rise."""


def draw_rates(result: Result, marked: int | None, *, ax: Axes | None, title: str | None) -> Figure:
    """Draw loss and smoothed loss over the rates, and mark one of them."""
    if ax is None:
        ax = CurvesFigure(figsize=(6.4, 4), dpi=120, layout="constrained").add_subplot()
    ax.plot(result.rates, result.losses, color="0.75", linewidth=1, label="loss")
    ax.plot(result.rates, result.smoothed, color="C0", linewidth=2, label="smoothed")
    if marked is not None:
        rate = result.rates[marked]
        ax.axvline(rate, color="C3", linewidth=1, linestyle="--")
        ax.plot([rate], [result.smoothed[marked]], "o", color="C3", label=f"suggestion {rate:.2g}")
    if result.mode == "exp":
        ax.set_xscale("log")
    ax.set_ylim(*_limits(result.losses, result.smoothed))
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss")
    ax.set_title(title or "")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.legend(framealpha=0.8, edgecolor="none")
    figure = ax.get_figure(root=True)
    assert figure is not None, "an axes that was drawn into has a figure"
    return figure


def _limits(losses: Sequence[float], smoothed: Sequence[float]) -> tuple[float, float]:
    """Return limits in which the fall can be seen, however high the loss has climbed in the end."""
    lowest = smoothed.index(min(smoothed))
    before = losses[: lowest + 1]
    low, high = min(losses), max(before)
    margin = (high - low) or abs(high) or 1.0
    return low - 0.1 * margin, high + 0.3 * margin
