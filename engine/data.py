"""The run's data: what may be iterated, where a pass stands, and how it is taken up again.

A pass begins where the data is opened: at each epoch's start, or once for many epochs when an explicit epoch length
lets one pass go on over the borders. The random state at that moment, the number of batches done since and the random
state now are a :class:`Position`; with them the rest of the pass comes out as if it had never been left: the pass is
opened again in its first state, the batches done are drawn and dropped, and the present random state is put back.
(With workers that are new in each pass this also gives every worker the random state it had.) What had been drawn and
was not done, a batch or the end of the data, is drawn again before the present random state is put back.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from .errors import DataError
from .look_ahead import LookAhead
from .position import Position
from .rng import GeneratorStates, Moment, RandomState
from .skipping import without_loading
from .stateful import is_stateful, place_between, place_in, tell_doubts
from .strategies import AlreadySharded, Shards, stated_length, tell_epoch

__all__ = [
    "EmptyDataError",
    "HeldIterator",
    "RunData",
    "at_most",
    "check_data",
    "check_factory",
    "is_factory",
]

_END = object()


class EmptyDataError(DataError):
    """A pass over the data that gave no batch at all."""


class RunData:
    """The data of one run, opened pass by pass.

    Args:
        data: an iterable of batches, or a callable ``state -> iterable`` that is asked at each opening.
        prepare: brings a batch to the device.
        state: what a callable is asked with.
        done: says how many iterations the engine has done in all.
        in_work: says whether a batch was drawn that is not done.
        shards: which of the batches are this rank's; None where there is one rank.
        in_use: what the runs around this one are iterating.
        limit: the most batches that are taken of a pass; None: all.
        record: keep what is needed to go on after a stop (training; an evaluation starts afresh).
    """

    def __init__(
        self,
        data: Any,
        *,
        prepare: Callable[[Any], Any],
        state: Any,
        done: Callable[[], int],
        in_work: Callable[[], bool],
        shards: Shards | None = None,
        in_use: tuple[Any, ...] = (),
        limit: int | None = None,
        record: bool = True,
    ) -> None:
        self.data = data
        self.prepare = prepare
        self.state = state
        self.done = done
        self.in_work = in_work
        self.shards = shards
        self.in_use = in_use
        self.limit = limit
        self.record = record
        self.source: Any = None  # what the present pass goes over
        self.resume: Position | None = None
        self.look_ahead = False  # at data of unknown length, to tell whether a batch is the last of its pass
        self.length: int | None = None  # of the present pass, as its data states it
        self._ahead: LookAhead | None = None
        self._pass_began_at = 0
        self._opened: tuple[RandomState, GeneratorStates, GeneratorStates | None] | None = None
        self._place_opened: Any = None  # of data that says itself where it stands, as are the batches it gives
        self._drawn_from: Iterator[Any] | None = None
        self.raw: Iterator[Any] | None = None  # the present pass itself
        self._redrawn: list[Any] = []  # what was drawn for a pass that is taken up again, and has not been handed out
        self._ended = False
        self._failed = False  # in drawing a batch
        self._workers = False  # were there before the pass was opened
        self._rejoined = False
        self._is_over = False  # the data of another rank has ended
        self._ghost: list[Any] = []

    def rejoin(self) -> None:
        """Take up the random state in which the run was stopped, before its next event; ``open`` does the rest."""
        if self.resume is not None:
            self.resume.random.restore()
            _restore(self.resume.asks if is_factory(self.data) else self.resume.generators_now, self.data)
            self._rejoined = True

    def open(self) -> Iterator[Any]:
        """Begin a pass over the data, or take up again the one that ``resume`` names.

        Raises:
            DataError: the data cannot be iterated, is empty, or an outer run is consuming it.
        """
        self.close()
        done = 0 if self.resume is None else self.resume.batches
        resume = None if _goes_on_by_itself(self.data) else self.resume
        opened = None if resume is None else resume.opened
        # before a callable is asked: it may draw random numbers
        now = RandomState() if self.record else None
        asks = GeneratorStates(self.data) if self.record and is_factory(self.data) else None
        if opened is not None:
            opened.restore()
            if resume is not None and asks is not None:
                _restore(resume.asked, self.data)
        asked = asks if opened is None or asks is None else GeneratorStates(self.data)
        source = self.data(self.state) if is_factory(self.data) else self.data
        check_data(source, self.in_use)
        length = None
        if self.shards is not None and not isinstance(source, HeldIterator):
            if resume is None:
                tell_epoch(source, self.state.epoch - 1)  # torch counts from 0
            share = self.shards.of(source, self.record)
            source, length = share.source, share.length
        self.source = source = _fresh_if_in_use(source, self.in_use)
        generators_now = None if resume is None else self._take_back(source, resume)
        self._workers = _has_workers(source)
        self._opened = None if now is None else (opened or now, GeneratorStates(source), asked)
        self._pass_began_at = self.done() - done
        has_place = self._load_place(source, resume)
        raw = iter(source)
        _refuse_consumed(raw, self.in_use)
        if self.record and is_stateful(source):
            self._drawn_from = raw
            if self._place_opened is None:
                self._place_opened = place_in(source, raw)
        self.raw, self.length = raw, stated_length(source)
        if self.shards is not None:
            if self.length != length:
                raw = itertools.islice(raw, length)
            self.length = length
        replayed = resume if opened is not None and done else None
        if replayed is not None:
            tell_doubts(source, has_place, replayed.workers)
            if not has_place:
                _skip(raw, done, draws_again=replayed.drawn or generators_now is None)
        if self.limit is not None:
            raw, self.length = itertools.islice(raw, max(self.limit - done, 0)), at_most(self.limit, self.length)
        if self.look_ahead and self.length is None:
            raw = self._ahead = LookAhead(raw, source, done, () if replayed is None else replayed.ahead)
        if replayed is not None and now is not None:
            if replayed.drawn and self._ahead is None:
                self._redrawn = list(itertools.islice(raw, 1))
            now.restore()
            _restore(generators_now, source)
            _restore(asks, self.data)
        self.resume = None
        return self._batches(raw, done > 0)

    def _load_place(self, source: Any, resume: Position | None) -> bool:
        """Put data that says itself where it stands where it was; return whether that leaves no batch to go past."""
        self._place_opened = None
        if resume is None or not is_stateful(source) or (resume.opened is None and not resume.is_saved):
            return False  # between two passes a run may be given other data, and this one stands where it stood
        self._place_opened = resume.place_opened
        place = resume.place_opened if resume.place is None else resume.place
        if place is not None:
            source.load_state_dict(copy.deepcopy(place))
        return resume.place is not None

    def _take_back(self, source: Any, resume: Position) -> GeneratorStates | None:
        """Let data have its workers and generators as when its pass was opened; return the generators as they are now.

        That is as the run was stopped, but for what handlers have done since, such as seeding for the epoch. None if
        the pass alone can say how they are.
        """
        _bring_workers(source, resume.workers)
        if is_factory(self.data):
            if resume.opened is None:
                return None  # the data of a new pass is as the callable has made it
            _restore(resume.generators_now, source)
        now = None if resume.generators_now is None else GeneratorStates(source)
        _restore(resume.generators, source)
        return now

    def _batches(self, raw: Iterator[Any], begun: bool) -> Iterator[Any]:
        if self._redrawn:
            yield self.prepare(self._redrawn.pop())
            begun = True
        while not self._is_over:
            try:
                # no name is bound to the batch: it must not live on while the next one is made
                yield self.prepare(next(raw))
            except StopIteration:
                self._ended = True
                if not begun and (self.record or self.shards is None):
                    self._opened = None
                    raise EmptyDataError(self._few_for_ranks() + _why_empty(self.source)) from None
                return
            except GeneratorExit:  # let go of while it waited
                raise
            except BaseException:
                self._failed = True
                raise
            begun = True

    def _few_for_ranks(self) -> str:
        if self.shards is None or self.state.world_size == 1:
            return ""
        return (
            f"rank {self.state.rank} of {self.state.world_size} got no batch, as where there are fewer batches than "
            "ranks: give more data, smaller batches, or start fewer ranks. "
        )

    def end_pass(self) -> None:
        """Give no more batches of this pass: the data of another rank has ended."""
        self._is_over = True

    def ghost(self) -> Any:
        """Return a batch that only takes part: the first of the data, which does not count here.

        Raises:
            DataError: data that can be gone through only once.
        """
        if not self._ghost:
            source = self.data(self.state) if is_factory(self.data) else self.data
            before = Moment(source)
            self._ghost = [] if isinstance(source, Iterator) else list(itertools.islice(source, 1))
            before.put_back()
        if not self._ghost:
            raise DataError(
                "a rank without batches must take part in the others' forward passes, and has no batch for it: give "
                "data that every rank can iterate, again and again (a DataLoader, a list)"
            )
        return self.prepare(self._ghost[0])

    @property
    def is_last(self) -> bool:
        """Whether the batch handed out last is known to be the last of its pass."""
        return self._ahead is not None and self._ahead.is_at_end

    def position(self) -> Position:
        """Return where the run stands."""
        if self.resume is not None:  # stopped before any pass was opened: it stands where it stood
            if self.resume.opened is not None or not self._rejoined:
                return self.resume
            here = replace(self.resume, random=RandomState())
            states = GeneratorStates(self.data)
            return replace(here, asks=states) if is_factory(self.data) else replace(here, generators_now=states)
        opened, generators, asked = self._opened or (None, None, None)
        done = self.done() - self._pass_began_at if self._opened else 0
        source = self.data if self.source is None else self.source
        drawn = self._ended or self._failed or bool(self._redrawn) or self.in_work()
        drawn = bool(self._opened) and drawn
        return Position(
            batches=done,
            drawn=drawn,
            opened=opened,
            generators=generators,
            random=RandomState(),
            generators_now=None if self._failed else GeneratorStates(source),
            workers=self._workers if self._opened else _has_workers(source),
            asked=asked,
            asks=GeneratorStates(self.data) if is_factory(self.data) else None,
            ahead=() if self._ahead is None else self._ahead.moments(done),
            place_opened=self._place_opened if self._opened else None,
            place=None if drawn or self._ahead is not None else self._place(source),
        )

    def _place(self, source: Any) -> Any:
        if self._opened and self._drawn_from is not None:
            return place_in(source, self._drawn_from)
        return place_between(source) if not self._opened and is_stateful(source) else None

    def leave_pass(self) -> None:
        """Let go of the rest of the pass, also of one that was to be taken up again: the next is a new one."""
        if self.resume is not None:
            if self.resume.opened is not None and not is_factory(self.data):
                _bring_workers(self.data, wanted=True)
            self.resume = None
        self.close()

    def close(self) -> None:
        """Let go of the present pass: the run stands between two. Worker processes that belong to it end."""
        raw, self.raw = self.raw, None
        if isinstance(self.source, HeldIterator) and self._ahead is not None:
            self.source.held += self._ahead.waiting()
        persistent = getattr(self.source, "persistent_workers", False)
        self._opened, self._ended, self._failed, self._is_over = None, False, False, False
        self._ahead, self._redrawn, self._ghost, self._drawn_from = None, [], [], None
        shut_down = getattr(raw, "_shutdown_workers", None)
        if shut_down is not None and not persistent:
            shut_down()  # an error's traceback may keep the iterator, and its workers with it


class HeldIterator:
    """A one-shot iterator that a training run was stopped in, with the batch that was drawn but not trained on."""

    def __init__(self, iterator: Iterator[Any], mine: Iterator[Any] | None = None) -> None:
        """Wrap the user's iterator; ``mine`` gives what is this rank's of it."""
        self.iterator = iterator
        self._mine = iterator if mine is None else mine
        self.held: list[Any] = []
        self.continued = False  # stands where the stopped run left it, so nothing is to be skipped
        self._ended_by = ""  # the text of an error: the error itself would keep its frames, and what they hold, alive

    def __iter__(self) -> Iterator[Any]:
        """Return itself: there is only one pass."""
        return self

    def __next__(self) -> Any:
        """Return the batch that was held back, or the next one.

        Raises:
            DataError: a generator that an error has ended, which would pass for the end of the data.
        """
        if self.held:
            return self.held.pop(0)
        try:
            return next(self._mine)
        except StopIteration:
            if not self._ended_by:
                raise
            raise DataError(
                f"this generator was ended by {self._ended_by} and gives no more batches: go on with a new one, or "
                "with data that can be iterated again"
            ) from None
        except BaseException as error:
            if inspect.isgenerator(self.iterator):
                self._ended_by = repr(error)
            raise


def at_most(limit: int | None, length: int | None) -> int | None:
    """Return how many batches there are at a limit, where that is known."""
    return length if limit is None or length is None else min(limit, length)


def is_factory(data: Any) -> bool:
    """Say whether ``data`` is a callable that makes the data of each epoch."""
    return callable(data) and not _is_iterable(data)


def check_factory(data: Any) -> None:
    """Refuse a callable that cannot be called as ``data(state)``, by looking at its signature.

    Raises:
        DataError: as above.
    """
    try:
        inspect.signature(data).bind(object())
    except TypeError as error:
        raise DataError(f"a callable is asked for each epoch's data as data(state), but {data!r}: {error}") from None
    except ValueError:
        return  # some built-in callables have no signature to look at


def check_data(data: Any, in_use: tuple[Any, ...] = ()) -> None:
    """Refuse data that cannot be iterated, that says it is empty, or that an outer run is consuming.

    Raises:
        DataError: as above, with the reason.
    """
    if not _is_iterable(data):
        raise DataError(
            f"data must be an iterable of batches or a callable state -> iterable, got {type(data).__name__}: {data!r}"
        )
    if isinstance(data, Iterator):
        _refuse_consumed(data, in_use)
    if stated_length(data) == 0 and not isinstance(data, AlreadySharded):  # other ranks may have some
        raise EmptyDataError(_why_empty(data))


def _refuse_consumed(iterator: Iterator[Any], in_use: tuple[Any, ...]) -> None:
    if any(iterator is other for other in in_use):
        raise DataError(
            "this iterator is being consumed by the run around this one, which would miss the batches: give the inner "
            "run data of its own, or data that can be iterated again (a DataLoader, a list)"
        )


def _is_iterable(data: Any) -> bool:
    return isinstance(data, Iterable) or (hasattr(data, "__getitem__") and not isinstance(data, type))


def _goes_on_by_itself(source: Any) -> bool:
    return isinstance(source, HeldIterator) and source.continued


def _skip(raw: Iterator[Any], batches: int, draws_again: bool) -> None:
    """Go past batches that are done, without loading them where that leaves everything as loading them would.

    Args:
        raw: the pass.
        batches: how many.
        draws_again: a batch is drawn after them before the generators are put back to where they were.

    Raises:
        DataError: there are fewer.
    """
    passing = without_loading(raw, draws_again) or raw
    for done in range(batches):
        if next(passing, _END) is _END:
            raise DataError(
                f"{batches} batches of this epoch are done, but the data given to go on with has only {done}: give "
                "the data the run was stopped with, or begin afresh with engine.reset()"
            )


def _restore(generators: GeneratorStates | None, source: Any) -> None:
    if generators is not None:
        generators.restore(source)


def _has_workers(source: Any) -> bool:
    return getattr(source, "persistent_workers", False) and getattr(source, "_iterator", None) is not None


def _bring_workers(source: Any, wanted: bool) -> None:
    """Let a loader have persistent workers, or none yet, as it had where it is taken up again."""
    if not getattr(source, "persistent_workers", False) or wanted == _has_workers(source):
        return
    if not wanted:
        source._iterator._shutdown_workers()
        source._iterator = None
        return
    random = RandomState()
    iter(source)
    random.restore()


def _fresh_if_in_use(source: Any, in_use: tuple[Any, ...]) -> Any:
    """Return a copy of a loader whose persistent workers are at work for an outer run, else the source itself."""
    if not getattr(source, "persistent_workers", False) or not any(source is other for other in in_use):
        return source
    fresh = copy.copy(source)
    # a DataLoader with persistent workers keeps its one iterator, and resets it when it is iterated again
    fresh.__dict__.update(_iterator=None, persistent_workers=False)
    return fresh


def _why_empty(source: Any) -> str:
    if isinstance(source, DataLoader) and source.drop_last and source.batch_size is not None:
        samples = stated_length(source.dataset)
        if samples is not None and 0 < samples < source.batch_size:
            return (
                f"the data gave no batch: {samples} samples are fewer than batch_size={source.batch_size}, and "
                "drop_last=True drops them. Give more samples, a smaller batch_size, or drop_last=False"
            )
    if isinstance(source, Iterator):
        return (
            "the data gave no batch: an iterator can be gone through once, and this one is at its end. Give data that "
            "can be iterated again (a DataLoader, a list), or a callable state -> iterable that makes each epoch's data"
        )
    return f"the data gave no batch: {type(source).__name__} is empty. Give data with at least one batch"
