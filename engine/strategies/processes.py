"""The processes of a job: who this one is, and the process group between them.

The environment is torchrun's, on one machine or several: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. A group that exists already is used as it is.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import StrategyError
from .devices import accelerator_type, device_count, find_device
from .peers import is_of_lost_rank

__all__ = ["Processes", "are_several", "check_backend", "join", "leave_group", "local_device", "open_sockets"]

_LINGER_SEC = 1.0  # torchrun looks at its ranks ten times a second


@dataclass(frozen=True)
class Processes:
    """This process among those of the job.

    Attributes:
        rank: this process among all, from 0.
        local_rank: this process among those of its machine, from 0.
        world_size: the number of processes; 1 where there is no group.
        local_world_size: the number of processes on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def are_several() -> bool:
    """Say whether this process is one of several, by the group or by the environment. No collective.

    Raises:
        StrategyError: the environment names a rank that cannot be, or one of RANK and WORLD_SIZE alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return _from_environment().world_size > 1


def join(backend: str | None = None, device: torch.device | None = None, timeout_sec: float | None = None) -> Processes:
    """Return this process's place, after making the group that the environment asks for, if there is none yet.

    The first call is a collective. A group made here is ended when the program ends, unless it ends with an error; one
    that exists already is not. However the program ends, it does not wait for a collective on the host (gloo) that
    other ranks may never join.

    Args:
        backend: as in ``torch.distributed.init_process_group``. None: gloo for the CPU, and beside it the accelerator's
            own (NCCL) if this rank has one. ``"cpu:gloo"``: the ranks work on the CPU, whatever else there is.
        device: where the model runs, if that is decided; the CPU needs no backend of the accelerator.
        timeout_sec: of each collective; None: torch's default.

    Raises:
        StrategyError: an environment that makes no sense, a backend that is not there or not for the device, or more
            ranks on this machine than devices.
    """
    check_backend(backend)
    if dist.is_available() and dist.is_initialized():
        _check_has(backend)
        return _place(dist.get_rank(), dist.get_world_size())
    place = _from_environment()
    if place.world_size == 1:
        return place
    _check_can_meet(place)
    chosen = _local_device(place, backend) if device is None else device
    backend = backend or _suitable_backend(chosen)
    if chosen.type not in _devices_of(backend):
        raise StrategyError(
            f"backend={backend!r} is for {' and '.join(sorted(_devices_of(backend)))}, but rank {place.rank} works on "
            f"{str(chosen)!r}: leave backend out to have the one that suits the device"
        )
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index or 0)
    dist.init_process_group(backend, timeout=None if timeout_sec is None else timedelta(seconds=timeout_sec))
    atexit.register(_leave, weakref.ref(dist.group.WORLD))
    return place


def local_device(place: Processes) -> torch.device:
    """Return the device of this rank: the accelerator of its local rank, or the CPU.

    It is the CPU too where the process group has no backend for the accelerator.

    Raises:
        StrategyError: there are accelerators, but fewer than ranks on this machine.
    """
    return _local_device(place, dist.get_backend_config() if dist.is_initialized() else None)


def check_backend(backend: str | None) -> None:
    """Do nothing if this torch has ``backend``.

    Raises:
        StrategyError: it has not.
    """
    if backend is None:
        return
    if not isinstance(backend, str):
        raise StrategyError(f"backend={backend!r} is no name of a backend, such as 'gloo' or 'cpu:gloo,cuda:nccl'")
    for part in backend.split(","):
        name = part.split(":")[-1].strip().lower()
        if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
            here = [one for one in dist.Backend.backend_list if one != "undefined" and dist.is_backend_available(one)]
            raise StrategyError(
                f"backend={backend!r}: this torch has no backend {name!r}; it has {', '.join(map(repr, here))}. "
                "Leave backend out to have the one that suits the device"
            )


def _check_has(backend: str | None) -> None:
    """Refuse a backend that the group which is there does not have."""
    if backend is None:
        return
    here = str(dist.get_backend_config())
    missing = sorted(_names_in(backend) - _names_in(here))
    if missing:
        raise StrategyError(
            f"backend={backend!r}: there is a process group already, with {here!r} and without {missing[0]!r}. Leave "
            "backend out to use it, or make the group with the backend that you want"
        )


def _names_in(backend: str) -> set[str]:
    return {part.split(":")[-1].strip().lower() for part in backend.split(",")}


def _from_environment() -> Processes:
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    if rank is None and world_size in (None, 1):
        return Processes()
    if rank is None or world_size is None:
        given, missing = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        raise StrategyError(
            f"the environment has {given}={os.environ[given]} but no {missing}: start the ranks with torchrun, which "
            f"sets both, or unset {given} to run one process alone"
        )
    if not 0 <= rank < world_size:
        raise StrategyError(f"RANK={rank} does not fit WORLD_SIZE={world_size} in the environment: ranks count from 0")
    return _place(rank, world_size)


def _place(rank: int, world_size: int) -> Processes:
    """Add what the environment says about this machine; where it is silent, at most one rank for each device."""
    local_rank, local_world_size = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    if local_world_size is None:
        local_world_size = max(min(world_size, device_count(accelerator_type()) or world_size), (local_rank or 0) + 1)
    if local_rank is None:
        local_rank = rank % max(1, local_world_size)
    if not 0 <= local_rank < local_world_size <= world_size:
        raise StrategyError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} do not fit: on "
            "each machine ranks count from 0, and there are no more on one than on all"
        )
    return Processes(rank, local_rank, world_size, local_world_size)


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise StrategyError(f"the environment variable {name}={text!r} is no whole number: torchrun sets it") from None


def _check_can_meet(place: Processes) -> None:
    if not dist.is_available():
        raise StrategyError(
            f"this is one of {place.world_size} processes (WORLD_SIZE), but this torch is built without "
            "torch.distributed: install a build that has it"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise StrategyError(
            f"this is rank {place.rank} of {place.world_size} (RANK, WORLD_SIZE), but the environment has no "
            f"{' and no '.join(missing)}, where the ranks meet: start them with torchrun, which sets it, or set it to "
            "the host of rank 0 and to a free port there, the same on all ranks"
        )


def _local_device(place: Processes, backend: str | None) -> torch.device:
    accelerator = accelerator_type()
    count = device_count(accelerator)
    if not count or (backend is not None and accelerator not in _devices_of(backend)):
        return torch.device("cpu")
    if place.local_world_size > count:
        raise StrategyError(
            f"{place.local_world_size} ranks were started on this machine, which has {count} {accelerator} device(s): "
            f"start {count} (torchrun --nproc-per-node {count}), or let the ranks work on the CPU: DDP(device='cpu'), "
            "or launch(..., backend='cpu:gloo'). Where each rank is shown one device of its own: "
            f"DDP(device='{accelerator}:0')"
        )
    return find_device(f"{accelerator}:{place.local_rank}")


def _suitable_backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _devices_of(backend: str) -> set[str]:
    """Return the types of device that a backend, or a list as in ``"cpu:gloo,cuda:nccl"``, is for."""
    devices: set[str] = set()
    for part in backend.lower().split(","):
        device, _, name = part.strip().rpartition(":")
        devices |= {device} if device else set(dist.Backend.backend_capability.get(name, ()))
    return devices


def leave_group(inherited: Set[int]) -> None:
    """End the group on this rank while its process goes on. Ranks that still wait for this one then hear of it.

    What keeps the connections open besides the group itself are engines that somebody refers to, so they are cut.

    Args:
        inherited: what ``open_sockets`` returned when this process began: it may share them with the one it came from.
    """
    if not dist.is_initialized():
        return
    _forget_collectives_under_way()
    dist.destroy_process_group()
    gc.collect()
    for number, handle in open_sockets().items():
        if number not in inherited:
            with suppress(OSError), socket.socket(fileno=os.dup(handle)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():  # no listener
                    connection.shutdown(socket.SHUT_RDWR)


def open_sockets() -> dict[int, int]:
    """Return the sockets of this process: the number that the system has for each, and the file descriptor."""
    found = {}
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with suppress(OSError):  # the one of the listing itself is closed again
            described = os.fstat(int(name))
            if stat.S_ISSOCK(described.st_mode):
                found[described.st_ino] = int(name)
    return found


def _leave(made: weakref.ref[Any]) -> None:
    """End the group that was made here, at the end of the program.

    Not after an error: ranks that wait for this one must learn of it from the end of the process, which must come soon.
    Nor are threads of gloo, which may be in the middle of a collective, taken down with the interpreter then: it would
    now and then abort, and the job's report would say so instead of naming the error.
    """
    if not dist.is_initialized():
        return
    _forget_collectives_under_way()
    if getattr(sys, "last_value", None) is None:
        if made() is dist.group.WORLD:
            dist.destroy_process_group()
        return
    if isinstance(sys.last_value, StrategyError) or is_of_lost_rank(sys.last_value):
        time.sleep(_LINGER_SEC)  # another rank may be the cause: the launcher is to see it first, and to name that one
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # the exit code of an error that nobody has caught


def _forget_collectives_under_way() -> None:
    """Keep the gloo groups from being taken down with the interpreter, when they would wait for their collectives.

    A rank that fails while the others wait for it in another collective would wait for them, and they for it, until the
    timeout of 30 minutes. gloo cannot abort a collective, but a group that is referred to is never taken down.

    Uses names that are private to torch: it has no public list of groups. Were they gone, only the wait would be back;
    ``tests/test_processes.py`` tells.
    """
    for group in list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ())):
        try:
            backend = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # a group of accelerators only
            continue
        if backend.name() == "gloo":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
