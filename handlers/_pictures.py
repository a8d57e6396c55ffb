"""What handlers that draw share: matplotlib, if it is there, and files of pictures."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PicturePath", "require_matplotlib"]

_COUNTS = ("epoch", "iteration", "updates")


def require_matplotlib(user: str) -> None:
    """Make sure that pictures can be drawn.

    Raises:
        ImportError: matplotlib is not installed; the message names the command that does.
    """
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"{user} needs matplotlib, which is not installed: pip install 'pellucid[notebook]'"
        ) from error


class PicturePath:
    """The path of a picture, with the counts of the run in it where it says so: ``"epoch-{epoch:03d}.png"``.

    Raises:
        TypeError: no path.
        ValueError: it has other fields, or an ending that is no kind of picture.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError(f"path={path!r}: the path of a picture was wanted, such as 'runs/digits/curves.png'")
        self.pattern = os.fspath(path)
        try:
            example = self._filled(dict.fromkeys(_COUNTS, 1))
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                f"path={path!r}: only {', '.join(f'{{{name}}}' for name in _COUNTS)} stand for something in it, such "
                f"as 'epoch-{{epoch:03d}}.png' ({error!r})"
            ) from error
        _check_ending(example)

    def _filled(self, counts: dict[str, int]) -> Path:
        return Path(self.pattern.format(**counts))

    def save(self, figure: Figure, state: Any) -> Path:
        """Write the picture, so that whoever looks at the file sees a whole one at any time; return where."""
        path = self._filled({name: getattr(state, name) for name in _COUNTS})
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:])
        beside = path.with_name(f".{path.name}.writing")
        beside.write_bytes(picture.getvalue())
        os.replace(beside, path)
        return path


def _check_ending(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"path={str(path)!r}: one of the endings {', '.join(sorted(known))} was wanted, such as .png")
