"""Ranks on this machine, started from a script or a notebook through torch's own elastic launcher, as torchrun does.

What the launcher leaves to its caller is done here: to find a way for the function into the ranks, to bring rank 0's
value and a rank's own error back, and to leave this process as it was.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ..errors import StrategyError
from .launched import Job, Report, reports, returned, run, started
from .processes import check_backend
from .relaying import relayed
from .sending import check_can_be_copied, pack

__all__ = ["launch"]

ValueT = TypeVar("ValueT")

_MARK = "PELLUCID_LAUNCHED_BY"
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # the launcher sets it, and these handlers, and leaves them so
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
_PATIENCE_SEC = 5
# these report at length what launch raises
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


def launch(fn: Callable[..., ValueT], *args: Any, nprocs: int, backend: str | None = None) -> ValueT:
    """Call ``fn(*args)`` on each of ``nprocs`` ranks on this machine, and return what it returned on rank 0.

    Every rank is a process of its own with the environment of torchrun, in one process group, so that
    ``Engine(strategy="auto")`` trains in parallel in it. The group is there before ``fn`` is called, and ended when it
    has returned on that rank. Each rank gets a copy of ``args``, and the caller a copy of the value; tensors come on
    the CPU. Several ranks compute with one thread each, unless OMP_NUM_THREADS is set. What the ranks print appears
    here.

    Where ``fn`` and ``args`` can be imported and pickled, the ranks are new interpreters ("spawn"), so a script calls
    ``launch`` under ``if __name__ == "__main__":``, as it is read again in each. Else, as for functions of a notebook
    and for closures, they are copies of this process ("fork"), which is possible as long as no accelerator has been
    used in it; each of them computes with one thread, and what it displays in a notebook appears as text.

    Args:
        fn: called on every rank.
        args: its arguments.
        nprocs: the number of ranks, at least 1; at most one for each accelerator of this machine, if it has any.
        backend: of the process group, as in ``torch.distributed.init_process_group``. None: gloo for the CPU, and
            beside it the accelerator's own. ``"cpu:gloo"``: the ranks work on the CPU, whatever else there is.

    Raises:
        StrategyError: ``launch`` is called on a rank, or cannot start what it is asked for; a rank was killed, or its
            error or the value cannot be pickled.
        Exception: whatever ``fn`` raised on the rank that failed first, with that rank's number and traceback as its
            cause. The other ranks are ended.
        KeyboardInterrupt: Ctrl-C. The ranks get it first, and are ended if they take longer than some seconds.
    """
    _check(fn, nprocs, backend)
    with tempfile.TemporaryDirectory(prefix="pellucid-launch-", ignore_cleanup_errors=True) as name:
        job = Job(Path(name), nprocs, backend, start_method=multiprocessing.get_start_method(allow_none=True))
        reason = pack(fn, args, job.folder)
        if reason is not None:
            check_can_be_copied(reason)
            job = replace(job, call=(fn, args), reason=reason)
        stopped_by = _start(job)
        if stopped_by is None:
            value: ValueT = torch.load(job.value_file, map_location="cpu", weights_only=False)
            return value
    signal.raise_signal(stopped_by)  # for whom it was: KeyboardInterrupt, the end of the program, or a handler
    raise StrategyError(f"the ranks were stopped, as this process got {stopped_by.name}")


def _check(fn: Callable[..., Any], nprocs: int, backend: str | None) -> None:
    if not callable(fn):
        raise StrategyError(f"launch calls a function on every rank, got {fn!r}: pass the function, then its arguments")
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise StrategyError(f"nprocs={nprocs!r} must be a whole number of ranks, 1 or more")
    if not dist.is_available():
        raise StrategyError("launch needs torch.distributed, which this torch is built without")
    if "RANK" in os.environ or dist.is_torchelastic_launched():
        rank, world_size = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
        raise StrategyError(
            f"launch was called on rank {rank} of {world_size} (RANK, WORLD_SIZE): this process is a rank already, "
            "started by torchrun or by launch. Call the function itself, or start the script with plain python"
        )
    if dist.is_initialized():
        raise StrategyError(
            "launch was called in a process that is in a process group: call torch.distributed.destroy_process_group() "
            "before it"
        )
    launcher = os.environ.get(_MARK)
    if launcher == str(os.getpid()):
        raise StrategyError("launch is at work in this process already, in another thread: wait until it has returned")
    if launcher is not None:
        raise StrategyError(
            "launch was called while a rank was starting, which reads the main script again: call it under "
            "`if __name__ == '__main__':`"
        )
    check_backend(backend)


def _start(job: Job) -> signal.Signals | None:
    """Run the ranks to their end; return the signal that stopped them early, if one did.

    Raises:
        Exception: see ``launch``.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    options: dict[str, Any] = {}
    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):  # not in torch 2.6
        options["shutdown_timeout"] = _PATIENCE_SEC
    try:
        with relayed(job.folder), _left_as_it_was(_environment(job)), _no_rank_left(job):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=job.nprocs,
                run_id=uuid.uuid4().hex,
                role="rank",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                start_method="spawn" if job.call is None else "fork",
                logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
                **options,
            )
            elastic_launch(config, run)(job)
    except SignalException as error:
        return error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        exit_code = failure.exitcode
    else:
        return None
    _raise_failure(job, rank, exit_code)


def _raise_failure(job: Job, rank: int, exit_code: int) -> NoReturn:
    """Raise the error that came first: the others of a group fail in turn."""
    known = reports(job.folder)
    if rank not in [report.rank for report in known]:
        raise StrategyError(_last_words(job, rank, exit_code))
    first = known[0]
    gone = ", ".join(str(one) for one in returned(job.folder))
    place = f"on rank {first.rank} of {job.nprocs}{gone and f', when it had returned on {gone}'}"
    raise _own_error(first) from _OnRank(f"{place}:\n\n{first.text}")


class _OnRank(Exception):
    """Shows the traceback of a rank above the error that was raised there."""


def _own_error(report: Report) -> BaseException:
    if report.error is not None:
        with suppress(Exception):  # a class that is found on the rank only
            error: BaseException = pickle.loads(report.error)
            return error
    return StrategyError(
        f"rank {report.rank} raised {report.kind}: {report.message} (an error that cannot be pickled: its traceback is "
        "above)"
    )


def _last_words(job: Job, rank: int, exit_code: int) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in list(signal.Signals) else f"signal {-exit_code}"
        often = "; often that is the system, out of memory" if name == "SIGKILL" else ""
        return f"rank {rank} of {job.nprocs} was ended by {name}{often}"
    text = f"rank {rank} of {job.nprocs} ended with exit code {exit_code}"
    if rank in started(job.folder):
        return f"{text}, without an error"
    return (
        f"{text} before it could call the function; what it printed says why. A script calls launch under "
        "`if __name__ == '__main__':`"
    )


def _environment(job: Job) -> dict[str, str]:
    variables = {_MARK: str(os.getpid())}
    if job.nprocs > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"  # as torchrun does; a new interpreter reads it as it loads torch
    if job.call is not None:
        # the launcher asks for CUDA, and the usual way to ask would make it unusable in a copy of this process
        variables["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return variables


@contextmanager
def _left_as_it_was(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and put them and what the launcher changes back: a variable, handlers, levels of loggers."""
    variables = {name: os.environ.get(name) for name in (*environment, _SIGNALS_VARIABLE)}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    loggers = {logger: logger.disabled for logger in map(logging.getLogger, _LOGGERS)}
    try:
        os.environ.update(environment)
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            # Python 3.12 warns of the threads of a process that is copied, and the launcher's are always there
            warnings.filterwarnings("ignore", r".*use of fork\(\)", DeprecationWarning)
            # the launcher enables Python's fault handler in a rank, whether its stderr is a file or not
            warnings.filterwarnings("ignore", "Unable to enable fault handler")
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: it was not set from Python, and cannot be
                    signal.signal(number, handler)
        for logger, disabled in loggers.items():
            logger.disabled = disabled
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_rank_left(job: Job) -> Iterator[None]:
    """End what is left of the ranks if they did not end by themselves, with the processes that they have started."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        ranks = [one for one in multiprocessing.active_children() if one not in before and not one.daemon]
        for process in ranks:
            process.kill()
        for pid in started(job.folder).values():
            if hasattr(os, "killpg"):
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        for process in ranks:
            process.join(_PATIENCE_SEC)
        raise
