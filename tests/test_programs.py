"""Made-up programs: whatever inner runs a training has, wherever it is stopped, it ends as the one that has none.

A program says what is trained on, which looks sit where, which looks sit inside those, what they do and how they end,
and where the training itself is stopped and gone on with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from training import (
    DATA,
    DEEDS,
    ENDINGS,
    FIRINGS,
    LOADERS,
    REPEATABLE,
    STEP_PLACES,
    VERBS,
    Look,
    Place,
    Training,
    Verb,
    adam,
    assert_equal_to_the_bit,
    momentum,
    run_on,
    stop_at,
)

from pellucid.engine import Events

OPTIMIZERS = {"momentum": momentum, "adam": adam}
OUTER_PLACES = (*Events, Events.ITERATION_COMPLETED(every=3), Events.EPOCH_COMPLETED(once=1), *STEP_PLACES)
INNER_PLACES = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_COMPLETED(every=2),
    Events.ITERATION_STARTED(once=2),
    Events.ITERATION_COMPLETED(once=(1, 3)),
    Events.EXCEPTION_RAISED,
    Events.TERMINATE,
    Events.INTERRUPT,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
    "before the forward",
    "after the forward",
)


@dataclass(frozen=True)
class Program:
    """A training, looks at places of it, and stops: place, how often it has come by, verb."""

    loader: str
    optimizer: str
    epochs: int
    looks: tuple[tuple[Place, Look], ...]
    stops: tuple[tuple[Place, int, Verb], ...] = ()

    def outcome(self) -> dict[str, Any]:
        training = Training(self.loader, OPTIMIZERS[self.optimizer])
        for place, look in self.looks:
            training.at(place, look)
        for place, firing, verb in self.stops:
            stop_at(training, place, firing, verb)
        run_on(training, epochs=self.epochs)
        return training.outcome()


def looks(depth: int) -> st.SearchStrategy[Look]:
    within = st.tuples(st.sampled_from(INNER_PLACES), looks(depth - 1)) if depth > 1 else st.nothing()
    return st.builds(
        Look,
        data=st.sampled_from(sorted(DATA)),
        does=st.sampled_from(DEEDS),
        ends=st.sampled_from(sorted(ENDINGS)),
        inside=st.lists(within, max_size=2 if depth > 1 else 0).map(tuple),
    )


stops = st.sampled_from(list(FIRINGS)).flatmap(
    lambda place: st.tuples(st.just(place), st.integers(1, FIRINGS[place]), st.sampled_from(VERBS))
)
made_of = partial(
    st.builds,
    Program,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    epochs=st.integers(1, 2),
    looks=st.lists(st.tuples(st.sampled_from(OUTER_PLACES), looks(depth=3)), min_size=1, max_size=3).map(tuple),
)


@cache
def plain(loader: str, optimizer: str, epochs: int) -> dict[str, Any]:
    return Program(loader, optimizer, epochs, ()).outcome()


@given(made_of(loader=st.sampled_from(sorted(LOADERS))))
def test_a_training_with_any_inner_runs_ends_as_the_one_without(program):
    assert_equal_to_the_bit(plain(program.loader, program.optimizer, program.epochs), program.outcome())


@given(made_of(loader=st.sampled_from(REPEATABLE), stops=st.lists(stops, min_size=1, max_size=3).map(tuple)))
def test_a_training_with_any_inner_runs_and_any_stops_ends_as_the_one_without(program):
    assert_equal_to_the_bit(plain(program.loader, program.optimizer, program.epochs), program.outcome())
