"""Checks the arguments of ``FSDP``, and turns them into those of ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StrategyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["check_plan", "shard_options"]


def check_plan(plan: Mapping[str, Any], mesh: DeviceMesh) -> None:
    """Refuse styles without ranks for them, ranks without styles, and what is no style."""
    from torch.distributed.tensor.parallel import ParallelStyle

    names = mesh.mesh_dim_names or ()
    if bool(plan) != ("tensor" in names):
        raise StrategyError(
            f"tensor_parallel names {list(plan)} and the mesh has the dimensions {names}: ranks that share the work of "
            'layers need both, mesh={..., "tensor": 2} and tensor_parallel={"layers.*.up": ColwiseParallel(), ...}'
        )
    for key, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise StrategyError(
                f"tensor_parallel[{key!r}]={style!r}: a style of torch.distributed.tensor.parallel was wanted, such as "
                "ColwiseParallel()"
            )


def shard_options(
    reshard: bool | int | None,
    mixed_precision: MixedPrecisionPolicy | None,
    offloads: bool,
    finds_unused: bool,
    ranks: int,
) -> dict[str, Any]:
    """Return the options of ``fully_shard``."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

    if not isinstance(reshard, bool | None) and not (isinstance(reshard, int) and reshard > 1 and not ranks % reshard):
        raise StrategyError(
            f"reshard_after_forward={reshard!r}: True, False, None, or a number of ranks that {ranks} can be divided "
            "by was wanted"
        )
    if not isinstance(mixed_precision, MixedPrecisionPolicy | None):
        raise StrategyError(
            f"mixed_precision={mixed_precision!r}: a torch.distributed.fsdp.MixedPrecisionPolicy was wanted. What the "
            "forward computes in is precision='bf16-mixed'"
        )
    if finds_unused and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise StrategyError(
            f"find_unused_parameters=True needs a newer torch than {torch.__version__}, which cannot do it: "
            "let every parameter take part in the loss on every rank, or use DDP"
        )
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if mixed_precision is not None:
        options["mp_policy"] = mixed_precision
    if offloads:
        options["offload_policy"] = CPUOffloadPolicy()
    return options
