"""Stop in good order when the machine is about to be taken away."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ..engine import Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._signals import leave, listen
from .checkpoint import Checkpoint

__all__ = ["Preemption"]

logger = logging.getLogger("pellucid.handlers")

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Preemption(Attachable):
    """Let a signal end the run after the present iteration, with a checkpoint.

    What a cluster sends before it takes a machine away (SLURM's ``--signal``, a cloud's SIGTERM) is heard in a run
    only: its handlers are installed when the run starts, and those that were there before are put back when it ends.
    All ranks stop at one iteration, whichever has heard the signal. Every attached ``Checkpoint`` saves, and ``run``
    returns with ``state.stop_reason == "terminated"``. A second signal does what it did before, at once. Several hear a
    signal together: of an outer run and of the inner run in progress, both stop.

    A program says how it has ended by its exit code: 0, or 128 + the number of the signal (143 for SIGTERM), also where
    it came when there was nothing left to stop, in the last event of a run that is completed.

    Args:
        signals: which end the run.

    Example:
        >>> Checkpoint("runs/digits", every=Events.ITERATION_COMPLETED(every=1000)).attach(trainer)
        >>> preemption = Preemption().attach(trainer)
        >>> resume(trainer, "runs/digits")
        >>> result = trainer.run(loader, max_epochs=3)
        >>> if preemption.received is not None:
        ...     raise SystemExit(preemption.exit_code)
    """

    def __init__(self, signals: Iterable[int] = SIGNALS) -> None:
        self._signals = tuple(_check(one) for one in signals)
        if not self._signals:
            raise ValueError("signals=() would hear nothing: give some, such as (signal.SIGTERM,)")
        self._received: signal.Signals | None = None

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came in the last run, the same on all ranks, or None."""
        return self._received

    @property
    def exit_code(self) -> int:
        """What the program is to exit with: 0, or 128 + the number of the signal."""
        return 0 if self._received is None else 128 + self._received

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._begin), (Events.TERMINATE, self._agree))

    def last_subscriptions(self) -> Sequence[Subscription]:
        moments = Events.EPOCH_STARTED | Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED
        ends = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED | Events.EXCEPTION_RAISED
        return ((moments, self._stop), (ends, self._end))

    def _begin(self, engine: Engine, batch: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise HandlerError("Preemption hears signals, which only a program's main thread can: run the engine there")
        if not _checkpoints(engine):
            logger.warning(
                "%r is attached without a Checkpoint: a signal would stop the run, and nothing be saved", self
            )
        leave(self._hear)
        self._received = None
        listen(self._signals, self._hear)

    def _hear(self, number: signal.Signals) -> None:
        self._received = number
        leave(self._hear)  # so that a second one ends the program

    def _stop(self, engine: Engine, batch: Any) -> None:
        if self._received is not None:
            engine.terminate()

    def _agree(self, engine: Engine, batch: Any) -> None:
        heard = [number for number in engine.strategy.gather(self._received) if number is not None]
        if not heard:
            return
        self._received = signal.Signals(max(heard))
        if engine.state.rank == 0:
            logger.warning(
                "%s was received: the run stops after iteration %d", self._received.name, engine.state.iteration
            )
        for checkpoint in _checkpoints(engine):
            checkpoint.request(engine)

    def _end(self, engine: Engine, batch: Any) -> None:
        leave(self._hear)

    def __repr__(self) -> str:
        """Show the signals."""
        return f"Preemption({', '.join(one.name for one in self._signals)})"


def _checkpoints(engine: Engine) -> list[Checkpoint]:
    return [one for one in engine.attached() if isinstance(one, Checkpoint)]


def _check(number: Any) -> signal.Signals:
    unheard = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    try:
        found = signal.Signals(number)
    except ValueError:
        raise ValueError(f"signals has {number!r}, which is no signal: give such as signal.SIGTERM") from None
    if found in unheard:
        raise ValueError(f"{found.name} cannot be heard by any program: leave it out")
    return found
