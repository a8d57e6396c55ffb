"""A text file that only grows, line by line, and that a resumed run goes on with.

What was written after the checkpoint that is resumed from comes again. Those lines, and all lines of another training
where a new one begins, are set aside into a file beside it: nothing is deleted.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from ..engine import HandlerError

__all__ = ["LogFile"]

logger = logging.getLogger("pellucid.handlers")

_CHUNK = 1 << 20


class LogFile:
    """An append-only file of lines.

    Args:
        path: the file; its folder is made when it is opened.
        header: the first line, with its end; empty: there is none.

    Raises:
        ValueError: there is a file that does not begin with this header.
    """

    def __init__(self, path: str | os.PathLike[str], header: bytes = b"") -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError(f"path={path!r}: the path of a file was wanted, such as 'runs/digits/metrics.csv'")
        self.path = Path(path)
        self._header = header
        self._file: Any = None
        self._end = self._size()  # where it ended when this object last looked
        self._check_header()

    def _check_header(self) -> None:
        if not self._end:
            return
        with self.path.open("rb") as file:
            found = file.read(len(self._header))
        if not self._header.startswith(found):
            raise ValueError(f"path={str(self.path)!r}: this file begins with {found!r} and is none of ours: "
                             "give another path")  # fmt: skip

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def position(self) -> int:
        """Where the next line will begin."""
        if self._file is not None:
            self._end = os.fstat(self._file.fileno()).st_size
        return self._end

    def open(self, keep: int | None) -> None:
        """Open for appending, without a line that was only half written.

        Args:
            keep: set everything behind this position aside; None: keep it all.

        Raises:
            HandlerError: somebody else has written to it since this object was made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = self._size()
        if size > self._end:
            raise HandlerError(
                f"{self.path} has grown by {size - self._end} bytes that this logger has not written: another one "
                "writes to it. Attach one logger to all engines, or give each a path of its own"
            )
        self._repair()
        if keep is not None:
            self._set_aside(keep)
        self._file = self.path.open("ab", buffering=0)
        if not self.position:
            self.append(self._header)

    def _repair(self) -> None:
        size, end = self._size(), 0
        if not size:
            return
        with self.path.open("r+b") as file:
            end = _end_of_last_line(file, size)
            if end < size:
                logger.warning("%s ends with half a line of %d bytes, which is cut off", self.path, size - end)
                file.truncate(end)

    def _set_aside(self, keep: int) -> None:
        """Move what is behind a position into a file of its own."""
        size = self._size()
        if keep > size or not self._is_line_end(keep):
            logger.warning(
                "%s is not the file that the checkpoint was saved with: what comes is appended to it", self.path
            )
            return
        if size <= max(keep, len(self._header)):
            return
        aside = self._free_path()
        if keep <= len(self._header):
            self.path.rename(aside)
        else:
            with self.path.open("r+b") as file, aside.open("xb") as rest:
                rest.write(self._header)
                file.seek(keep)
                while chunk := file.read(_CHUNK):
                    rest.write(chunk)
                rest.flush()
                os.fsync(rest.fileno())  # it is safe there before it goes here
                file.truncate(keep)
        logger.warning("%s: %d bytes of lines from beyond where this run begins are now in %s", self.path,
                       size - keep, aside)  # fmt: skip

    def _is_line_end(self, position: int) -> bool:
        if position == 0:
            return True
        with self.path.open("rb") as file:
            file.seek(position - 1)
            return file.read(1) == b"\n"

    def _free_path(self) -> Path:
        number = 1
        while (path := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        return path

    def append(self, lines: bytes) -> None:
        """Add whole lines; when this returns they outlive the process."""
        while lines:
            lines = lines[self._file.write(lines) :]

    def sync(self) -> None:
        """Bring it to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._end = self.position
        file, self._file = self._file, None
        file.close()

    def last_line(self) -> bytes:
        """Return the last whole line, without its end; empty if there is none but the header."""
        size = self._size()
        if size <= len(self._header):
            return b""
        with self.path.open("rb") as file:
            end = _end_of_last_line(file, size)
            if end <= len(self._header):
                return b""
            begin = _end_of_last_line(file, end - 1)
            file.seek(begin)
            return file.read(end - begin - 1)


def _end_of_last_line(file: Any, size: int) -> int:
    """Return the position behind the last line end before ``size``."""
    while size:
        begin = max(0, size - _CHUNK)
        file.seek(begin)
        found: int = file.read(size - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        size = begin
    return 0
