"""A checkpoint on disk: a folder that is there as a whole or not at all.

    0007_epoch_3_iteration_120/
        manifest.json        format, counters, score, versions; size and SHA-256 of each other file
        model.safetensors    the weights under the model's own keys; for a mapping of models one file for each
        training.pt          everything else; read with torch's weights-only loader
        extra.pt             what a model's state dictionary has beside plain tensors; where there is such a thing

It is written under another name, brought to the disk, and renamed. The number in front counts the checkpoints of a
directory, so the largest is the newest. Nothing that is read from it is unpickled, and no name in a manifest leads out
of the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "Content",
    "InvalidCheckpoint",
    "checkpoints_in",
    "clear",
    "holds_parts",
    "is_named_as_one",
    "load_tensors",
    "read",
    "read_manifest",
    "read_weights",
    "remove",
    "verify",
    "write",
]

FORMAT = 1
_log = logging.getLogger("pellucid.engine")
_NAME = re.compile(r"(\d{4,})_epoch_\d+_iteration_\d+")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WRITING, _REMOVING = ".writing-", ".removing-"
_MANIFEST, _TRAINING, _EXTRA = "manifest.json", "training.pt", "extra.pt"
_MOST_BYTES = 10_000_000  # of a manifest
_CHUNK = 1 << 20


class InvalidCheckpoint(CheckpointError):
    """A folder that is no whole checkpoint: something of it is missing or altered."""


@dataclass
class Content:
    """What a checkpoint holds.

    Attributes:
        weights: for each model by name (one that is not in a mapping has the name ""), its tensors by key.
        extra: for each model, what else its state dictionary has.
        training: everything else, plain.
    """

    weights: dict[str, dict[str, Tensor]]
    extra: dict[str, dict[str, Any]]
    training: dict[str, Any]


# ---------------------------------------------------------------------- writing


def write(directory: Path, content: Content, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint into ``directory``, and return its folder. On an error nothing of it is left.

    Args:
        directory: is made where it is missing.
        content: plain.
        about: goes into the manifest; has ``epoch`` and ``iteration``.

    Raises:
        OSError: the disk is full, or the directory cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _new_folder(directory) as folder:
        modules = _write_weights(folder, content.weights)
        torch.save(content.training, folder / _TRAINING)
        if any(content.extra.values()):
            torch.save(content.extra, folder / _EXTRA)
        files = {path.name: _describe_file(path) for path in sorted(folder.iterdir())}
        manifest = {"format": FORMAT, **about, "versions": _versions(), "modules": modules, "files": files}
        with open(folder / _MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        final = _rename(folder, directory, about)
    _sync(directory)
    return final


@contextmanager
def _new_folder(directory: Path) -> Iterator[Path]:
    folder = directory / f"{_WRITING}{os.urandom(6).hex()}"  # a checkpoint is for whoever may read the directory
    folder.mkdir()
    held = None
    try:
        held = _hold(folder)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


def _hold(folder: Path) -> int | None:
    """Mark a folder as one that a living process is writing, or return None where that cannot be done."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _write_weights(folder: Path, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    from safetensors.torch import save_file

    modules: dict[str, str] = {}
    for number, (part, tensors) in enumerate(weights.items()):
        readable = part if _FILE.fullmatch(part) else str(number)
        name = f"model-{readable}.safetensors" if part else "model.safetensors"
        if name in modules.values():
            name = f"model-{readable}-{number}.safetensors"
        modules[part] = name
        save_file(_each_alone(tensors), folder / name)
    return modules


def _each_alone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors that share memory, such as tied weights, each its own: the file has every key."""
    seen: set[int] = set()
    found = {}
    for key, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        is_shared = address in seen and tensor.numel() > 0
        seen.add(address)
        found[key] = tensor.clone(memory_format=torch.contiguous_format) if is_shared else tensor.contiguous()
    return found


def _rename(folder: Path, directory: Path, about: Mapping[str, Any]) -> Path:
    numbers = [int(match[1]) for match in map(_NAME.fullmatch, os.listdir(directory)) if match is not None]
    number = max(numbers, default=0)
    while True:  # until no other process has taken the name
        number += 1
        final = directory / f"{number:04}_epoch_{about['epoch']}_iteration_{about['iteration']}"
        try:
            os.rename(folder, final)
        except OSError:
            if not final.exists():
                raise
        else:
            return final


def _describe_file(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # pragma: no cover - Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("pellucid", "torch", "pytorch-ignite"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---------------------------------------------------------------------- removing


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, so that what is left by a crash is no checkpoint. One that is gone is gone.

    Raises:
        CheckpointError: it is something else than a checkpoint.
        OSError: it cannot be removed.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder, so it is no checkpoint, and is not removed")
    try:
        read_manifest(folder)
    except InvalidCheckpoint as error:
        raise CheckpointError(
            f"{folder} is no checkpoint, or one that is damaged, and is not removed ({error}): what is known to be of "
            "no use goes by shutil.rmtree"
        ) from None
    doomed = folder.with_name(_REMOVING + folder.name)
    with suppress(FileNotFoundError):
        os.rename(folder, doomed)
        shutil.rmtree(doomed)


def clear(directory: Path) -> None:
    """Remove what processes that are no more have left half-written or half-removed."""
    with suppress(OSError):
        for folder in directory.iterdir():
            if folder.name.startswith(_REMOVING):
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.name.startswith(_WRITING) and fcntl is not None:
                held = _hold(folder)
                if held is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(held)


# ---------------------------------------------------------------------- reading


def is_named_as_one(folder: Path) -> bool:
    """Say whether a path has the name of a checkpoint, whatever is there."""
    return _NAME.fullmatch(folder.name) is not None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the folders in ``directory`` that are named as checkpoints, the newest first."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), match[0]) for match in map(_NAME.fullmatch, names) if match is not None]
    return [directory / name for _, name in sorted(found, reverse=True)]


def holds_parts(folder: Path) -> bool:
    """Say whether there are files of a checkpoint in a folder."""
    return any((folder / name).exists() for name in (_MANIFEST, _TRAINING, "model.safetensors"))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Raises:
        InvalidCheckpoint: there is none, or it makes no sense.
        CheckpointError: a later version has written it.
    """
    path = folder / _MANIFEST
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise InvalidCheckpoint(f"{path} is no regular file")
        if found.st_size > _MOST_BYTES:
            raise InvalidCheckpoint(f"{path}: {found.st_size} bytes are too many for a manifest")
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path} is no manifest: {error}") from error
    number = manifest.get("format") if isinstance(manifest, dict) else None
    if type(number) is not int or number < 1:
        raise InvalidCheckpoint(f"{path} is no manifest: it names no format")
    if number > FORMAT:
        raise CheckpointError(
            f"{folder} has format {number}, and this version of pellucid reads up to {FORMAT}: load it with the "
            f"version that wrote it ({manifest.get('versions')}) or a later one"
        )
    return _checked(path, manifest)


def _checked(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    files, modules = manifest.get("files"), manifest.get("modules")
    if not isinstance(files, dict) or not isinstance(modules, dict) or _TRAINING not in files:
        raise InvalidCheckpoint(f"{path} is no manifest: it does not name its files")
    for name, described in files.items():
        if not _FILE.fullmatch(name) or not isinstance(described, dict) or set(described) != {"size", "sha256"}:
            raise InvalidCheckpoint(f"{path} names a file {name!r} that no checkpoint has")
    unknown = [name for name in modules.values() if not isinstance(name, str) or name not in files]
    if unknown:
        raise InvalidCheckpoint(f"{path} has a model in {unknown[0]!r}, which it does not list among its files")
    return manifest


def verify(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare every file with the manifest.

    Raises:
        InvalidCheckpoint: one is missing or has changed.
    """
    for name, described in manifest["files"].items():
        path = folder / name
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise InvalidCheckpoint(f"{path} is no regular file")
            if found.st_size != described["size"]:
                raise InvalidCheckpoint(f"{path} has {found.st_size} bytes and not {described['size']}")
            if _sha256(path) != described["sha256"]:
                raise InvalidCheckpoint(f"{path} has changed since it was written: its SHA-256 is another")
        except OSError as error:
            raise InvalidCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def read_weights(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return the weights of each model, and what else their state dictionaries have, on the host.

    Raises:
        CheckpointError: a file cannot be read.
    """
    weights = {part: load_tensors(folder / name) for part, name in manifest["modules"].items()}
    extra = _load_safely(folder / _EXTRA) if _EXTRA in manifest["files"] else {}
    return weights, {part: extra.get(part, {}) for part in weights}


def read(folder: Path, manifest: Mapping[str, Any]) -> Content:
    """Return what a checkpoint holds, on the host.

    Raises:
        CheckpointError: a file cannot be read, or holds what only an unsafe loader would read.
    """
    weights, extra = read_weights(folder, manifest)
    training = _load_safely(folder / _TRAINING)
    if not isinstance(training, dict):
        raise CheckpointError(f"{folder / _TRAINING} holds a {type(training).__name__} and not a dictionary")
    return Content(weights, extra, training)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the host.

    Raises:
        CheckpointError: it is none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    return tensors


def _load_safely(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch's own message advises to switch the safe loader off
        raise CheckpointError(
            f"{path} cannot be read by torch's weights-only loader ({type(error).__name__}): it is damaged, or holds "
            "objects, which could run code when they are loaded"
        ) from None
