"""Looking changes nothing: a training with inner runs ends as the one without, to the bit.

The first half is the promise as users meet it: which inner runs, where, over which data, ending how. The second half
is what single parts owe for it: flags, gradients, generators, refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.engine import DataError, Engine, Events, RunError
from training import (
    DATA,
    DEEDS,
    ENDINGS,
    LOADERS,
    STEP_PLACES,
    WORKER_LOADERS,
    Boom,
    Look,
    Training,
    assert_equal_to_the_bit,
    flags,
    seed_everything,
)

EVERYWHERE = (*Events, *STEP_PLACES)
MOMENTS = (Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, *STEP_PLACES)


@cache
def alone(loader: str = "shuffled", epochs: int = 2) -> dict[str, Any]:
    return Training(loader).run(epochs).outcome()


def stop_in_every_way(training: Training) -> Training:
    """Run two epochs in which every event fires, going on after every stop."""
    engine = training.engine

    def stop(training: Training, engine: Engine) -> None:
        if engine.state.is_running and engine.state.iteration not in stopped:
            stopped.append(engine.state.iteration)
            engine.record({"loss": 0.5})
            if engine.state.iteration == 2:
                engine.terminate_epoch()
            elif engine.state.iteration == 4:
                engine.interrupt()
            elif engine.state.iteration == 5:
                raise Boom
            elif engine.state.iteration == 6:
                engine.terminate()

    stopped: list[int] = []
    training.at(Events.ITERATION_COMPLETED, stop)
    while engine.state.stop_reason != "completed":
        try:
            training.run(epochs=2)
        except Boom:
            pass
    return training


@cache
def alone_and_stopped() -> dict[str, Any]:
    return stop_in_every_way(Training()).outcome()


@pytest.mark.parametrize("place", EVERYWHERE, ids=str)
def test_an_evaluation_at_any_event_and_any_place_in_the_step_changes_nothing(place: Any) -> None:
    looks: list[Any] = []
    watched = Training().at(place, Look()).at(place, lambda training, engine: looks.append(place))
    assert_equal_to_the_bit(alone_and_stopped(), stop_in_every_way(watched).outcome())
    assert looks


@pytest.mark.parametrize("ends", ENDINGS)
@pytest.mark.parametrize("does", DEEDS)
def test_an_inner_run_changes_nothing_whatever_it_does_and_however_it_ends(does: str, ends: str) -> None:
    watched = Training()
    for place in MOMENTS:
        watched.at(place, Look(does=does, ends=ends))
    assert_equal_to_the_bit(alone(), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("loader", LOADERS)
def test_an_inner_run_changes_nothing_whatever_it_and_the_outer_run_iterate(loader: str, data: str) -> None:
    watched = Training(loader)
    for place in (Events.STARTED, Events.EPOCH_COMPLETED, Events.GET_BATCH_COMPLETED, "after the forward"):
        watched.at(place, Look(data))
    assert_equal_to_the_bit(alone(loader), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("ends", ["returns", "raises"])
@pytest.mark.parametrize("loader", WORKER_LOADERS)
def test_an_inner_run_over_the_loader_that_workers_fill_for_the_outer_run_changes_nothing(
    loader: str, ends: str
) -> None:
    watched = Training(loader)
    for place in (Events.STARTED, Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED(every=3)):
        watched.at(place, Look(ends=ends))
    assert_equal_to_the_bit(alone(loader), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("does", DEEDS)
def test_looks_inside_looks_inside_looks_change_nothing(does: str) -> None:
    innermost = Look(does=does)
    middle = Look(inside=((Events.EPOCH_STARTED, innermost), ("after the forward", innermost)))
    outermost = Look(does=does, inside=((Events.ITERATION_COMPLETED, middle), ("before the forward", middle)))
    watched = Training().at(Events.EPOCH_COMPLETED, outermost).at("after the forward", middle)
    assert_equal_to_the_bit(alone(), watched.run(epochs=2).outcome())
