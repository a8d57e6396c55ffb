"""What the strategies with one process for each device share: the processes, and how they come to agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import StrategyError
from .alone import RanksAsIgniteSees
from .base import Model, Uneven, modules_of
from .devices import find_device
from .options import check_positive
from .peers import LostRankError, Peers, is_of_lost_rank
from .placed import Placed
from .processes import join, local_device

__all__ = ["Distributed"]


class Distributed(Placed):
    """One process, one device, one part of the data each; the arguments are those of ``DDP``.

    Making one is a collective: it makes the process group if there is none, and a group for the hosts. In a program
    that is one process alone it does what ``SingleDevice`` does.
    """

    def __init__(
        self,
        device: str | int | torch.device | None,
        precision: str,
        compile: bool | Mapping[str, Any],
        scaler: Mapping[str, Any] | None,
        uneven: Uneven,
        backend: str | None,
        timeout_sec: float | None,
    ) -> None:
        if uneven not in get_args(Uneven):
            raise StrategyError(f"uneven must be 'trim' or 'pad', got {uneven!r}")
        check_positive("timeout_sec", timeout_sec, "seconds")
        chosen = None if device is None else find_device(device)
        place = join(backend, chosen, timeout_sec)
        several = place.world_size > 1
        super().__init__(device if chosen or not several else local_device(place), precision, compile, scaler)
        self.rank, self.local_rank, self.world_size = place.rank, place.local_rank, place.world_size
        self.data_rank, self.data_world_size = self.rank, self.world_size
        self.uneven = uneven
        self.peers = Peers(timeout_sec) if several else None
        self._as_ignite_sees = RanksAsIgniteSees() if several else None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: process groups cannot be copied, so a copy works on its own."""
        alone = {"peers": None, "_as_ignite_sees": None, "world_size": 1, "data_rank": 0, "data_world_size": 1}
        return {**self.__dict__, **alone}

    def prepare_model(self, model: Model) -> None:
        """Bring ``model`` to the device of this rank, with rank 0's weights and buffers. A collective.

        Raises:
            StrategyError: parameters without values, or models that differ between ranks.
        """
        for module in modules_of(model):
            _refuse_lazy(module)
        super().prepare_model(model)
        if self.peers is not None:
            for module in modules_of(model):
                self._check_same(module)

    def _check_same(self, module: nn.Module) -> None:
        """Refuse modules that differ between ranks in names, shapes, types or in what is trained."""
        assert self.peers is not None
        tensors = [*module.named_parameters(), *module.named_buffers()]
        mine = [(name, tuple(one.shape), str(one.dtype), one.requires_grad) for name, one in tensors]
        theirs = self.peers.broadcast(mine)
        # rank 0 is never different from itself, so all ranks must hear of a difference
        found = [text for text in self.peers.gather(_difference(mine, theirs)) if text]
        if found:
            raise StrategyError(
                f"the model differs between ranks (name, shape, type, is trained): {found[0]} on rank 0. Build the "
                "same model on every rank; only its values may differ, which rank 0 gives to all"
            )

    @contextmanager
    def running(self, model: Model | None, train: bool) -> Iterator[None]:
        """Return the region of one run; see :meth:`Strategy.running`."""
        if self.peers is None or self._as_ignite_sees is None:
            with super().running(model, train):
                yield
        else:
            run = f"{'a training' if train else 'an evaluation'} run"
            self.peers.barrier(f"the start of {run}")
            try:
                with self._as_ignite_sees.region():
                    yield
            except RuntimeError as error:  # of a collective of torch's, in a forward or a backward
                if isinstance(error, StrategyError) or not is_of_lost_rank(error):
                    raise
                raise LostRankError(self.rank, f"a collective of {run}") from error

    def mean(self, value: float | Tensor) -> float | Tensor:
        """Return the mean of a number over the ranks. A collective; no wait for an accelerator."""
        if self.peers is None:
            return value
        number = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach().clone()
        dist.all_reduce(number)
        return number / self.world_size


def _difference(mine: list[Any], theirs: list[Any]) -> str | None:
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{one} on one rank, {other}"
    return None if len(mine) == len(theirs) else f"{len(mine)} tensors on one rank, {len(theirs)}"


def _refuse_lazy(module: nn.Module) -> None:
    lazy = next((name for name, one in [*module.named_parameters(), *module.named_buffers()] if is_lazy(one)), None)
    if lazy is not None:
        raise StrategyError(
            f"{lazy!r} has no shape yet, as it belongs to a lazy module: call the model once with a batch, under "
            "torch.no_grad(), before the engine is made"
        )
