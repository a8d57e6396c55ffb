"""What the stopping verbs do to the loop: at once in one process, when all have heard of it on ranks.

A verb sets one of Ignite's three flags. On ranks it is a wish first, which goes to the others with the next round
(``agreement.py``), and only what comes back sets the flag, on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from ignite.engine.engine import _EngineTerminateException, _EngineTerminateSingleEpochException

from ._firing import FiringEngine
from .agreement import Agreement, Heard
from .events import Events

__all__ = ["Source", "StoppingEngine"]


class Source(Protocol):
    """Where the loop of an ``Engine`` takes its batches from."""

    def open(self) -> Iterator[Any]:
        """Begin a pass over the data."""

    def rejoin(self) -> None:
        """Take up the random state that the run was stopped in."""

    def end_pass(self) -> None:
        """Give no more batches of this pass: the data of another rank has ended."""

    def leave_pass(self) -> None:
        """Let go of the rest of the pass, also of one that was to be taken up again."""

    def close(self) -> None:
        """Let go of the present pass."""


class _Asked:
    """One of Ignite's three stopping flags; setting one tells the loop, so that it has a single flag to look at."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, loop: Any, owner: type) -> bool | str:
        return loop.flags.get(self.name, False)  # type: ignore[no-any-return]

    def __set__(self, loop: Any, value: bool | str) -> None:
        if loop.agreement is not None:
            loop.agreement.want(self.name, value)
            if value:
                return  # it takes effect when all ranks have heard of it
        loop.flags[self.name] = value
        loop.asked = any(loop.flags.values())


class StoppingEngine(FiringEngine):
    """Ignite's engine with our table of handlers, and stopping verbs that ranks agree on."""

    should_terminate = _Asked()
    should_terminate_single_epoch = _Asked()
    should_interrupt = _Asked()  # type: ignore[assignment]

    def __init__(self, process_function: Callable[[Any, Any], Any]) -> None:
        """Make an engine around ``process_function(engine, batch)``."""
        self.flags: dict[str, bool | str] = {}
        self.asked = False
        self.agreement: Agreement | None = None  # with other ranks
        self.await_peers: Callable[[], Heard] | None = None  # where they may have more batches
        self.source: Source | None = None
        self.in_epoch = False
        super().__init__(process_function)

    def _obey(self, epoch: bool = True) -> Generator[Any, None, None]:
        """Do what a handler or the step has asked for with one of the stopping verbs."""
        if self.should_terminate:
            raise _EngineTerminateException()
        if self.should_terminate_single_epoch:
            if not epoch:
                raise RuntimeError("terminate_epoch() was asked for in STARTED or EPOCH_STARTED: no batch has come yet")
            raise _EngineTerminateSingleEpochException()
        if self.should_interrupt:
            self.ending, self.in_epoch = "interrupted", False
            self._fire_event(Events.INTERRUPT)
            self.should_interrupt = False
            try:
                yield self.state
            except GeneratorExit:
                self._dataloader_iter = None
                raise
            self.ending = None

    def wish(self, name: str) -> bool | str:
        """Return what is asked for with one of the verbs, heard by the other ranks or not."""
        unheard = False if self.agreement is None else self.agreement.wanted(name)
        return self.flags.get(name, False) or unheard

    def _agree(self, at_end: bool = False) -> None:
        """Hear at once what the ranks ask for; at the end of an epoch's batches, when all are there."""
        if self.agreement is None:
            return
        if at_end and self.await_peers is not None:
            self._take(self.await_peers())
        else:
            self._take(self.agreement.now())

    def _take(self, heard: Heard | None) -> None:
        """Let what the ranks have agreed on take effect here."""
        if heard is None:
            return
        for name, value in heard.asked.items():
            self.flags[name] = value
        self.asked = any(self.flags.values())
        if heard.ends and self.source is not None:
            self.source.end_pass()

    def part_from_peers(self) -> None:
        """Agree with nobody any more."""
        if self.agreement is not None:
            self.agreement.forget()
        self.agreement = self.await_peers = None
