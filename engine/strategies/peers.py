"""How ranks talk on the host: small numbers and objects, over a gloo group of their own, without any device.

Every method but ``start`` is a collective that waits for the other hosts; ``start`` and ``finish`` are one collective
in two halves, so that the work between them hides the wait. All ranks must do the same things in the same order. Each
says what it is doing, so that ranks that have come apart hear of it instead of waiting for each other.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import StrategyError

__all__ = ["LostRankError", "Peers", "is_of_lost_rank"]

_log = logging.getLogger("pellucid.engine")

_MOST_NUMBERS = 6
# what gloo and NCCL say of a connection whose other end is gone
_SIGNS_OF_LOSS = ("Connection closed by peer", "Connection reset by peer", "remote process exited", "Broken pipe")


class LostRankError(StrategyError):
    """Another rank has ended, for which this one waits."""

    def __init__(self, rank: int, what: str) -> None:
        """Say which rank was at what."""
        super().__init__(
            f"rank {rank} was at {what} and has lost another rank, which has ended: by an error, which its message "
            "tells, or as it had nothing more to do. Every rank must make the same runs, and the same updates and "
            'collective calls; an engine that runs on one rank alone is declared so: Engine(..., strategy="single")'
        )
        self.rank, self.what = rank, what

    def __reduce__(self) -> tuple[Any, ...]:
        return LostRankError, (self.rank, self.what)


def is_of_lost_rank(error: BaseException | None) -> bool:
    """Say whether an error comes of the end of another rank: ours, or one of the libraries under the collectives."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, LostRankError) or any(sign in text for sign in _SIGNS_OF_LOSS)


class Peers:
    """The other ranks of a strategy.

    Args:
        timeout_sec: of each collective; None: torch's default, 30 minutes.
        tell_after_sec: how long a rank waits for others before the user is told, once.
    """

    def __init__(self, timeout_sec: float | None = None, tell_after_sec: float = 30.0) -> None:
        """Make the group. A collective."""
        self._tell_after_sec = tell_after_sec
        self._has_told = False
        self.is_missed: Callable[[], bool] = _no  # others may wait for what this rank has left out
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        timeout = None if timeout_sec is None else timedelta(seconds=timeout_sec)
        self._world = dist.group.WORLD
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._round: tuple[str, torch.Tensor, Any] | None = None

    def are_there(self) -> bool:
        """Say whether the process group of the job is the one these peers are in. No collective."""
        return dist.is_initialized() and dist.group.WORLD is self._world

    def start(self, what: str, values: Sequence[int]) -> None:
        """Begin a round: each rank gives some whole numbers, and hears the largest of each from ``finish``.

        Args:
            what: is done, in words; the same on all ranks.
            values: at most six.
        """
        self._round = self._begin(what, values)

    def finish(self) -> list[int] | None:
        """Return the largest numbers of the round that was begun, None if there was none.

        Raises:
            StrategyError: another rank was doing something else.
        """
        if self._round is None:
            return None
        begun, self._round = self._round, None
        return self._end(*begun)

    def _begin(self, what: str, values: Sequence[int]) -> tuple[str, torch.Tensor, Any]:
        numbers = torch.zeros(_MOST_NUMBERS + 2, dtype=torch.int64)
        numbers[: len(values) + 2] = torch.tensor(_signature(what) + list(values))
        return what, numbers, dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _end(self, what: str, numbers: torch.Tensor, work: Any) -> list[int]:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostRankError(self.rank, what) from error
        largest, negated, *values = numbers.tolist()
        if largest != -negated:
            raise StrategyError(
                f"the ranks have come apart: rank {self.rank} is at {what}, and another rank is not. Every rank must "
                "start the same runs in the same order, and make an update where the others do; an engine that runs on "
                'one rank alone, such as a validation on rank 0, is declared so: Engine(..., strategy="single")'
            )
        return values

    def forget(self) -> None:
        """Let go of a round that was begun, without waiting for it: the run has failed."""
        self._round = None

    def largest(self, what: str, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks. Any count of them.

        Raises:
            StrategyError: another rank was doing something else.
        """
        found: list[int] = []
        for begin in range(0, max(1, len(values)), _MOST_NUMBERS):
            part = list(values[begin : begin + _MOST_NUMBERS])
            begun = self._begin(what, part)
            self._tell_of_a_long_wait(what, begun[-1])
            found += self._end(*begun)[: len(part)]
        return found

    def broadcast(self, value: Any, what: str = "a broadcast") -> Any:
        """Return rank 0's ``value``, whatever can be pickled; the other ranks' is not looked at."""
        self.largest(what, [])
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def gather(self, value: Any, what: str = "a gathering") -> list[Any]:
        """Return the ``value`` of every rank, by rank, whatever can be pickled."""
        self.largest(what, [])
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def barrier(self, what: str = "a barrier") -> None:
        """Wait until all ranks are here."""
        self.largest(what, [])

    def tell_of_a_long_wait(self) -> None:
        """Wait for the round that was begun, and say so if it takes long, once."""
        if self._round is not None:
            self._tell_of_a_long_wait(self._round[0], self._round[-1])

    def _tell_of_a_long_wait(self, what: str, work: Any) -> None:
        if self._has_told and not self.is_missed():
            return
        if _is_done_within(work, self._tell_after_sec):
            return
        if self.is_missed():
            raise StrategyError(
                f"rank {self.rank} made no update in its last batch, and has waited {self._tell_after_sec:g} s at "
                f"{what} for the other ranks, which seem to wait for its gradients. Every rank must make an update "
                "where the others do: to leave a batch out, multiply its loss by 0 on the ranks that have it"
            )
        self._has_told = True
        _log.warning(
            "rank %d has waited %g s at %s for the other ranks. If one of them is at work alone, nothing is wrong; "
            "else they may never come: every rank must start the same runs, and make the same updates and the same "
            "collective calls (full_state_dict, gather, barrier, ...), in the same order. An engine that runs on one "
            'rank alone, such as a validation on rank 0, is declared so: Engine(..., strategy="single")',
            self.rank,
            self._tell_after_sec,
            what,
        )


def _no() -> bool:
    return False


def _is_done_within(work: Any, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:  # a time-out, after which the work goes on, or a failure, which is raised again later
        return bool(work.is_completed())
    return True


def _signature(what: str) -> list[int]:
    number = zlib.crc32(what.encode())
    return [number, -number]  # the largest of both tells whether all ranks gave the same
