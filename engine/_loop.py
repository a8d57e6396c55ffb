"""The Ignite engine underneath: one loop.

``IgniteLoop`` is a true Ignite engine: built alone it takes the place of its parent (``tests/test_ignite_suite.py``
runs Ignite's own tests on it), and any Ignite component attaches to it. Three things are replaced, each for a reason:

- Events go through our table of handlers (``_firing.py``).
- The loop is written once (Ignite keeps two copies behind a flag). It is a generator, as Ignite's, since ``interrupt``
  pauses it; it holds neither the batch nor the output while the next ones are made.
- An epoch ends where its data ends, or at an explicit length; a length that the data states is only a hint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from ignite.engine import Events as IgniteEvents
from ignite.engine import State
from ignite.engine.engine import _EngineTerminateException, _EngineTerminateSingleEpochException
from ignite.metrics import Metric

from ._stopping import Source, StoppingEngine
from .data import EmptyDataError
from .errors import RunError
from .events import Events

__all__ = ["NO_BATCH", "IgniteLoop", "Source", "Standing"]

NO_BATCH = object()
_SPENT_BATCH = object()  # an update was made with it, so it must not come again


class Standing(NamedTuple):
    """Where a run stands: the counters with everything that is done, and nothing that was only begun."""

    epoch: int
    iteration: int
    epoch_iteration: int
    epoch_open: bool


class LoopState(State):
    """Ignite's state with one more counter."""

    epoch_iteration: int = 0
    """the batch in work, counted in its epoch from 1"""


def _is_first_run(engine: Any, event: int) -> bool:
    return bool(engine.state.iteration == 0)


class IgniteLoop(StoppingEngine):
    """Ignite's engine with our table of handlers and one loop.

    An ``Engine`` sets ``owner`` (weakly: it owns the loop), ``source`` and ``keep`` and drives ``_internal_run``;
    alone, the loop is driven by Ignite's own ``run``.
    """

    def __init__(self, process_function: Callable[[Any, Any], Any]) -> None:
        """Make a loop around ``process_function(engine, batch)``."""
        self.may_be_empty = False  # the data of this rank, where others have some
        self.keep: Callable[[Any], Any] | None = None
        self.after_start: Callable[[], None] | None = None
        self.before_step: Callable[[int], None] | None = None  # with the number of batches done in the epoch
        self.after_step: Callable[[], None] | None = None
        self.after_epoch: Callable[[], None] | None = None
        self.epoch_limit: int | None = None
        self.epoch_open = False
        self.done_iteration = 0  # iterations whose step has returned, or has made an update before it failed
        self.batch_in_work: Any = NO_BATCH  # drawn from the data, and its step has not returned
        self._started = 0.0
        self._ends_at_once: bool | str = False  # the epoch that the run goes on in
        super().__init__(process_function)
        self.state: LoopState = LoopState()

    # ------------------------------------------------------------------ the run

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Attach as Ignite does. A metric that begins with a run (a running average) goes on with the next one."""
        is_metrics = isinstance(getattr(handler, "__self__", None), Metric) and handler.__name__ == "started"
        if self.owner is not None and is_metrics and event_name is IgniteEvents.STARTED:
            event_name = IgniteEvents.STARTED(event_filter=_is_first_run)
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over Ignite's counters, as some of its handlers do; an ``Engine`` then stands between two epochs."""
        super().load_state_dict(state_dict)
        if self.owner is not None:
            self.set_standing(Standing(self.state.epoch, self.state.iteration, 0, False))

    def run(self, *args: Any, **kwargs: Any) -> State:
        """Run as Ignite's engine does; see :meth:`ignite.engine.Engine.run`."""
        if self.owner is not None:
            raise RunError("engine.ignite is driven by its Engine: call engine.run(...)")
        return super().run(*args, **kwargs)

    def _internal_run(self) -> State:
        """Run until the end, or until ``interrupt`` pauses the loop; the next call goes on from the pause."""
        state, completed = self.state, Events.COMPLETED.name
        if self._internal_run_generator is None:
            self._begin()
        try:
            try:
                next(self._internal_run_generator)  # type: ignore[arg-type]
                return state
            except StopIteration:
                self.ending = "completed"
            except _EngineTerminateException:
                self.ending = "terminated"
            # outside of the except blocks: what ends the loop is no context of an error in a handler
            if self.ending == "terminated":
                self._fire_event(Events.TERMINATE)
            state.times[completed] = time.time() - self._started
            if self.should_terminate != "skip_completed":
                state.batch = None
                self._fire_event(Events.COMPLETED)
                state.times[completed] = time.time() - self._started
        except BaseException as error:
            self._handle_exception(error)
        finally:
            if self.ending != "interrupted" or self.error is not None:
                self._internal_run_generator = self._dataloader_iter = None
        return state

    _internal_run_legacy = _internal_run

    def _begin(self) -> None:
        if self.owner is None:
            self.epoch_open = False
            self.epoch_limit = self.state.epoch_length
        self._ends_at_once = self.epoch_ends()
        self.should_terminate = self.should_terminate_single_epoch = self.should_interrupt = False
        self.ending = self.error = None
        self._started = time.time()
        self._init_timers(self.state)
        self._internal_run_generator = self._epochs()  # type: ignore[assignment]

    def _epochs(self) -> Generator[Any, None, None]:
        state = self.state
        self._fire_event(Events.STARTED)
        self._agree()
        yield from self._obey(epoch=False)
        if self.source is not None:
            self.source.rejoin()
        if self.after_start is not None:
            self.after_start()
        first = True
        self.should_terminate_single_epoch = self._ends_at_once  # ranks hear of it after the next batch
        while self.epoch_open or not self._finished():
            started = time.time()
            if not self.epoch_open:
                state.epoch, state.epoch_iteration, self.epoch_open = state.epoch + 1, 0, True
                self._fire_event(Events.EPOCH_STARTED)
                self._agree()
                yield from self._obey(epoch=False)
            if self.should_terminate_single_epoch:
                self._abandon_epoch()
            else:
                self._open_data(first)
                self.in_epoch = True
                try:
                    ended = yield from self._epoch()
                finally:
                    self.in_epoch = False
                if not ended:
                    return  # max_iters inside an epoch, which stays open
            first = False
            self.epoch_open, state.batch = False, None
            if self.source is not None and self.epoch_limit is None:
                self.source.close()
            if self.after_epoch is not None:
                self.after_epoch()
            state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
            if self.should_terminate_single_epoch != "skip_epoch_completed":
                self._fire_event(Events.EPOCH_COMPLETED)
                state.times[Events.EPOCH_COMPLETED.name] = time.time() - started
            self.should_terminate_single_epoch = False
            self._agree()
            yield from self._obey()

    def _epoch(self) -> Generator[Any, None, bool]:
        """Go through one epoch, or what is left of it; return whether it has come to its end."""
        try:
            ended = yield from self._batches()
            if self.agreement is not None:
                self._agree(at_end=True)
                yield from self._obey()
            return ended
        except _EngineTerminateSingleEpochException:
            pass
        self._abandon_epoch()
        return True

    def _batches(self) -> Generator[Any, None, bool]:
        """Go through the batches of one epoch; return whether these were all."""
        state, fire, limit, keep = self.state, self._fire_event, self.epoch_limit, self.keep
        step, engine = self._process_function, self if self.owner is None else self.owner()
        before_step, after_step, agreement = self.before_step, self.after_step, self.agreement
        has_data = state.dataloader is not None
        n = state.epoch_iteration = self._init_iter or 0
        self._init_iter = None
        restarted = limit is not None and n >= limit
        while limit is None or n < limit:
            state.batch = None
            # past the stated length another batch is not expected: its event waits until it has come
            unexpected = limit is None and n == state.epoch_length
            if has_data and not restarted and not unexpected:
                fire(Events.GET_BATCH_STARTED)
                if self.asked:
                    yield from self._obey()
            self.batch_in_work = next(self._dataloader_iter, NO_BATCH)  # type: ignore[arg-type]
            if self.batch_in_work is NO_BATCH:
                if restarted:
                    self._warn_of_dry_data()
                    return state.max_epochs is not None
                if has_data:
                    fire(Events.DATALOADER_STOP_ITERATION)
                    yield from self._obey()
                if limit is None and (n > 0 or self.may_be_empty):
                    state.epoch_length = n
                    self._dataloader_iter = None
                    return True
                self._setup_dataloader_iter()
                restarted = True
                continue
            if unexpected:
                if self._is_at_max_iters():
                    return False
                fire(Events.GET_BATCH_STARTED)
                if self.asked:
                    yield from self._obey()
            state.batch = self.batch_in_work
            if has_data:
                fire(Events.GET_BATCH_COMPLETED)
                if self.asked:
                    yield from self._obey()
            restarted = False
            state.output = None
            state.iteration += 1
            state.epoch_iteration = n + 1
            if before_step is not None:
                before_step(n)
            fire(Events.ITERATION_STARTED)
            if self.asked:
                yield from self._obey()
            state.output = step(engine, state.batch)
            if keep is not None and state.output is not None:
                state.output = keep(state.output)
            if after_step is not None:
                after_step()
            n += 1
            self.batch_in_work = NO_BATCH
            self.done_iteration = state.iteration
            fire(Events.ITERATION_COMPLETED)
            if agreement is not None:
                self._take(agreement.hear())
            if self.asked:
                yield from self._obey()
            # at the length that the data states, only the data can say whether the epoch is over
            expected_end = limit is None and n == state.epoch_length
            if state.max_iters is not None and not expected_end and self._is_at_max_iters():
                return n == limit
        return True

    def _is_at_max_iters(self) -> bool:
        return self.state.max_iters is not None and self.state.iteration >= self.state.max_iters

    def _abandon_epoch(self) -> None:
        """Leave the epoch as ``terminate_epoch`` asks; a batch in work counts as done, it will not come again."""
        self._dataloader_iter = self._init_iter = None
        if self.source is not None:
            self.source.leave_pass()
        self.done_iteration = self.state.iteration
        self.batch_in_work, self.epoch_open = NO_BATCH, False
        self._fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=self.state.epoch_iteration)

    def _warn_of_dry_data(self) -> None:
        if not self._finished():
            warnings.warn(
                f"Data iterator can not provide data anymore: the run stands at iteration {self.state.iteration} and "
                "has not reached its limit. Give data that can be iterated again, or a shorter epoch_length",
                stacklevel=2,
            )

    def _finished(self) -> bool:
        state = self.state
        if self._is_at_max_iters():
            return True
        if state.max_epochs is None:
            return False
        # a state that was loaded into a loop alone may give the iteration and not the epoch
        length = self.epoch_limit if self.owner is None else None
        counted = length is not None and state.iteration >= length * state.max_epochs
        return bool(state.epoch >= state.max_epochs or counted)

    def _open_data(self, first: bool) -> None:
        """Begin a new pass over the data, unless an explicit epoch length lets one pass go on over the border."""
        if first and self._dataloader_iter is None:
            self._setup_engine()  # Ignite's: where a loaded state stands inside its epoch
        elif self._dataloader_iter is None or self.epoch_limit is None:
            self._setup_dataloader_iter()

    def _setup_dataloader_iter(self) -> None:
        if self.source is None or self.state.dataloader is None:
            super()._setup_dataloader_iter()
        else:
            self._dataloader_iter = self.source.open()

    def finish_iteration(self) -> None:
        """Count the iteration in work as done: its step has changed the weights, so it cannot be repeated."""
        if self.state.iteration > self.done_iteration:
            self.done_iteration = self.state.iteration
            self.batch_in_work = _SPENT_BATCH

    def undone_batch(self) -> Any:
        """Return the batch that was drawn and not trained on, else ``NO_BATCH``."""
        return NO_BATCH if self.batch_in_work is _SPENT_BATCH else self.batch_in_work

    def was_left_in_step(self) -> bool:
        """Say whether the step of the iteration in work did not return."""
        return self.batch_in_work is _SPENT_BATCH or self.state.iteration > self.done_iteration

    def epoch_ends(self) -> bool | str:
        """Return what was asked of ``terminate_epoch`` and has not taken effect, unless its iteration comes again."""
        is_done = self.epoch_open and self.state.iteration == self.done_iteration
        return self.wish("should_terminate_single_epoch") if is_done else False

    def standing(self) -> Standing:
        """Return where the run stands, without an iteration that is not done and an epoch that had no data."""
        state = self.state
        undone = state.iteration - self.done_iteration
        standing = Standing(state.epoch, self.done_iteration, state.epoch_iteration - undone, self.epoch_open)
        if isinstance(self.error, EmptyDataError) and self.epoch_open and standing.epoch_iteration == 0:
            standing = Standing(state.epoch - 1, self.done_iteration, 0, False)
        return standing

    def set_standing(self, standing: Standing) -> None:
        """Stand at another place."""
        state = self.state
        state.epoch, state.iteration = standing.epoch, standing.iteration
        self.done_iteration = standing.iteration
        state.epoch_iteration, self.epoch_open = standing.epoch_iteration, standing.epoch_open

    def is_executing(self) -> bool:
        """Say whether the loop is running now, in whatever thread."""
        return bool(getattr(self._internal_run_generator, "gi_running", False))

    def leave(self) -> None:
        """Let go of everything that belonged to a run: its pause, its data, batch, output and error."""
        if self._internal_run_generator is not None:
            self._internal_run_generator.close()
        self._internal_run_generator = self._dataloader_iter = self._init_iter = None
        self.state.dataloader = self.state.batch = self.state.output = None
        self.error = self.source = None
        self.after_start = self.before_step = self.after_step = self.after_epoch = None
        self.part_from_peers()
        self.may_be_empty = False
        self.batch_in_work = NO_BATCH
