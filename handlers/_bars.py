"""The lines a progress bar is made of: live in a terminal or notebook, plain text elsewhere, none on other ranks."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from tqdm.std import tqdm

__all__ = ["BarLine", "open_line"]


class BarLine:
    """One epoch of one engine: how far it is, and the numbers beside it. This one shows nothing."""

    live = False
    """whether ``draw`` shows anything before the end, so that reading numbers for it is worth it"""

    def __init__(self, label: str, done: int, total: int | None) -> None:
        self.label = label
        self.initial = done
        self.done = done
        self.total = total
        self.numbers = ""
        self.output_numbers = ""
        self.output_read_at = done
        self.ended = False  # the epoch has; late metrics may still come
        self.drawn_at_sec = time.perf_counter()

    def draw(self) -> None:
        """Show the present state."""

    def close(self) -> None:
        """Show the last state and give the line up."""


class TextLine(BarLine):
    """One line of text at the end, for output that goes to a file."""

    def __init__(self, label: str, done: int, total: int | None, *, file: TextIO, leave: bool) -> None:
        super().__init__(label, done, total)
        self._file = file
        self._leave = leave
        self._opened_at_sec = self.drawn_at_sec

    def close(self) -> None:
        """Write the line."""
        if not self._leave:
            return
        elapsed = time.perf_counter() - self._opened_at_sec
        text = tqdm.format_meter(
            self.done, self.total, elapsed, ncols=0, prefix=self.label, postfix=self.numbers, initial=self.initial
        )
        self._file.write(f"{text}\n")
        self._file.flush()


class LiveLine(BarLine):
    """A bar of tqdm, which finds it a free line below those that are open."""

    live = True

    def __init__(
        self, label: str, done: int, total: int | None, *, bar_class: Any, file: TextIO | None, leave: bool
    ) -> None:
        super().__init__(label, done, total)
        # tqdm's watching thread is for bars that are not refreshed by hand; no thread is started for this one
        quiet_class: Any = type("ProgressBarLine", (bar_class,), {"monitor_interval": 0})
        self._bar = quiet_class(
            desc=label,
            total=total,
            initial=done,
            file=file,
            leave=leave,
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
        )

    def draw(self) -> None:
        """Draw the bar anew."""
        self._tell_numbers()
        if not self._bar.update(self.done - self._bar.n):
            self._bar.refresh()
        self.drawn_at_sec = time.perf_counter()

    def close(self) -> None:
        """Draw the bar a last time and leave it, or wipe it out."""
        self._tell_numbers()
        self._bar.n = self.done
        self._bar.close()

    def _tell_numbers(self) -> None:
        self._set_total()
        self._bar.set_postfix_str(self.numbers, refresh=False)

    def _set_total(self) -> None:
        if self.total == self._bar.total:
            return
        self._bar.total = self.total
        container = getattr(self._bar, "container", None)  # a notebook's widget keeps a total of its own
        if container is not None and self.total:
            widget = container.children[1]
            widget.max = self.total


def open_line(
    label: str, done: int, total: int | None, *, rank: int, inner: bool, file: TextIO | None, leave: bool
) -> BarLine:
    """Open the line that fits where the output goes. The line of an inner run vanishes where it can."""
    if rank != 0:
        return BarLine(label, done, total)
    widget_class = _notebook_bar() if file is None else None
    if widget_class is not None:
        return LiveLine(label, done, total, bar_class=widget_class, file=None, leave=leave and not inner)
    file = sys.stderr if file is None else file
    if file.isatty():
        return LiveLine(label, done, total, bar_class=tqdm, file=file, leave=leave and not inner)
    return TextLine(label, done, total, file=file, leave=leave)


def _notebook_bar() -> Any:
    """Return tqdm's widget bar if this is a notebook that can show it, else None."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or "IPKernelApp" not in getattr(shell, "config", {}):
        return None
    from tqdm import notebook

    return notebook.tqdm if notebook.IProgress is not None else None
