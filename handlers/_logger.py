"""What all loggers share: what they listen to, on which axis they write, when they open and close.

A logger is opened at the first thing that it writes, on rank 0 only, and closed at every end of the outermost run: so
an error or Ctrl-C loses nothing, and the next run opens it again.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine import CheckpointError, Engine, Events, StateView
from ._attachable import Attachable, Subscription
from ._monitor import require_number
from ._output import Output, check_output, select_output
from ._scalars import read_scalars

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Counts", "Logger"]

logger = logging.getLogger("pellucid.handlers")

_END = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED | Events.EXCEPTION_RAISED


class Counts(NamedTuple):
    """Where a training stands."""

    epoch: int = 0
    iteration: int = 0
    updates: int = 0


class Logger(Attachable):
    """The protocol of all loggers; a back end says how to open, write, flush and close.

    Everything is written at the counts of the outermost training run, which never decrease: an evaluation on its own is
    written where the last training stood.
    """

    def __init__(self, *, output: Output, every: int, prefix: str | None) -> None:
        self._output = check_output(output)
        self._every: int = require_number("every", every, least=1, whole=True)
        if prefix is not None and not isinstance(prefix, str):
            raise TypeError(f"prefix={prefix!r}: a text was wanted that the names of output values begin with, or None")
        self._prefix = prefix
        self._counts = Counts()
        self._is_open = False
        self._goes_on = False  # the state of an earlier logger was loaded, and nothing has been opened since
        self._trainings = 0  # training engines that it is attached to
        self._told: set[str] = set()

    # ------------------------------------------------------------------ when

    def subscriptions(self) -> Sequence[Subscription]:
        subscriptions: list[Subscription] = [(Events.METRICS_RECORDED, self._log_record)]
        if self._output:
            event = Events.ITERATION_COMPLETED(every=self._every)
            subscriptions.append((event, self._log_output))
        return (*subscriptions, *self._more_subscriptions())

    def _more_subscriptions(self) -> Sequence[Subscription]:
        """Return what only this kind of logger listens to."""
        return ()

    def last_subscriptions(self) -> Sequence[Subscription]:
        return ((Events.EPOCH_COMPLETED, self._flush_epoch), (_END, self._end_run))

    def attach(self, engine: Engine) -> Self:
        """Write what ``engine`` records and puts out from now on, and return the logger itself."""
        super().attach(engine)
        self._trainings += engine.state.mode == "train"
        return self

    def detach(self, engine: Engine) -> None:
        """Write nothing more of ``engine``."""
        super().detach(engine)
        self._trainings -= engine.state.mode == "train"

    def _log_record(self, engine: Engine, batch: Any) -> None:
        if engine.state.rank == 0:
            record = engine.state.last_record
            assert record is not None, "METRICS_RECORDED comes with a record"
            self._log(engine, record.values.raw())

    def _log_output(self, engine: Engine, batch: Any) -> None:
        if engine.state.rank != 0 or engine.state.mode != "train":
            return
        prefix = f"{engine.name}/" if self._prefix is None else self._prefix
        selected = select_output(self._output, engine.state.output)
        self._log(engine, {prefix + name: value for name, value in selected.items()})

    def _log(self, engine: Engine, values: Mapping[str, Any]) -> None:
        counts = self._ready(engine)
        numbers, others = read_scalars(values)  # waits for the device
        for name in others:
            self._tell_once(name, f"{name!r} is no number and no short vector of numbers, and is not written")
        if numbers:
            self._write(counts, numbers)

    def _tell_once(self, about: str, what: str) -> None:
        if about not in self._told:
            self._told.add(about)
            logger.warning("%r: %s", self, what)

    # ------------------------------------------------------------------ where

    def _ready(self, engine: Engine) -> Counts:
        """Open what is written to, unless it is open, and return where the outermost training stands."""
        state = _outermost(engine)
        if not self._is_open:
            self._open(engine, is_training=state.mode == "train")
            self._is_open, self._goes_on = True, False
        if state.mode == "train":
            now = Counts(state.epoch, state.iteration, state.updates)
            if now.iteration >= self._counts.iteration:
                self._counts = now
            elif now.iteration < self._counts.iteration - 1:  # one less: the iteration in work was not done
                self._tell_once(
                    "going back",
                    f"the run stands at iteration {now.iteration}, and iteration {self._counts.iteration} was written "
                    "already: what comes is written there. A run that begins anew needs a logger of its own",
                )
        return self._counts

    def _flush_epoch(self, engine: Engine, batch: Any) -> None:
        if self._is_open:
            self._flush()

    def _end_run(self, engine: Engine, batch: Any) -> None:
        if not self._is_open:
            return
        if engine.state.depth and self._trainings:
            self._flush()  # the training around this run closes it
            return
        self._is_open = False
        ending = engine.state.stop_reason if engine.state.exception is None else "failed"
        if isinstance(engine.state.exception, KeyboardInterrupt):
            ending = "interrupted"
        self._close(ending or "completed")

    # ------------------------------------------------------------------ the back end

    @abstractmethod
    def _open(self, engine: Engine, is_training: bool) -> None:
        """Open what is written to, on rank 0."""

    @abstractmethod
    def _write(self, counts: Counts, numbers: Mapping[str, int | float]) -> None:
        """Write numbers down."""

    @abstractmethod
    def _flush(self) -> None:
        """Bring what was written to where others can read it."""

    @abstractmethod
    def _close(self, ending: str) -> None:
        """Flush and let go; ``ending`` as ``engine.state.stop_reason``."""

    # ------------------------------------------------------------------ its own state

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands, so that a resumed run goes on in the same place."""
        return {"counts": list(self._counts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of an earlier ``state_dict()``.

        Raises:
            CheckpointError: it is none of such a logger.
        """
        wanted = self.state_dict()
        counts = state_dict.get("counts")
        if set(state_dict) != set(wanted) or not isinstance(counts, list) or len(counts) != len(Counts._fields):
            raise CheckpointError(
                f"{type(self).__name__}: the keys {list(wanted)} were wanted, with counts of {Counts._fields}, got "
                f"{dict(state_dict)!r}"
            )
        if self._is_open:
            self._is_open = False
            self._close("interrupted")
        self._counts = Counts(*counts)
        self._goes_on = True

    def _shown(self) -> str:
        output = self._output if callable(self._output) else list(self._output)
        return f"output={output!r}, every={self._every}" if self._output else "no output"


def _outermost(engine: Engine) -> StateView:
    state = engine.state
    while state.parent is not None:
        state = state.parent
    return state
