"""Learning curves with matplotlib. Imported only when somebody plots."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

__all__ = ["Points", "draw"]

Points = Sequence[tuple[int, float]]

_COLUMNS = 3
_LEGEND_COLUMNS = 2
_MARKERS_UP_TO = 60


class CurvesFigure(Figure):
    """A figure that notebooks display by itself, once, without pyplot keeping it."""

    def _repr_png_(self) -> bytes:
        png = io.BytesIO()
        self.savefig(png, format="png")
        return png.getvalue()


def draw(curves: Mapping[str, Points], *, x_label: str, ax: Axes | None, title: str | None) -> Figure:
    """Draw the curves, one axes for each base name, or all into ``ax``."""
    if ax is None:
        return _draw_figure(curves, x_label, title)
    _draw_axes(ax, curves, {name: f"C{index}" for index, name in enumerate(curves)}, x_label)
    ax.legend(framealpha=0.8, edgecolor="none")
    ax.set_title(title or "")
    figure = ax.get_figure(root=True)
    assert figure is not None, "an axes that was drawn into has a figure"
    return figure


def _draw_figure(curves: Mapping[str, Points], x_label: str, title: str | None) -> Figure:
    groups: dict[str, dict[str, Points]] = {}
    for name, points in curves.items():
        groups.setdefault(_base_name(name), {})[name] = points
    columns = min(len(groups), _COLUMNS)
    lines = math.ceil(len(groups) / columns)
    figure = CurvesFigure(figsize=(max(6, 4.5 * columns), 3.6 * lines), dpi=120, layout="constrained")
    colors = _colors_by_prefix(curves)
    first: Axes | None = None
    for place, group in enumerate(groups.values(), start=1):
        ax = figure.add_subplot(lines, columns, place, sharex=first)
        _draw_axes(ax, group, colors, x_label)
        ax.ticklabel_format(axis="y", useOffset=False)
        # above, where no curve can run through it, and on the right: on the left stands a factor such as 1e6
        ax.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=_LEGEND_COLUMNS, borderaxespad=0.1)
        first = first or ax
    if title:
        figure.suptitle(title)
    return figure


def _base_name(name: str) -> str:
    return name.rsplit("/", 1)[-1]


def _colors_by_prefix(names: Mapping[str, Points]) -> dict[str, str]:
    """Give ``val/loss`` and ``val/accuracy`` one color, and ``loss`` another."""
    prefixes = {name: name.removesuffix(_base_name(name)) for name in names}
    order = sorted(set(prefixes.values()))
    return {name: f"C{order.index(prefix)}" for name, prefix in prefixes.items()}


def _draw_axes(ax: Axes, curves: Mapping[str, Points], colors: Mapping[str, str], x_label: str) -> None:
    for name, points in curves.items():
        few = len(points) <= _MARKERS_UP_TO
        x, y = zip(*points, strict=True)
        style = {"marker": "o", "markersize": 3.5, "linewidth": 1.6} if few else {"linewidth": 0.9}
        ax.plot(x, y, label=name, color=colors[name], **style)
    ax.set_xlabel(x_label)
    ax.set_ylabel(", ".join(dict.fromkeys(map(_base_name, curves))))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
