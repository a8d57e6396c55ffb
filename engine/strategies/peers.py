"""How ranks talk on the host: small numbers and objects, over a gloo group of their own, without any device.

Every method but ``start`` is a collective that waits for the other hosts; ``start`` and ``finish`` are one collective in
two halves, so that the work between them hides the wait. All ranks must call the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Peers"]


class Peers:
    """The other ranks of a strategy.

    Args:
        timeout: of each collective; None: torch's default, 30 minutes.
    """

    def __init__(self, timeout: Any = None) -> None:
        """Make the group. A collective."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._round: tuple[torch.Tensor, Any] | None = None

    def start(self, values: Sequence[int]) -> None:
        """Begin a round: each rank gives as many whole numbers, and hears the largest of each from ``finish``."""
        numbers = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._round = numbers, work

    def finish(self) -> list[int] | None:
        """Return the largest numbers of the round that was begun, or None if there was none."""
        if self._round is None:
            return None
        (numbers, work), self._round = self._round, None
        work.wait()
        return numbers.tolist()

    def forget(self) -> None:
        """Let go of a round that was begun, without waiting for it: the run has failed."""
        self._round = None

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks."""
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's ``value``, whatever can be pickled; the other ranks' is not looked at."""
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank, by rank, whatever can be pickled."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.largest([0])
