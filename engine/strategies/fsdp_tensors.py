"""Whole tensors and this rank's part of them.

Torch's own ``full_tensor`` and ``distribute_tensor`` do not know parts of unequal size where ranks also share the work
of a layer; taken one dimension of the mesh at a time, the parts are simple.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["clip_gradients", "part_like", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor as a plain one, without graph, in memory of its own. A collective.

    On the device of the mesh, also where the shards are kept elsewhere. A plain tensor comes back as it is.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return tensor
    part: Any = tensor.detach()
    mesh_type = part.device_mesh.device_type
    if part.device.type != mesh_type:
        part = part.to(mesh_type)
    before = part.to_local().untyped_storage().data_ptr()
    placements = list(part.placements)
    for dimension, placement in enumerate(placements):
        if not placement.is_replicate():
            placements[dimension] = Replicate()
            part = part.redistribute(placements=placements)
    local: Tensor = part.to_local()
    return local.clone() if local.untyped_storage().data_ptr() == before else local


def part_like(tensor: Tensor, like: Any) -> Tensor:
    """Return the part of ``tensor`` that this rank holds of ``like``, as a sharded tensor. Not a collective.

    Args:
        tensor: plain, the same on all ranks.
        like: a ``DTensor`` of the same shape.
    """
    from torch.distributed.tensor import DTensor

    mesh, local = like.device_mesh, tensor
    for dimension in reversed(range(mesh.ndim)):
        split = getattr(like.placements[dimension], "dim", None)
        if split is not None:
            size, rank = mesh.size(dimension), mesh.get_local_rank(dimension)
            step = -(-local.shape[split] // size)
            begin = min(rank * step, local.shape[split])
            local = local.narrow(split, begin, min(step, local.shape[split] - begin))
    local = local.to(like.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None, norm_type: float = 2.0) -> Tensor:
    """Scale gradients down so that their norm, taken over all together, is at most ``max_norm``. A collective.

    Returns:
        the norm as it was, a plain tensor of shape (), the same on all ranks.
    """
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)  # type: ignore[arg-type]
    norms = [whole(get_total_norm(_gradients(ones), norm_type)) for ones in meshes.values()]
    if not norms:
        return torch.zeros(())
    # torch takes no norm over tensors of several meshes, nor scales them at once
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if max_norm is not None:
        for ones in meshes.values():
            clip_grads_with_norm_(ones, max_norm, norm)
    return norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
