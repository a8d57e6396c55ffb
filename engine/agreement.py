"""How the ranks of a run come to stop at the same iteration, whichever of them asks.

What a rank asks for (``terminate``, ``terminate_epoch``, ``interrupt``), and that its data ends, goes into a round with
the others that is begun before a step and heard after it, so nobody waits: what is asked for in one iteration takes
effect after the next one, on all ranks. Outside of the iterations the round is heard at once.

A round costs some hundred microseconds, so a run that is fast holds one only every 16 batches, and a stop then comes as
much later. The ranks agree on that in the rounds: one that is slow, or must say in time that its data ends, has the
next round at the next batch on all of them.

In evaluation ranks may have batches of different number. One that has none left goes on with the rounds until all are
done, so that they end together.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from .strategies import Peers

__all__ = ["VERBS", "Agreement", "Heard"]

# each verb with what else than True may be asked for
VERBS = {
    "should_terminate": "skip_completed",
    "should_terminate_single_epoch": "skip_epoch_completed",
    "should_interrupt": "",
}

_INTERVAL = 16  # batches from one round to the next of a fast run, and at its beginning, when its pace is not known yet
_SLOW_SEC = 0.02  # a batch: from here on a round costs next to nothing


class Heard(NamedTuple):
    """What some rank has asked for, whether the data of some rank ends, and whether some rank is at a batch."""

    asked: dict[str, bool | str]
    ends: bool
    more: bool


class Agreement:
    """The rounds of one run.

    Args:
        peers: the other ranks.
        what: the run, in words, the same on all ranks.
        updates: says how many updates were made, which must be as many on all ranks.
    """

    def __init__(self, peers: Peers, what: str, updates: Callable[[], int]) -> None:
        self._peers = peers
        self._what = what
        self._updates = updates
        self._wanted: dict[str, bool | str] = {}
        self._batch = 0
        self._round_at = 1  # the batch of the next round
        self._last_round = (0, perf_counter())  # its batch and when it was

    def want(self, name: str, value: bool | str) -> None:
        """Ask for a verb, or take it back with False."""
        self._wanted[name] = value

    def wanted(self, name: str) -> bool | str:
        """Return what this rank asks for with a verb and the others have not heard yet."""
        return self._wanted.get(name, False)

    def begin_batch(self, ends: bool, often: bool) -> None:
        """Begin the round of a batch, where one is due. Does not wait.

        Args:
            ends: the data of this rank ends with this batch.
            often: the next round must be at the next batch.
        """
        self._batch += 1
        if self._batch < self._round_at:
            return
        (batch, began), now = self._last_round, perf_counter()
        is_slow = now - began > _SLOW_SEC * (self._batch - batch)
        self._last_round = (self._batch, now)
        self._begin(ends, True, often or is_slow or self._batch < _INTERVAL)

    def _begin(self, ends: bool, more: bool, often: bool) -> None:
        levels = [2 if isinstance(value, str) else int(value) for value in map(self._wanted.get, VERBS, [False] * 3)]
        self._peers.start(f"{self._what} after {self._updates()} updates", [*levels, ends, more, often])

    def hear(self) -> Heard | None:
        """Return what came of the round that was begun, None if there was none. Waits for the other hosts.

        Raises:
            StrategyError: another rank is in another run.
        """
        numbers = self._peers.finish()
        if numbers is None:
            return None
        *levels, ends, more, often = numbers
        asked = {
            name: special if level == 2 else True
            for (name, special), level in zip(VERBS.items(), levels, strict=True)
            if level
        }
        for name in asked:
            self._wanted.pop(name, None)
        self._round_at = self._batch + (1 if often else _INTERVAL)
        return Heard(asked, bool(ends), bool(more))

    def now(self) -> Heard:
        """Return what all ask for at this moment. A collective that waits for the other hosts."""
        self._begin(False, False, True)
        self._peers.tell_of_a_long_wait()
        heard = self.hear()
        assert heard is not None
        return heard

    def await_others(self, work: Callable[[], None] | None) -> tuple[Heard, bool]:
        """Go on with the rounds until no rank has a batch left, or one has asked to stop.

        Args:
            work: done in each round in which another rank takes a step, where a step is a collective.

        Returns:
            what was heard last, and whether any rank had a batch in these rounds.
        """
        had_more = False
        while True:
            heard = self.now()
            if heard.asked or not heard.more:
                return heard, had_more
            had_more = True
            if work is not None:
                work()

    def forget(self) -> None:
        """End without a word to the others: the run has failed, or is over."""
        self._peers.forget()
