"""Where an engine's runs stand, and what lets the next one go on from there.

A run leaves behind its limits, its place in the data with the random state of that place, and, of an iterator that can
be gone through only once, the batch that was drawn and not trained on. Everything else that belonged to a run is let go
of at its end: data, batch, output, error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ._loop import NO_BATCH, IgniteLoop, Standing
from .agreement import Agreement, Heard
from .data import EmptyDataError, HeldIterator, RunData, at_most, check_data, check_factory, is_factory
from .errors import LimitError
from .limits import Limits
from .nesting import Running, active, as_found_again
from .optimizers import refuse_differences
from .position import Position
from .rng import go_own_way
from .state import RunStatus
from .strategies import Peers, Shards, Strategy, stated_length
from .updates import Updates

__all__ = ["Course", "in_use_around"]


class Course:
    """The runs of one engine, from the first on.

    Args:
        loop: what runs.
        status: what is told of a run in progress.
        updates: what is told of each batch, and of a step that was cut short.
        strategy: brings batches to the device, and knows the other ranks.
        model: what runs.
        shards: which batches are this rank's; None where there is one rank.
    """

    def __init__(
        self,
        loop: IgniteLoop,
        status: RunStatus,
        updates: Updates,
        strategy: Strategy,
        model: Any,
        shards: Shards | None,
    ) -> None:
        self._loop = loop
        self._status = status
        self._updates = updates
        self._strategy = strategy
        self._model = model
        self._shards = shards
        self.limits = Limits()
        self._position: Position | None = None
        self._held: HeldIterator | None = None
        self._data: RunData | None = None
        self._is_resumed = False  # and no run has begun since
        self._put_back: Callable[[], None] = _nothing  # what the other ranks' waits were asked before the run

    @property
    def _trains(self) -> bool:
        return self._status.mode == "train"

    def plan(self, asked: Limits, data: Any) -> bool:
        """Check limits and data, and say whether anything is left to do; an evaluation begins afresh here.

        Raises:
            LimitError: a limit below what is done, or no data and no epoch length.
            DataError: data that cannot be run over.
        """
        limits = asked.over(self.limits if self._trains else Limits())
        if data is None and limits.epoch_length is None:
            raise LimitError("run() needs data, or epoch_length for a step that needs none")
        if data is None and limits.batches is not None:
            raise LimitError(f"limit_batches={limits.batches!r} is of the data, and there is none: give epoch_length")
        if is_factory(data):
            check_factory(data)
        elif data is not None:
            check_data(data, in_use_around(self))
        if not self._trains:
            self.begin_afresh()
        state, loop = self._loop.state, self._loop
        limits.check_reachable(state.epoch, state.iteration, state.epoch_iteration if loop.epoch_open else 0)
        if limits.are_reached(state.epoch, state.iteration, loop.epoch_open):
            loop.ending = "completed"
            self._rejoin_once()
            return False
        self.limits = limits
        return True

    def _rejoin_once(self) -> None:
        """After a resume that leaves nothing to do, go on with the random state in which the run had ended."""
        if self._is_resumed and self._position is not None:
            self._position.random.restore()
        self._is_resumed = False

    def begin(self, engine: Running, data: Any) -> None:
        """Set up a run that ``plan`` has agreed to."""
        self._is_resumed = False
        loop, status, state, limits = self._loop, self._status, self._loop.state, self.limits
        outer = [other for other in active() if other is not engine]
        status.is_running, status.depth = True, len(outer)
        status.update_due = self._trains
        status.parent = outer[-1].state if outer else None
        state.max_epochs, state.max_iters = limits.max_epochs, limits.max_iters
        loop.epoch_limit = limits.epoch_length
        state.epoch_length = limits.epoch_length or at_most(limits.batches, self._expected_length(data))
        state.dataloader = data
        loop._init_iter = state.epoch_iteration if loop.epoch_open else 0
        if data is not None:
            self._data = loop.source = self._open(engine, data)
        elif self._position is not None:
            self._position.random.restore()
        if self._strategy.peers is not None:
            self._join_ranks(engine, self._strategy.peers)
        if self._updates.follows_batches():
            self._follow_batches(self._data)

    def _expected_length(self, data: Any) -> int | None:
        if self._shards is None or data is None or is_factory(data) or isinstance(data, Iterator):
            return stated_length(data)
        return self._shards.of(data, self._trains).length

    def _join_ranks(self, engine: Running, peers: Peers) -> None:
        """Let the ranks of this run stop together."""
        loop, data, first = self._loop, self._data, self._loop.state.iteration == 0
        status = self._status
        what = f"a batch of engine {engine.name!r}"
        loop.agreement = agreement = Agreement(peers, what, lambda: status.updates)

        is_collective = self._strategy.forward_is_collective and not self._trains
        watch_batch = self._watch_updates(peers)
        if self._trains:
            refuse_differences(self._updates.settings(), peers)

        def begin_batch(done: int) -> None:
            watch_batch()
            # a rank at its end must be heard at that batch: in training where nobody knew before, in evaluation where
            # it goes on to take part in the others' steps
            may_end = self._trains and data is not None and data.length is None
            agreement.begin_batch(ends=data is not None and data.is_last, often=may_end or is_collective)

        loop.before_step = begin_batch
        if not self._trains:
            loop.may_be_empty = True
            loop.await_peers = partial(_await_peers, agreement, loop, self._ghost_step(engine))
        elif first and self._strategy.data_rank:
            go_own_way(self._strategy.data_rank)
        if data is not None:
            data.look_ahead = self._trains  # where only the data knows how long it is

    def _watch_updates(self, peers: Peers) -> Callable[[], None]:
        """Let the peers know when this rank has left an update out; return what is to be called before each step."""
        status, loop = self._status, self._loop
        batch, updates = 0, status.updates
        if not self._trains or not status.updates_by_optimizer:
            return lambda: None

        def is_missed() -> bool:
            is_over = loop.done_iteration == batch
            return is_over and status.update_due and status.updates == updates > 0

        def watch_batch() -> None:
            nonlocal batch, updates
            if self._strategy.forward_is_collective and is_missed():
                peers.barrier("a batch after one without an update")
            batch, updates = loop.state.iteration, status.updates

        self._put_back = partial(setattr, peers, "is_missed", peers.is_missed)
        peers.is_missed = is_missed
        return watch_batch

    def _ghost_step(self, engine: Running) -> Callable[[], None] | None:
        """Return what a rank without batches does while others take a step that is a collective."""
        loop, data = self._loop, self._data
        if not self._strategy.forward_is_collective or data is None:
            return None
        step = loop._process_function

        def ghost_step() -> None:
            step(engine, data.ghost())  # type: ignore[arg-type]  # the owner is what its step is called with

        return ghost_step

    def _follow_batches(self, data: RunData | None) -> None:
        """Let the updates know of each batch, and whether the epoch ends with it."""
        loop, updates, epoch_length = self._loop, self._updates, self.limits.epoch_length
        before, strategy, status = loop.before_step, self._strategy, self._status
        peers = strategy.peers
        if data is not None:
            data.look_ahead |= epoch_length is None and updates.accumulates()

        def begin_batch(done: int) -> None:
            if before is not None:
                before(done)
            length = epoch_length if data is None else epoch_length or data.length
            remaining = length - done if length is not None and done < length else None
            is_last = data is not None and data.is_last
            if peers is not None and length is None and updates.accumulates():
                # a window ends on all ranks at one batch, which must be known before the step
                is_last = bool(peers.largest("the end of the data", [is_last])[0])
            updates.begin_batch(remaining, is_last)
            strategy.sync_gradients(self._model, status.update_due)

        loop.after_start, loop.before_step = updates.begin_run, begin_batch
        loop.after_step, loop.after_epoch = updates.end_batch, updates.flush

    def _open(self, engine: Running, data: Any) -> RunData:
        held = self._held
        if held is not None and held.iterator is data:
            held.continued, data = True, held
        elif isinstance(data, Iterator) and self._trains:
            data = HeldIterator(data, None if self._shards is None else self._shards.of(data, True).source)
        self._held = data if isinstance(data, HeldIterator) else None
        loop = self._loop
        run_data = RunData(
            data,
            prepare=self._strategy.prepare_batch,
            shards=self._shards,
            state=engine.state,
            done=lambda: loop.done_iteration,
            in_work=lambda: loop.undone_batch() is not NO_BATCH,
            in_use=in_use_around(self),
            limit=self.limits.batches,
            record=self._trains,
        )
        run_data.resume, self._position = self._position, None
        return run_data

    def finish(self, engine: Running) -> None:
        """Keep where the run stands, and let go of everything that belonged to it."""
        data = self._data
        try:
            self._keep_standing(engine)
        finally:  # whatever happens to that, a second Ctrl-C too, the engine is at rest
            self.rest()
            if data is not None:
                data.close()  # the last thing: it may wait for worker processes, and be interrupted

    def _keep_standing(self, engine: Running) -> None:
        loop = self._loop
        if loop.undone_batch() is not NO_BATCH and self._held is not None:
            self._held.held.append(loop.undone_batch())
        self._position = self.position(engine)
        self._updates.cut(loop.was_left_in_step(), loop.state.iteration > loop.done_iteration)
        if self._position is None or self._position.opened is None:
            self._held = None

    def rest(self) -> None:
        """Be no run any more."""
        loop, status = self._loop, self._status
        self._data = None
        self._put_back()
        self._put_back = _nothing
        loop.flags = {"should_terminate_single_epoch": loop.epoch_ends()}
        loop.set_standing(loop.standing())
        loop.leave()
        status.is_running, status.depth, status.parent, status.update_due = False, 0, None, False

    def position(self, engine: Running) -> Position | None:
        """Return where a training run stands in its data, in progress or not."""
        if not self._trains:
            return None
        if not self._status.is_running:
            return self._position
        with as_found_again(engine):
            return Position.between_passes() if self._data is None else self._data.position()

    def begin_afresh(self) -> None:
        """Forget all runs: the next one is the first."""
        loop, state = self._loop, self._loop.state
        loop.set_standing(Standing(0, 0, 0, False))
        loop.ending = None
        loop.flags.clear()
        loop.firings.clear()
        state.max_epochs = state.max_iters = state.epoch_length = None
        state.metrics.clear()
        loop._event_handlers.forget_firings()
        self._status.last_record = None
        self.go_on_from(Limits(), None)

    def go_on_from(self, limits: Limits, position: Position | None) -> None:
        """Let the next run go on from a place that was saved."""
        self.limits, self._position, self._held = limits, position, None
        self._is_resumed = position is not None

    def in_use(self) -> Iterator[Any]:
        """Yield what the run in progress iterates."""
        for part in () if self._data is None else (self._data.data, self._data.source, self._data.raw):
            yield part
            if isinstance(part, HeldIterator):
                yield part.iterator


def _nothing() -> None:
    pass


def _await_peers(agreement: Agreement, loop: IgniteLoop, ghost_step: Callable[[], None] | None) -> Heard:
    """Go on until the other ranks have no batch left either."""
    heard, had_more = agreement.await_others(ghost_step)
    if not had_more and loop.state.epoch_iteration == 0 and not heard.asked:
        raise EmptyDataError("the data gave no batch on any rank: give data with at least one")
    return heard


def in_use_around(course: Course) -> tuple[Any, ...]:
    """Return what the runs around this one iterate."""
    return tuple(part for engine in active() if engine._course is not course for part in engine._course.in_use())
