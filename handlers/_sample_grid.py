"""A grid of images with what was predicted of them, in matplotlib. Imported only when somebody draws.

Right and wrong are told apart by a mark and the frame, and by two colors that also colorblind people tell apart (Okabe
and Ito, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from ._curves import CurvesFigure

__all__ = ["draw_samples", "shown_image"]

_RIGHT, _WRONG, _UNKNOWN = "#0072B2", "#D55E00", "0.6"
_TRUE = "true: "
_LONGEST = 15  # letters of a label
_IMAGE_INCHES = 1.35


def draw_samples(
    images: Sequence[NDArray[numpy.floating]],
    predicted: Sequence[str],
    true: Sequence[str] | None,
    *,
    columns: int | None,
    title: str,
) -> Figure:
    """Draw images with the labels predicted above them, and the true ones where those are others."""
    columns = columns or math.ceil(len(images) / max(1, math.floor(math.sqrt(len(images) / 2))))
    lines = math.ceil(len(images) / columns)
    figure = CurvesFigure(dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    for place, image in enumerate(images):
        ax = figure.add_subplot(lines, columns, place + 1)
        _draw_one(ax, image, predicted[place], None if true is None else true[place])
    width = max(_IMAGE_INCHES, _widest_title_inches(figure) + 0.12)
    figure.set_size_inches(max(4.5, width * columns), (_IMAGE_INCHES + 0.45) * lines + 0.7)
    figure.suptitle(title, fontsize=11)
    if true is not None:
        figure.supxlabel("✓ right: the label    ✗ wrong: predicted, below it the true label", fontsize=8, color="0.3",
                         fontfamily=_families())  # fmt: skip
    return figure


def _draw_one(ax: Axes, image: NDArray[numpy.floating], predicted: str, true: str | None) -> None:
    ax.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    if true is None:
        text, color, width = _short(predicted), "black", 0.8
    elif predicted == true:
        text, color, width = f"✓ {_short(predicted)}", _RIGHT, 0.8
    else:
        text, color, width = f"✗ {_short(predicted)}\n{_TRUE}{_short(true)}", _WRONG, 3.0
    ax.set_title(text, fontsize=9, color=color, fontweight="bold" if width > 1 else "normal", fontfamily=_families())
    for spine in ax.spines.values():
        spine.set(color=_UNKNOWN if true is None else color, linewidth=width)


def _widest_title_inches(figure: Figure) -> float:
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    return max(float(ax.title.get_window_extent(renderer).width) for ax in figure.axes) / figure.dpi


def _families() -> list[str]:
    """Return the user's fonts, and for the marks, which they may lack, the one that comes with matplotlib."""
    return [*rcParams["font.family"], "DejaVu Sans"]


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"


def shown_image(image: NDArray[numpy.floating]) -> NDArray[numpy.floating]:
    """Return an image (C, H, W) or (H, W) of any range as (H, W), or (H, W, 3), from 0 to 1.

    One from 0 to 1 stays as it is, another is stretched over its own range. What is not finite is black.
    """
    values = numpy.nan_to_num(image.astype(numpy.float64), nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / (high - low) if high > low else numpy.full_like(values, 0.5)
    if values.ndim == 2:
        return values
    return values[0] if len(values) == 1 else numpy.moveaxis(values[:3], 0, -1)
