"""Ranks by the part they play: some hold copies of a model, some shards of it, some share the work of a layer.

A mesh has up to three dimensions, from the slowest links to the fastest: ``replicate``, ``shard``, ``tensor``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import StrategyError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Mesh", "check_sizes", "data_place", "make_mesh", "sharding_part"]

Mesh = Mapping[str, int]

_DIMENSIONS = ("replicate", "shard", "tensor")
_EXAMPLE = 'such as {"replicate": 2, "shard": 4} or {"shard": 4, "tensor": 2}'


def make_mesh(given: Mesh | DeviceMesh | None, device_type: str, world_size: int) -> DeviceMesh:
    """Return the mesh of all ranks. A collective: it makes the process groups of its dimensions.

    Args:
        given: sizes by name; without ``"shard"`` that is what the others leave. None: all ranks shard.
        device_type: of the ranks, such as ``"cuda"``.
        world_size: the number of ranks.

    Raises:
        StrategyError: sizes or names that do not fit.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if isinstance(given, DeviceMesh):
        _check_mesh(given, device_type, world_size)
        return given
    sizes = {"shard": world_size} if given is None else _complete(given, world_size)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_sizes(given: Mesh | DeviceMesh | None) -> None:
    """Refuse what is no mesh on any number of ranks.

    Raises:
        StrategyError: neither a DeviceMesh nor sizes, or sizes that make no sense.
    """
    if given is None or hasattr(given, "mesh_dim_names"):
        return
    if not isinstance(given, Mapping) or not given:
        raise StrategyError(f"mesh={given!r}: sizes by name were wanted, {_EXAMPLE}, or a DeviceMesh")
    unknown = [name for name in given if name not in _DIMENSIONS]
    if unknown:
        raise StrategyError(f"mesh has no dimension {unknown[0]!r}: its names are {', '.join(map(repr, _DIMENSIONS))}")
    for name, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise StrategyError(f"mesh[{name!r}]={size!r}: a number of ranks was wanted")


def sharding_part(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions that gradients are brought together over."""
    names = tuple(name for name in _names(mesh) if name != "tensor")
    return mesh if names == _names(mesh) else mesh[names]


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's place among those that read different data, and the number of those."""
    rank, count = 0, 1
    for name in _names(mesh):
        if name != "tensor":
            size = mesh[name].size()
            rank, count = rank * size + mesh.get_local_rank(name), count * size
    return rank, count


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def _complete(given: Mesh, world_size: int) -> dict[str, int]:
    sizes = dict(given)
    sizes.setdefault("shard", max(1, world_size // math.prod(sizes.values())))
    if math.prod(sizes.values()) != world_size:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise StrategyError(
            f"mesh={dict(given)!r} is for {math.prod(sizes.values())} ranks ({product}), and there are {world_size}: "
            "the product of its sizes must be the number of ranks"
        )
    return {name: sizes[name] for name in _DIMENSIONS if name in sizes}


def _check_mesh(mesh: DeviceMesh, device_type: str, world_size: int) -> None:
    names = _names(mesh)
    if "shard" not in names or names != tuple(name for name in _DIMENSIONS if name in names):
        raise StrategyError(
            f"the mesh has the dimensions {names}: they must be among {_DIMENSIONS}, in this order, and have 'shard'. "
            f"Give init_device_mesh(..., mesh_dim_names=...), or sizes {_EXAMPLE}"
        )
    if mesh.size() != world_size or mesh.device_type != device_type:
        raise StrategyError(
            f"the mesh is of {mesh.size()} {mesh.device_type!r} ranks, and there are {world_size} {device_type!r}: it "
            "must hold all of them"
        )
