"""Save what a run needs to go on, now and then and where a score is the best."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine import (
    CheckpointError,
    CheckpointInfo,
    Engine,
    EventLike,
    Events,
    Saving,
    clear_unfinished,
    list_checkpoints,
    remove_checkpoint,
    save_checkpoint,
)
from ._attachable import Attachable, Subscription
from ._monitor import Mode, Monitor, require_number

__all__ = ["Checkpoint"]

logger = logging.getLogger("pellucid.handlers")

_END = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED
_EPOCH_END = Events.EPOCH_COMPLETED | Events.TERMINATE_SINGLE_EPOCH


class Checkpoint(Attachable):
    """Save a checkpoint at ``every`` event, at the end of a run, and where ``monitor`` is best; remove the outdated.

    It saves after all other handlers of the event have run (of the iteration, for an event inside the step), whatever
    the order of attaching, so what they do there is in it, and :func:`~pellucid.engine.resume` goes on to the bit. The
    new checkpoint is whole on the disk before an old one is removed. An error in saving leaves the run.

    Which is best is decided by what is recorded at the very iteration that is saved; NaN and infinity are never best.
    On ranks, ``monitor`` must be recorded on all of them, and rank 0's value decides.

    Without ``monitor`` the ``n_saved`` newest are kept. With it, the ``n_saved`` best, and the newest.

    Args:
        directory: has one folder for each checkpoint. Those of other runs are left alone. It is made when a run starts.
        every: when to save, such as ``Events.ITERATION_COMPLETED(every=1000)``.
        monitor: the name of a recorded metric, such as ``"val/accuracy"``.
        mode: ``"max"`` if larger is better, ``"min"`` if smaller is; wanted with ``monitor``.
        n_saved: how many are kept.
        keep_last: with ``monitor``: save at ``every`` too, and keep the newest beside the best.
        async_save: go on with the run as soon as everything is copied to the host, and write in the background. One
            checkpoint at a time; an error is raised at the next event. Takes the host's memory for one more copy.
        first_epoch: as for ``EarlyStopping``: the epoch by whose end ``monitor`` must have come once.

    Example:
        >>> Validate(evaluator, val_loader, every=Events.EPOCH_COMPLETED, prefix="val/").attach(trainer)
        >>> checkpoint = Checkpoint("runs/digits", monitor="val/accuracy", mode="max", n_saved=2).attach(trainer)
        >>> resume(trainer, "runs/digits")
        >>> result = trainer.run(loader, max_epochs=3)
        >>> load_weights(model, checkpoint.best.path)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: EventLike = Events.EPOCH_COMPLETED,
        *,
        monitor: str | None = None,
        mode: Mode | None = None,
        n_saved: int = 1,
        keep_last: bool = True,
        async_save: bool = False,
        first_epoch: int = 1,
    ) -> None:
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise TypeError(f"directory={directory!r}: the path of a folder was wanted, such as 'runs/digits'")
        if monitor is None and (mode is not None or not keep_last):
            raise ValueError("mode and keep_last=False are for checkpoints that are best by a score: give monitor= too")
        self._directory = Path(directory).expanduser().absolute()
        _require_place(self._directory)
        self._every = every
        self._monitor = None if monitor is None else _monitor(monitor, mode, first_epoch)
        self._n_saved: int = require_number("n_saved", n_saved, least=1, whole=True)
        self._keep_last = bool(keep_last)
        self._async = bool(async_save)
        self._run = os.urandom(8).hex()  # marks the checkpoints of this run
        self._is_due = False
        self._score: tuple[int, float] | None = None  # with the iteration at which it was recorded
        self._saved_at: int | None = None  # the iteration, unless its epoch has ended since
        self._saving: Saving | None = None

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._directory

    @property
    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints of this run that are on the disk, the newest first."""
        return [one for one in list_checkpoints(self._directory) if one.about.get("run") == self._run]

    @property
    def last(self) -> CheckpointInfo | None:
        """The newest checkpoint of this run, or None."""
        return next(iter(self.checkpoints), None)

    @property
    def best(self) -> CheckpointInfo | None:
        """The checkpoint of this run with the best score, or None."""
        return next(iter(self._ranked(self.checkpoints)), None)

    def subscriptions(self) -> Sequence[Subscription]:
        subscriptions: list[Subscription] = [(Events.STARTED, self._begin), (_EPOCH_END, self._note_epoch)]
        if self._keep_last:
            subscriptions += [(self._every, self._note_due), (_END, self._note_end)]
        if self._monitor is not None:
            subscriptions += [(Events.METRICS_RECORDED, self._note_score), *self._monitor.subscriptions()]
        return subscriptions

    def last_subscriptions(self) -> Sequence[Subscription]:
        before = Events.STARTED | Events.EPOCH_STARTED
        return (
            (before | Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED | _END, self._settle),
            (_END, self._finish),
            (Events.EXCEPTION_RAISED, self._let_finish),
        )

    # ------------------------------------------------------------------ when

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._is_due, self._score = False, None
        self._run = engine.strategy.broadcast(self._run)
        engine.state_dict()  # a declared field that cannot be saved is an error now, not when the first epoch is lost
        if engine.state.rank != 0:
            return
        _require_place(self._directory)
        self._directory.mkdir(parents=True, exist_ok=True)  # cannot it be made, the first epoch is not lost over it
        clear_unfinished(self._directory)
        others = len(list_checkpoints(self._directory)) - len(self.checkpoints)
        if others and engine.state.iteration == 0:
            logger.warning(
                "%s has %d checkpoint(s) of another run, which are left alone. resume(engine, %r) goes on with the "
                "newest; another directory keeps runs apart",
                self._directory,
                others,
                str(self._directory),
            )

    def _note_due(self, engine: Engine, batch: Any) -> None:
        self._is_due = True

    def _note_epoch(self, engine: Engine, batch: Any) -> None:
        self._saved_at = None

    def _note_end(self, engine: Engine, batch: Any) -> None:
        """Save where a run ends, unless it stands where it was saved last."""
        self._is_due = self._is_due or self._saved_at != engine.state.iteration

    def _note_score(self, engine: Engine, batch: Any) -> None:
        assert self._monitor is not None, "only what is best by a score listens to records"
        value = self._monitor.read(engine)  # waits for the device
        if value is not None:
            self._score = (engine.state.iteration, value)

    def _settle(self, engine: Engine, batch: Any) -> None:
        """Save if it is due, now that everything of the event has been done."""
        if self._saving is not None:
            self._saving.check()
        if self._score is None and not self._is_due:
            return
        score, is_best = self._judge(engine)
        if self._is_due or is_best:
            self._is_due = False
            self._save(engine, score)

    def _judge(self, engine: Engine) -> tuple[float | None, bool]:
        """Return the score of this very iteration, and whether it is among the best."""
        recorded, self._score = self._score, None
        if recorded is None or recorded[0] != engine.state.iteration:
            return None, False
        self.wait()  # one that is being written is among those it is compared with
        score = recorded[1]
        # ranks must agree on whether they save
        assert self._monitor is not None, "a score was recorded"
        judged: tuple[float | None, bool] = engine.strategy.broadcast(
            (score, self._is_among_the_best(score)),
            f"the score of {self!r}: monitor={self._monitor.name!r} must be recorded on every rank",
        )
        return judged

    def request(self, engine: Engine) -> None:
        """Save at the end of the present event, unless it stands where it was saved last. On ranks, ask on all."""
        self._note_end(engine, None)

    # ------------------------------------------------------------------ saving

    def save(self, engine: Engine) -> None:
        """Save ``engine`` now. A collective. In an event, what its later handlers do is not in it.

        Raises:
            CheckpointError: a part of the engine holds what a weights-only loader would not read.
            OSError: it could not be written; nothing is left of it then.
        """
        self._save(engine, None)

    def _save(self, engine: Engine, score: float | None) -> None:
        self.wait()
        self._run = engine.strategy.broadcast(self._run)
        about: dict[str, Any] = {"run": self._run}
        if self._monitor is not None:
            is_finite = score is not None and self._monitor.is_better(score, None)
            about |= {"monitor": self._monitor.name, "mode": self._monitor.mode, "score": score if is_finite else None}
        saving = save_checkpoint(
            engine, self._directory, about=about, background=self._async, then=self._remove_outdated
        )
        self._saving = saving if self._async else None
        self._saved_at = engine.state.iteration

    def wait(self) -> None:
        """Wait for a checkpoint that is being written in the background. A collective.

        Raises:
            OSError: it could not be written; on the other ranks CheckpointError.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def _finish(self, engine: Engine, batch: Any) -> None:
        self.wait()

    def _let_finish(self, engine: Engine, batch: Any) -> None:
        """Let the background end before an error leaves the run. No collective: only this rank may be here."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
            saving.check()

    # ------------------------------------------------------------------ which are kept

    def _ranked(self, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return those with a score, the best first, of equal ones the older."""
        if self._monitor is None:
            return []
        name, sign = self._monitor.name, -1 if self._monitor.mode == "max" else 1
        scored = [one for one in reversed(checkpoints) if one.score is not None and one.about.get("monitor") == name]
        return sorted(scored, key=lambda one: sign * float(one.score or 0.0))

    def _is_among_the_best(self, score: float) -> bool:
        assert self._monitor is not None, "a score was recorded"
        ranked = self._ranked(self.checkpoints)
        worst = ranked[self._n_saved - 1].score if len(ranked) >= self._n_saved else None
        return self._monitor.is_better(score, worst)

    def _remove_outdated(self, newest: Path) -> None:
        checkpoints = self.checkpoints
        kept = self._ranked(checkpoints)[: self._n_saved] if self._monitor else checkpoints[: self._n_saved]
        keeps = {newest, *(one.path for one in kept)}
        for one in checkpoints:
            if one.path not in keeps:
                remove_checkpoint(one.path)

    # ------------------------------------------------------------------ its own state

    def state_dict(self) -> dict[str, Any]:
        """Return the mark of the run, which a resumed one knows its checkpoints by, and whether a score has come."""
        return {"run": self._run, "has_score": self._monitor is not None and self._monitor.has_come}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of an earlier ``state_dict()``.

        Raises:
            CheckpointError: other keys than that has.
        """
        if set(state_dict) != {"run", "has_score"} or not isinstance(state_dict["run"], str):
            raise CheckpointError(f"Checkpoint: the keys 'run' and 'has_score' were wanted, got {dict(state_dict)!r}")
        self._run = state_dict["run"]
        if self._monitor is not None:
            self._monitor.has_come = bool(state_dict["has_score"])

    def __repr__(self) -> str:
        """Show where and what it saves."""
        monitor = "" if self._monitor is None else f", monitor={self._monitor.name!r}, mode={self._monitor.mode!r}"
        return f"Checkpoint({str(self._directory)!r}{monitor}, n_saved={self._n_saved})"


def _require_place(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: give Checkpoint the path of a folder, there or not")


def _monitor(name: str, mode: Mode | None, first_epoch: int) -> Monitor:
    if mode is None:
        raise ValueError(f"monitor={name!r} needs mode='max' (larger is better) or mode='min' (smaller is better)")
    return Monitor(name, mode=mode, first_epoch=first_epoch)
