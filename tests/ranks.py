"""A pool of processes that run one body on several ranks, over gloo on the loopback interface.

The processes live as long as the test session, since starting one takes seconds; every call makes a process group of
its own out of the first ``world_size`` of them. A body is a plain function of a test module: it is found by its file
and name, so it needs no import of the module by name. A body that hangs is a failure: the pool is ended and made anew.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["RANK_OF_THE_POOL", "RankError", "RankTimeout", "run_on_ranks"]

_TIMEOUT_SEC = 60.0
_PATIENCE_SEC = 1.5  # with ranks that go on after another one has failed, before that one's process is ended
RANK_OF_THE_POOL = "a rank of the test pool"
_SPAWN = multiprocessing.get_context("spawn")


class RankError(Exception):
    """A rank has raised; its traceback is in the message, and ``rank`` and ``kind`` name it."""

    def __init__(self, rank: int, kind: str, text: str, others: dict[int, str]) -> None:
        super().__init__(f"rank {rank} raised {kind}\n{text}")
        self.rank = rank
        self.kind = kind
        self.text = text
        self.others = others


class RankTimeout(Exception):
    """A body has not ended in time."""


def run_on_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_sec: float = _TIMEOUT_SEC,
    group: bool = True,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``body(*args)`` on each of ``world_size`` ranks and return what each returned, by rank.

    Args:
        body: a function at the top level of a test module.
        world_size: 1 to 4.
        args: picklable.
        timeout_sec: of the whole call.
        group: make the process group beforehand; else only the environment of torchrun is set.
        env: further variables.

    Raises:
        RankError: the first rank that raised.
        RankTimeout: as the name says.
    """
    return _pool().run(body, world_size, args, timeout_sec, group, env or {})


class _Pool:
    def __init__(self) -> None:
        self.workers: list[tuple[Any, Any]] = []

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        timeout_sec: float,
        group: bool,
        env: dict[str, str],
    ) -> list[Any]:
        path = sys.modules[body.__module__].__file__
        while len(self.workers) < world_size:
            here, there = _SPAWN.Pipe()
            process = _SPAWN.Process(name=RANK_OF_THE_POOL, target=_serve, args=(there, [p for p in sys.path if p]))
            process.start()
            there.close()
            self.workers.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.workers[:world_size]):
                pipe.send((path, body.__qualname__, args, rank, world_size, f"{folder}/store", group, env))
            return self._collect(world_size, timeout_sec)

    def _collect(self, world_size: int, timeout_sec: float) -> list[Any]:
        answers: dict[int, tuple[Any, ...]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world_size])}
        deadline = time.monotonic() + timeout_sec
        ended = False
        while len(answers) < world_size:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            failed_first = [rank for rank, answer in answers.items() if answer[0] != "ok"]
            patience = deadline - time.monotonic()
            if failed_first and not ended:
                patience = min(patience, _PATIENCE_SEC)
            ready = multiprocessing.connection.wait(waiting, max(0.0, patience))
            if not ready and failed_first and not ended:
                ended = True  # as ranks of a job: their connections go, for which the others may wait
                for rank in failed_first:
                    self.workers[rank][0].kill()
                continue
            if not ready:
                self.end()
                raise RankTimeout(f"ranks {sorted(set(pipes.values()) - set(answers))} did not end in {timeout_sec} s")
            for pipe in ready:
                try:
                    answers[pipes[pipe]] = pipe.recv()
                except EOFError:
                    answers[pipes[pipe]] = ("died", "the process ended", "", 0.0)
            if any(answer[0] != "ok" for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + 20.0)  # the others must notice, or be ended
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        if ended or any(answer[0] == "died" for answer in failed.values()):
            self.end()
        if failed:
            rank = min(failed, key=lambda rank: failed[rank][3])  # the first in time
            others = {other: f"{failed[other][1]}\n{failed[other][2]}" for other in failed if other != rank}
            raise RankError(rank, failed[rank][1], failed[rank][2], others)
        return [answers[rank][1] for rank in range(world_size)]

    def end(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []


_the_pool: list[_Pool] = []


def _pool() -> _Pool:
    if not _the_pool:
        _the_pool.append(_Pool())
        atexit.register(_the_pool[0].end)
    return _the_pool[0]


def _serve(pipe: Any, path: list[str]) -> None:
    """Work until the other end of the pipe is closed."""
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        answer = _work(*job)
        if answer[0] == "error":
            pipe.send(answer)  # the end of the group may have to wait for the others
        _leave_group()
        gc.collect()
        if answer[0] == "ok":
            pipe.send(answer)


def _work(
    path: str,
    name: str,
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    store: str,
    group: bool,
    env: dict[str, str],
) -> tuple[Any, ...]:
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), **env
    )
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", r".torch\.jit\.(script|interface). is deprecated", DeprecationWarning)
            body: Any = _module(path)
            for part in name.split("."):
                body = getattr(body, part)
            if group:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, world_size),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=30),
                )
            result = body(*args)
            pickle.dumps(result)
            return "ok", result
    except BaseException as error:
        return "error", type(error).__name__, traceback.format_exc(), time.monotonic()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _leave_group() -> None:
    import ignite.distributed as idist
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
        idist.sync()  # Ignite must not remember the group
        idist.utils._need_to_sync = True


def _forget_meshes() -> None:
    """Clear torch's caches of sharded tensors: they keep meshes of process groups that are gone."""
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if "torch.distributed.tensor" in sys.modules:
        debug = debug or importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()


def _module(path: str) -> Any:
    name = f"on_ranks_{Path(path).stem}"
    known = sys.modules.get(name)
    if known is None or known.__file__ != path:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        known = importlib.util.module_from_spec(spec)
        sys.modules[name] = known
        spec.loader.exec_module(known)
    return known
