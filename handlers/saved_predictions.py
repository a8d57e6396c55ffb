"""Predictions on disk: safetensors files of so many samples each, an index, and a reader that loads what is asked for.

The index is written last: without one that says it is complete there is nothing to read. Parts are only removed from a
folder whose index says that they are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine import DataError
from ._samples import Kept, Layout, concatenate

__all__ = ["PartWriter", "SavedPredictions"]

_FORMAT = "pellucid predictions"
_VERSION = 1
_INDEX = "index.json"
_PARTS = "part-*.safetensors"


class SavedPredictions:
    """What :class:`Predictions` has written into a directory: read sample by sample, or as slices, when asked for.

    ``saved[3]`` and ``saved[10:20]`` are what the step returned for these samples, in the order of the data: a tensor,
    a tuple or a dict. Only the files that hold them are opened. With ``len`` it is a data set for a ``DataLoader``.

    Args:
        directory: where they were written.

    Raises:
        DataError: there are none, or the run that writes them has not ended.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        index = _read_index(self.directory)
        if index is None:
            raise DataError(f"{self.directory} holds no predictions: there is no {_INDEX} of Predictions in it")
        if not index["complete"]:
            raise DataError(
                f"{self.directory} holds no whole predictions: the run that writes them goes on, or was killed. Run "
                "it to its end"
            )
        self._layout = Layout(index["kind"], tuple(index["names"]))
        self._files = [part["file"] for part in index["parts"]]
        self._ends: list[int] = []
        for part in index["parts"]:
            self._ends.append((self._ends[-1] if self._ends else 0) + part["samples"])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors in the files: the keys, places in the tuple, or ``output``."""
        return self._layout.names

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._layout.put_together(self._read(range(len(self))[index]))
        place = range(len(self))[index]
        return self._layout.put_together(
            {name: tensor[0] for name, tensor in self._read(range(place, place + 1)).items()}
        )

    def parts(self) -> Iterator[Any]:
        """Yield the samples file by file."""
        for begin, end in zip([0, *self._ends], self._ends, strict=False):
            yield self[begin:end]

    def load(self) -> Any:
        """Return all of it."""
        return self[:]

    def _read(self, places: range) -> dict[str, Tensor]:
        first, last = (min(places), max(places)) if places else (0, -1)
        pieces = []
        for file, begin, end in zip(self._files, [0, *self._ends], self._ends, strict=False):
            if (begin <= last and first < end) or not places:
                pieces.append(self._read_file(file, max(0, first - begin), max(0, min(end, last + 1) - begin)))
            if not places:
                break
        whole = concatenate(pieces).tensors
        if places.step == 1:
            return whole
        return {name: tensor[[place - first for place in places]] for name, tensor in whole.items()}

    def _read_file(self, file: str, begin: int, end: int) -> Kept:
        from safetensors import safe_open

        with safe_open(self.directory / file, framework="pt") as opened:
            return Kept(self._layout, {name: opened.get_slice(name)[begin:end] for name in self.names})

    def __repr__(self) -> str:
        """Show how much there is, and where."""
        return f"SavedPredictions({str(self.directory)!r}: {len(self)} samples of {', '.join(self.names)})"


class PartWriter:
    """Writes samples into files of ``chunk_samples`` each. A folder has one at a time.

    Raises:
        DataError: the folder has files of these names that are not ours.
    """

    def __init__(self, directory: Path, chunk_samples: int) -> None:
        self._directory = directory
        self._chunk_samples = chunk_samples
        self._clear()
        directory.mkdir(parents=True, exist_ok=True)
        self._layout: Layout | None = None
        self._parts: list[dict[str, Any]] = []
        self._waiting: list[Kept] = []
        self._write_index(complete=False)

    def add(self, samples: Kept) -> None:
        """Take in samples, and write what fills a file."""
        self._layout = self._layout or samples.layout
        self._waiting.append(samples)
        if sum(map(len, self._waiting)) < self._chunk_samples:
            return
        whole = concatenate(self._waiting)
        full = len(whole) - len(whole) % self._chunk_samples
        for begin in range(0, full, self._chunk_samples):
            self._write_part(whole.part(begin, begin + self._chunk_samples))
        self._waiting = [whole.part(full, len(whole))] if full < len(whole) else []

    def finish(self) -> None:
        """Write the rest and the index."""
        if self._waiting:
            rest, self._waiting = concatenate(self._waiting), []
            if len(rest) or not self._parts:
                self._write_part(rest)
        self._write_index(complete=True)

    def give_up(self) -> None:
        """Remove what was written."""
        self._waiting = []
        self._clear()

    def _clear(self) -> None:
        check_directory(self._directory)
        # the index stays until the parts are gone: it says that they are ours
        for part in self._directory.glob(_PARTS):
            part.unlink()
        (self._directory / _INDEX).unlink(missing_ok=True)

    def _write_part(self, samples: Kept) -> None:
        from safetensors.torch import save_file

        name = f"part-{len(self._parts):05d}.safetensors"
        # a part of a larger tensor must not be saved with all of it
        save_file({key: tensor.clone() for key, tensor in samples.tensors.items()}, self._directory / name)
        _sync(self._directory / name)
        self._parts.append({"file": name, "samples": len(samples)})

    def _write_index(self, *, complete: bool) -> None:
        index: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "complete": complete}
        if self._layout is not None:
            index |= {"kind": self._layout.kind, "names": list(self._layout.names)}
        index |= {"samples": sum(part["samples"] for part in self._parts), "parts": self._parts}
        path = self._directory / _INDEX
        beside = path.with_suffix(".json.new")
        beside.write_text(json.dumps(index, indent=2) + "\n")
        _sync(beside)
        os.replace(beside, path)


def check_directory(directory: Path) -> None:
    """Refuse a folder in which the names that we write are somebody else's.

    Raises:
        DataError: it is one, or no folder.
    """
    if directory.exists() and not directory.is_dir():
        raise DataError(f"directory={str(directory)!r}: this is a file, a folder was wanted")
    if _read_index(directory) is None and any(directory.glob(_PARTS)):
        raise DataError(
            f"directory={str(directory)!r}: there are {_PARTS} in it without an {_INDEX} of ours, which would be "
            "overwritten: give another directory"
        )


def _read_index(directory: Path) -> dict[str, Any] | None:
    path = directory / _INDEX
    if not path.exists():
        return None
    try:
        index = json.loads(path.read_text())
    except ValueError:
        index = None
    if not isinstance(index, dict) or index.get("format") != _FORMAT:
        raise DataError(f"{path} is no index of predictions: give another directory")
    if index["version"] != _VERSION:
        raise DataError(f"{path} has version {index['version']!r}: version {_VERSION} was wanted")
    return index


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
