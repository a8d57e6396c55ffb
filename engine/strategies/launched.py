"""What a rank that ``launch`` has started does, and how it reports to the process that has started it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import StrategyError
from .processes import join, leave_group, open_sockets
from .relaying import leave_notebook, relay_to
from .sending import Call, check_is_good_copy, unpack

__all__ = ["Job", "Report", "reports", "returned", "run", "started"]

_LINGER_SEC = 0.5
_PATIENCE_SEC = 5.0


@dataclass(frozen=True)
class Job:
    """What each rank is to do.

    Attributes:
        folder: where the ranks leave what they have to say.
        nprocs: the number of ranks.
        backend: as in ``launch``.
        call: the function and its arguments, if the ranks are copies of the process; else they are in a file.
        reason: why the ranks are copies.
        start_method: of processes that a rank starts, such as the workers of its loaders: as in the caller's process.
    """

    folder: Path
    nprocs: int
    backend: str | None
    call: Call | None = None
    reason: str = ""
    start_method: str | None = None

    @property
    def value_file(self) -> Path:
        """Where rank 0 leaves the value."""
        return self.folder / "value.pt"


@dataclass(frozen=True)
class Report:
    """The error of a rank: when it was raised, itself if it can be pickled, and in words."""

    time: float
    rank: int
    error: bytes | None
    kind: str
    message: str
    text: str


def run(job: Job) -> None:
    """Be a rank, from the first line to the last. A collective."""
    if not job.folder.exists():
        sys.exit(1)  # the launcher was stopped while this process was starting
    rank, inherited = int(os.environ["RANK"]), open_sockets().keys()
    try:
        _settle(job, rank)
        fn, args = job.call or unpack(job.folder)
        join(job.backend)
        value = _call(fn, args)
        if rank == 0:
            _save(value, job.value_file)
        _write(job.folder / f"returned.{rank}", b"")
        leave_group(inherited)
    except BaseException as error:
        _report(job.folder, rank, error)
        sys.last_value = error  # as if nobody had caught it: what is done at the end of the program looks here
        _end()


def reports(folder: Path) -> list[Report]:
    """Return what ranks have reported, in the order of time."""
    return sorted((pickle.loads(file.read_bytes()) for file in folder.glob("failed.*")), key=lambda report: report.time)


def returned(folder: Path) -> list[int]:
    """Return the ranks on which the function has returned."""
    return sorted(int(file.suffix[1:]) for file in folder.glob("returned.*"))


def started(folder: Path) -> dict[int, int]:
    """Return the ranks that have come to life, and their process ids, which are those of their process groups too."""
    return {int(file.suffix[1:]): int(file.read_text()) for file in folder.glob("started.*")}


def _settle(job: Job, rank: int) -> None:
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C in a terminal comes once, from the launcher; what a rank starts can be ended with it
    _write(job.folder / f"started.{rank}", str(os.getpid()).encode())
    multiprocessing.set_start_method(job.start_method, force=True)  # it has that by which it was started itself
    relay_to(job.folder)
    if job.call is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)  # the launcher's handlers were copied with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)  # the event loop of the process that was copied
        leave_notebook()
        torch.set_num_threads(1)  # the threads of OpenMP were not copied, and would be waited for
        if job.backend != "cpu:gloo":
            check_is_good_copy(job.reason, int(os.environ["LOCAL_RANK"]))


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return fn(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        return None


def _save(value: Any, file: Path) -> None:
    try:
        torch.save(value, file)
    except Exception as error:  # whatever somebody's __reduce__ raises
        raise StrategyError(
            f"the function returned a {type(value).__name__} on rank 0, which cannot be pickled to be brought back "
            f"({type(error).__name__}: {error}): return numbers, tensors, or a state_dict()"
        ) from error


def _report(folder: Path, rank: int, error: BaseException) -> None:
    shown = error.__traceback__
    while shown is not None and shown.tb_next is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    text = "".join(traceback.format_exception(type(error), error, shown)).rstrip()
    report = Report(time.monotonic(), rank, _pickled(error), type(error).__name__, str(error), text)
    with suppress(FileNotFoundError):  # nobody waits for it any more
        _write(folder / f"failed.{rank}", pickle.dumps(report))


def _pickled(error: BaseException) -> bytes | None:
    """Return the error as bytes out of which it comes back as it is, or None."""
    try:
        pickled = pickle.dumps(error)
        copy = pickle.loads(pickled)
    except Exception:  # whatever somebody's __reduce__ or __init__ raises
        return None
    return pickled if type(copy) is type(error) and str(copy) == str(error) else None


def _write(file: Path, content: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    unfinished = file.with_name(f"unfinished-{file.name}")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def _end() -> NoReturn:
    """End with an error: soon, but not before the launcher has seen one that was killed, after which this one fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(_PATIENCE_SEC, exit=True, file=nowhere)  # also where Python is no more
    time.sleep(_LINGER_SEC)
    sys.exit(1)
