"""What the loggers that write lines of text share."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine import CheckpointError, Engine
from ._log_file import LogFile
from ._logger import Counts, Logger
from ._output import Output

__all__ = ["FileLogger"]

logger = logging.getLogger("pellucid.handlers")


class FileLogger(Logger):
    """A logger that appends a line for each number."""

    _header = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        output: Output = None,
        every: int = 100,
        prefix: str | None = None,
    ) -> None:
        super().__init__(output=output, every=every, prefix=prefix)
        self._file = LogFile(path, self._header.encode())
        self._keep: int | None = 0  # a first training begins a file of its own

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @abstractmethod
    def _line(self, counts: Counts, name: str, value: int | float) -> str:
        """Return the line for a number, with its end."""

    @abstractmethod
    def _parse(self, line: str) -> Counts:
        """Return the counts in a line."""

    def _open(self, engine: Engine, is_training: bool) -> None:
        if is_training or self._goes_on:
            if self._keep == 0:
                self._counts = Counts()
            self._file.open(self._keep)
            self._keep = None  # from now on the file is this logger's
            return
        if self._keep == 0:
            self._begin_with_evaluation(self._file.last_line().decode(errors="replace"))
        self._file.open(None)

    def _begin_with_evaluation(self, last_line: str) -> None:
        """Stand where an earlier training stood, as the file says; without one the file is this logger's."""
        if not last_line:
            self._keep = None
            return
        try:
            self._counts = self._parse(last_line)
        except (ValueError, LookupError, TypeError):
            logger.warning("%s ends with no line of ours, %r: what comes is written at 0", self.path, last_line)

    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        lines = "".join(self._line(counts, name, value) for name, value in numbers.items())
        self._file.append(lines.encode())

    def _flush(self) -> None:
        """Do nothing: every line is with the system already."""

    def _close(self, ending: str) -> None:
        try:
            self._file.sync()
        finally:
            self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the training and the file stand, which is brought to the disk as far."""
        if self._is_open:
            self._file.sync()
        position = self._file.position if self._keep is None else self._keep
        return {**super().state_dict(), "position": position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the end of what was written when the state was saved.

        Lines that the file has behind it are set aside, into a file beside it, when the run begins.

        Raises:
            CheckpointError: it is no state of such a logger.
        """
        position = state_dict.get("position")
        if not isinstance(position, int) or position < 0:
            raise CheckpointError(f"{type(self).__name__}: a position in the file was wanted, got {position!r}")
        super().load_state_dict(state_dict)
        self._keep = position

    def __repr__(self) -> str:
        """Show where it writes, and what."""
        return f"{type(self).__name__}({str(self.path)!r}, {self._shown()})"
