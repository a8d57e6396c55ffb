"""Data of unknown length, handed out one batch behind, so that a step can be told which batch is the last.

A batch that is drawn early is drawn in the random state of that moment. A run that goes on after a stop draws it in the
same state again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .rng import Moment

__all__ = ["LookAhead"]

_END = object()


class LookAhead:
    """Hands out the batches of one pass, each only when the next one is drawn.

    Args:
        batches: of the pass.
        source: what the pass goes over, and may have random generators.
        done: how many batches of the pass have been handed out before.
        again: the moments in which an earlier pass drew its last batches, for these to be drawn again.
    """

    def __init__(self, batches: Iterator[Any], source: Any, done: int = 0, again: Sequence[Moment] = ()) -> None:
        self._batches = batches
        self._source = source
        self._handed_out = done
        self._waiting: list[Any] = []  # drawn and not handed out; the end of the data may be the last of them
        self._moments: list[Moment] = []  # before the batch handed out last, and before each that waits
        for moment in again:
            moment.restore(source)
            self._draw()

    def _draw(self) -> None:
        moment = Moment(self._source)
        self._waiting.append(next(self._batches, _END))
        self._moments.append(moment)

    def __iter__(self) -> Iterator[Any]:
        """Return itself: there is only one pass."""
        return self

    def __next__(self) -> Any:
        """Return the next batch, after the one behind it is drawn."""
        if not self._waiting:
            self._draw()
        if self.is_at_end:
            raise StopIteration
        if len(self._waiting) < 2:
            self._draw()
        del self._moments[: len(self._moments) - len(self._waiting)]
        self._handed_out += 1
        return self._waiting.pop(0)

    @property
    def is_at_end(self) -> bool:
        """Whether no batch follows the one handed out last."""
        return len(self._waiting) == 1 and self._waiting[0] is _END

    def waiting(self) -> list[Any]:
        """Return the batches that are drawn and not handed out."""
        return [batch for batch in self._waiting if batch is not _END]

    def moments(self, done: int) -> tuple[Moment, ...]:
        """Return the moments in which the batches were drawn that are to come after ``done`` of the pass."""
        to_come = len(self._waiting) + self._handed_out - done
        return tuple(self._moments[len(self._moments) - to_come :])
