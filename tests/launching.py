"""Functions that tests/test_launch.py gives to ranks, in a module that a new interpreter can import."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["OwnError", "describe", "fail_with_work_left_undone"]


class OwnError(Exception):
    pass


def describe(batch: Tensor, net: nn.Module) -> dict[str, Any]:
    total = torch.ones(1)
    dist.all_reduce(total)
    batch += 1
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {
        "process": type(multiprocessing.current_process()).__name__,
        "environment": {name: os.environ[name] for name in names},
        "start method": multiprocessing.get_start_method(),
        "threads": torch.get_num_threads(),
        "total": total,
        "batch": batch,
        "net": net,
    }


def fail_with_work_left_undone() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]), async_op=True)
        subprocess.Popen(["sleep", "1000"])
        raise OwnError("rank 1 is tired", 7)
    dist.new_group([0, 1])
    dist.barrier()
