"""Checkpoints of an engine: save one, resume from the newest that is whole, load its weights into a plain module."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import nn

from .bundle import collect, writes
from .errors import CheckpointError, RunError
from .folder import (
    Content,
    InvalidCheckpoint,
    checkpoints_in,
    clear,
    holds_parts,
    is_named_as_one,
    load_tensors,
    read,
    read_manifest,
    read_weights,
    remove,
    verify,
    write,
)
from .plain import from_plain
from .restoring import check, check_weights, restore
from .strategies import Strategy

__all__ = [
    "CheckpointInfo",
    "Saving",
    "clear_unfinished",
    "list_checkpoints",
    "load_weights",
    "remove_checkpoint",
    "resume",
    "save_checkpoint",
]

_log = logging.getLogger("pellucid.engine")
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, by its manifest.

    Attributes:
        path: its folder.
        epoch: of the run when it was saved, counted from 1.
        iteration: batches done.
        score: the monitored metric, recorded at that iteration; None: it was not.
        about: what else was noted when it was saved.
        passed_over: newer ones that ``resume`` could not use, with the reason.
    """

    path: Path
    epoch: int
    iteration: int
    score: float | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)


# ---------------------------------------------------------------------- saving


class Saving:
    """A checkpoint that is being written. Made by :func:`save_checkpoint`."""

    def __init__(self, strategy: Strategy, work: Callable[[], Path] | None) -> None:
        """Write by calling ``work``, which the other ranks have not."""
        self._strategy = strategy
        self._work = work
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write in the background."""
        # no daemon: the program does not end before the checkpoint is there
        self._thread = threading.Thread(target=self.write, name="pellucid checkpoint")
        self._thread.start()

    def write(self) -> None:
        """Write now."""
        try:
            if self._work is not None:
                self._path = self._work()
        except BaseException as error:
            self._error = error
            if self._thread is not None:  # nobody may ever ask
                _log.error("a checkpoint could not be written in the background: %s", _describe(error))
        finally:
            self._work = None  # and with it the copy of the weights

    def join(self) -> None:
        """Wait for this rank's part of it. No collective; raises nothing."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise what has gone wrong in the background on this rank by now. Does not wait.

        Raises:
            OSError: as :func:`save_checkpoint`.
        """
        if self._error is not None and (self._thread is None or not self._thread.is_alive()):
            raise self._error

    def wait(self) -> Path:
        """Wait until it is written, and return its folder. A collective.

        Raises:
            OSError: it could not be written; on the other ranks CheckpointError.
        """
        self.join()
        error = self._error
        path, problem = self._strategy.broadcast((self._path, None if error is None else _describe(error)))
        if error is not None:
            raise error
        if problem is not None:
            raise CheckpointError(f"rank 0 could not write the checkpoint: {problem}")
        return Path(path)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def save_checkpoint(
    engine: Any,
    directory: PathLike,
    *,
    about: Mapping[str, Any] | None = None,
    background: bool = False,
    then: Callable[[Path], None] | None = None,
) -> Saving:
    """Save everything that ``engine`` needs to go on, as a new folder in ``directory``. A collective.

    What is saved: model, optimizers, loss scale, counters, declared fields, metrics, the place in the data, the random
    state of every rank, gradients of a window in progress, and every attached object that has ``state_dict`` and
    ``load_state_dict``. Rank 0 writes; the folder is there as a whole or not at all.

    Args:
        engine: at rest, or in an event outside of its step.
        directory: is made where it is missing.
        about: goes into the manifest, numbers and texts; ``score`` is what :class:`CheckpointInfo` shows.
        background: return as soon as everything is copied to the host; without it, when everything is written.
        then: called with the new folder on the rank that has written it, in the background too.

    Raises:
        CheckpointError: a part of it holds what a weights-only loader would not read.
        OSError: it could not be written; nothing is left of it then.
    """
    state, target = engine.state, _folder_path(directory)
    content = collect(engine, copy=background)
    noted = {"epoch": state.epoch, "iteration": state.iteration, "world_size": state.world_size, **(about or {})}
    noted["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def work() -> Path:
        assert content is not None
        path = write(target, content, noted)
        if then is not None:
            then(path)
        return path

    saving = Saving(engine.strategy, None if content is None else work)
    if background:
        saving.start()
    else:
        saving.write()
        saving.wait()
    return saving


def list_checkpoints(directory: PathLike) -> list[CheckpointInfo]:
    """Return the checkpoints in ``directory``, the newest first, by their manifests. Files are not compared."""
    found = []
    for folder in checkpoints_in(_folder_path(directory)):
        try:
            found.append(_info(folder, read_manifest(folder)))
        except CheckpointError:
            continue
    return found


def _info(folder: Path, manifest: Mapping[str, Any], passed_over: Mapping[str, str] | None = None) -> CheckpointInfo:
    rest = {key: value for key, value in manifest.items() if key not in ("files", "modules", "format")}
    epoch, iteration, score = rest.pop("epoch", 0), rest.pop("iteration", 0), rest.pop("score", None)
    return CheckpointInfo(folder, epoch, iteration, score, rest, passed_over or {})


def remove_checkpoint(path: PathLike) -> None:
    """Remove a checkpoint's folder; one that is gone is gone.

    Raises:
        CheckpointError: it is something else than a checkpoint, which is left alone.
        OSError: it cannot be removed.
    """
    remove(_folder_path(path))


def clear_unfinished(directory: PathLike) -> None:
    """Remove what processes that are no more have left half-written in ``directory``."""
    clear(_folder_path(directory))


# ---------------------------------------------------------------------- resuming


def resume(engine: Any, directory: PathLike) -> CheckpointInfo | None:
    """Load the newest whole checkpoint in ``directory`` into ``engine``, so that its next run goes on from there.

    The engine must be built as it was: model, optimizers, handlers. Damaged and half-written checkpoints are passed
    over, with a warning that names each and the reason. A collective; every rank reads the files.

    Args:
        engine: at rest, with its handlers attached.
        directory: what ``Checkpoint`` was given, or the folder of one checkpoint.

    Returns:
        what was loaded, None if the directory is empty or not there yet.

    Raises:
        CheckpointError: it does not fit, a later version has written it, it holds what only an unsafe loader would
            read, none of those that are there is whole, or the path is a file or a checkpoint that is not there. The
            engine is as it was then.
        RunError: the engine is running.

    Example:
        >>> Checkpoint("runs/digits").attach(trainer)
        >>> resume(trainer, "runs/digits")
        >>> result = trainer.run(loader, max_epochs=2)
    """
    if engine.is_running():
        raise RunError(f"engine {engine.name!r} is running: resume() is for an engine at rest")
    strategy: Strategy = engine.strategy
    path = _folder_path(directory)
    found = _agreed(strategy, path, lambda: _choose(path), by_first=True)
    if found is None:
        return None
    folder, manifest, passed_over = found
    if passed_over and writes(strategy):
        told = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
        _log.warning("resuming from %s, as newer checkpoints cannot be used: %s", folder, told)

    def load() -> Content:
        content = read(folder, manifest)
        check(engine, content, folder)
        return content

    content = _agreed(strategy, folder, load)
    _agreed(strategy, folder, lambda: restore(engine, content, folder))
    return _info(folder, manifest, passed_over)


def _agreed(strategy: Strategy, where: Path, work: Callable[[], Any], by_first: bool = False) -> Any:
    """Do something on every rank, or on the first for all, and let an error of one be the error of all."""
    value, error = None, None
    if not by_first or writes(strategy):
        try:
            value = work()
        except CheckpointError as caught:
            error = caught
        except Exception as caught:
            error = CheckpointError(
                f"{where} cannot be loaded ({_describe(caught)}): it does not fit this engine, or was written by hand "
                "or by another version"
            )
            error.__cause__ = caught
    problems = strategy.gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise CheckpointError(f"rank {rank}: {problem}")
    return strategy.broadcast(value) if by_first else value


def _folder_path(path: Any) -> Path:
    """Return the absolute path of a folder, with ``~`` for the home directory; it need not be there.

    Raises:
        TypeError: no path.
    """
    if isinstance(path, CheckpointInfo):
        raise TypeError(f"a path was wanted, and this is what is known of a checkpoint: give its path, {path.path}")
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise TypeError(f"{path!r}: the path of a folder was wanted, such as 'runs/digits'")
    return Path(path).expanduser().absolute()


def _choose(directory: Path) -> tuple[Path, dict[str, Any], dict[str, str]] | None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file: give the directory of the checkpoints, or the folder of one")
    if holds_parts(directory) or is_named_as_one(directory):
        manifest = read_manifest(directory)
        verify(directory, manifest)
        return directory, manifest, {}
    passed_over: dict[str, str] = {}
    for folder in checkpoints_in(directory):
        try:
            manifest = read_manifest(folder)
            verify(folder, manifest)
        except InvalidCheckpoint as error:
            passed_over[folder.name] = str(error)
        else:
            return folder, manifest, passed_over
    if passed_over:
        reasons = "; ".join(passed_over.values())
        raise CheckpointError(
            f"none of the checkpoints in {directory} can be used: {reasons}. To begin afresh, give another directory"
        )
    return None


def load_weights(module: nn.Module, path: PathLike, *, part: str = "") -> None:
    """Load the weights of a checkpoint into a plain module, without any engine.

    Args:
        module: is changed in place; not one that is sharded.
        path: the folder of a checkpoint, or a ``.safetensors`` file.
        part: which model, where the engine had a mapping of them.

    Raises:
        CheckpointError: there is no whole checkpoint, or the weights do not fit the module, which is unchanged then.
    """
    path = _folder_path(path)
    if path.is_file() and path.name != "manifest.json":
        state: dict[str, Any] = dict(load_tensors(path))
    else:
        state = _saved_weights(path, part)
    check_weights(module, state, path)
    module.load_state_dict(state)


def _saved_weights(folder: Path, part: str) -> dict[str, Any]:
    if not (folder / "manifest.json").exists():
        names = [one.name for one in checkpoints_in(folder)]
        inside = f"it has the checkpoints {', '.join(names)}: name one" if names else "it is no checkpoint"
        raise CheckpointError(f"{folder} has no manifest.json; {inside}")
    manifest = read_manifest(folder)
    verify(folder, manifest)
    weights, extra = read_weights(folder, manifest)
    if part not in weights:
        raise CheckpointError(f"{folder} has no model {part!r}: part= must be one of {list(weights)}")
    return {**weights[part], **from_plain(extra[part], copy=False)}
