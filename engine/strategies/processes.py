"""The processes of a job: who this one is, and the process group between them.

The environment is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. A group that
exists already is used as it is.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import StrategyError
from .devices import accelerator_type, find_device

__all__ = ["Processes", "are_several", "join", "local_device"]


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
    """Say whether this process is one of several, by the group or by the environment. No collective."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return _from_environment().world_size > 1


def join(backend: str | None = None, device: torch.device | None = None, timeout_sec: float | None = None) -> Processes:
    """Return this process's place, after making the group that the environment asks for, if there is none yet.

    The first call is a collective. A group made here is ended when the program ends, one that exists already is not.

    Args:
        backend: as in ``torch.distributed.init_process_group``. None: gloo for the CPU, and beside it the accelerator's
            own (NCCL) if this rank has one.
        device: where the model runs, if that is decided; the CPU needs no backend of the accelerator.
        timeout_sec: of each collective; None: torch's default.

    Raises:
        StrategyError: a backend that is not there, or more ranks on this machine than devices.
    """
    if not dist.is_available():
        return Processes()
    place = _from_environment()
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if (place.rank, place.world_size) == (rank, world_size):
            return place
        return Processes(rank, _guess_local_rank(rank), world_size, world_size)
    if place.world_size == 1:
        return place
    _check_backend(backend)
    accelerator = accelerator_type() if device is None or device.type != "cpu" else None
    if accelerator is not None and not _count(accelerator):
        accelerator = None
    chosen = local_device(place) if device is None else device
    if backend is None and accelerator is not None:
        backend = f"cpu:gloo,{accelerator}:{dist.get_default_backend_for_device(accelerator)}"
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index or 0)
    timeout = None if timeout_sec is None else timedelta(seconds=timeout_sec)
    dist.init_process_group(backend or "gloo", timeout=timeout)
    atexit.register(_leave)
    return place


def local_device(place: Processes) -> torch.device:
    """Return the device of this rank: the accelerator of its local rank, or the CPU.

    Raises:
        StrategyError: there are accelerators, but fewer than ranks on this machine.
    """
    accelerator = accelerator_type()
    count = 0 if accelerator is None else _count(accelerator)
    if not count:
        return torch.device("cpu")
    if place.local_rank >= count or place.local_world_size > count:
        raise StrategyError(
            f"{place.local_world_size} ranks were started on this machine, which has {count} {accelerator} device(s): "
            f"start {count} with torchrun --nproc-per-node {count}, or run on the CPU with device='cpu'"
        )
    return find_device(f"{accelerator}:{place.local_rank}")


def _from_environment() -> Processes:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    given = {name: os.environ.get(name) for name in names}
    if given["RANK"] is None or given["WORLD_SIZE"] is None:
        return Processes()
    rank, world_size = _number("RANK", given["RANK"]), _number("WORLD_SIZE", given["WORLD_SIZE"])
    local_world_size = _number("LOCAL_WORLD_SIZE", given["LOCAL_WORLD_SIZE"] or str(world_size))
    local_rank = _number("LOCAL_RANK", given["LOCAL_RANK"] or str(rank % max(1, local_world_size)))
    if not 0 <= rank < world_size:
        raise StrategyError(f"RANK={rank} does not fit WORLD_SIZE={world_size} in the environment: ranks count from 0")
    return Processes(rank, local_rank, world_size, local_world_size)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise StrategyError(f"the environment variable {name}={text!r} is no whole number: torchrun sets it") from None


def _guess_local_rank(rank: int) -> int:
    local = os.environ.get("LOCAL_RANK")
    accelerator = accelerator_type()
    return _number("LOCAL_RANK", local) if local else rank % max(1, _count(accelerator) if accelerator else 1)


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    for part in backend.split(","):
        name = part.split(":")[-1].strip().lower()
        if name not in dist.Backend.backend_list or not dist.is_backend_available(name):
            here = [one for one in dist.Backend.backend_list if one != "undefined" and dist.is_backend_available(one)]
            raise StrategyError(
                f"backend={backend!r}: this torch has no backend {name!r}; it has {', '.join(map(repr, here))}. "
                "Leave backend out to have the one that suits the device"
            )


def _count(accelerator: str) -> int:
    module = torch.get_device_module(accelerator)
    return int(module.device_count()) if module.is_available() else 0


def _leave() -> None:
    """End the group that was made here. Not after an error: the others may be waiting, and a collective would hang."""
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
