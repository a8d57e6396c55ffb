"""Data that says itself where it stands: torchdata's StatefulDataLoader, and others with its two methods."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from training import assert_equal_to_the_bit, fail, press_ctrl_c, terminate

from pellucid.engine import CheckpointError, Engine, Events


class Numbers(Dataset[int]):
    """Ten numbers; tells which were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    """Counts on from epoch to epoch, ten numbers each; tells where it stands."""

    def __init__(self) -> None:
        self.at, self.began_at, self.loaded = 0, 0, 0

    def __iter__(self) -> Any:
        while self.at < self.began_at + 10:
            self.at += 1
            self.loaded += 1
            yield self.at
        self.began_at = self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "began_at": self.began_at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.began_at = state["at"], state["began_at"]


def shuffled(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


def drawing(seen: list[Any], **options: Any) -> Engine:
    """Return an engine that keeps what it sees beside a random number of its own."""

    def step(engine: Engine, batch: Any) -> None:
        engine.state.seen = [*engine.state.seen, (batch.tolist() if isinstance(batch, torch.Tensor) else batch)]
        engine.state.drawn = torch.rand(()).item()

    return Engine(step, state={"seen": seen, "drawn": 0.0}, **options)


def stopped_at(iteration: int, how: Any, loader: Any) -> Engine:
    engine = drawing([])
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=iteration), lambda engine, batch: how(engine))
    with contextlib.suppress(BaseException):
        engine.run(loader, max_epochs=2)
    return engine


def outcome(engine: Engine) -> dict[str, Any]:
    state = engine.state
    counts = (state.epoch, state.iteration)
    return {"seen": state.seen, "drawn": state.drawn, "at": counts, "rng": torch.get_rng_state()}


LOADERS = {
    "shuffled": shuffled,
    "shuffled, two workers": lambda: shuffled(num_workers=2),
    "stream": lambda: StatefulDataLoader(Stream(), 3),
    "stream without a loader": Stream,
}


@pytest.mark.parametrize("how", [terminate, fail, press_ctrl_c])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_over_it_that_is_stopped_anywhere_goes_on_in_the_same_objects(loader, how):
    torch.manual_seed(0)
    whole = drawing([])
    whole.run(LOADERS[loader](), max_epochs=2)
    expected = outcome(whole)
    for iteration in (2, 4, 5, 7) if "workers" in loader else range(1, whole.state.iteration):
        torch.manual_seed(0)
        data = LOADERS[loader]()
        engine = stopped_at(iteration, how, data)
        torch.rand(3)  # what else happens in between
        engine.run(data, max_epochs=2)
        assert_equal_to_the_bit(expected, outcome(engine), f"stopped at {iteration}: ")


@pytest.mark.parametrize("loader", LOADERS)
def test_a_run_over_it_goes_on_in_new_objects(loader):
    torch.manual_seed(0)
    whole = drawing([])
    whole.run(LOADERS[loader](), max_epochs=2)
    expected = outcome(whole)
    for iteration in (2, 4, 5, 7) if "workers" in loader else range(1, whole.state.iteration):
        torch.manual_seed(0)
        state = stopped_at(iteration, terminate, LOADERS[loader]()).state_dict()
        torch.manual_seed(9)
        resumed, data = drawing([]), LOADERS[loader]()
        resumed.load_state_dict(state)
        resumed.run(data, max_epochs=2)
        assert_equal_to_the_bit(expected, outcome(resumed), f"stopped at {iteration}: ")


def test_nothing_is_loaded_twice():
    state = stopped_at(2, terminate, shuffled()).state_dict()
    loader, engine = shuffled(), drawing([])
    engine.load_state_dict(state)
    engine.run(loader, max_epochs=1)
    assert len(loader.dataset.loaded) == 4

    state = stopped_at(3, terminate, StatefulDataLoader(Stream(), 3)).state_dict()
    stream, engine = Stream(), drawing([])
    engine.load_state_dict(state)
    engine.run(StatefulDataLoader(stream, 3), max_epochs=1)
    assert stream.loaded == 1


def test_a_look_at_the_same_loader_changes_nothing_of_its_state():
    def run(looks: bool) -> list[Any]:
        loader, engine, states = shuffled(), drawing([]), []
        evaluator = Engine(lambda engine, batch: None, mode="eval")

        @engine.on(Events.ITERATION_COMPLETED)
        def look(engine: Engine, batch: Any) -> None:
            if looks:
                evaluator.run(loader, max_iters=1)
            states.append(engine.state_dict()["position"]["place"])

        engine.run(loader, max_epochs=2)
        return [engine.state.seen, states]

    assert_equal_to_the_bit(run(looks=False), run(looks=True))


def test_other_data_for_the_next_epochs_begins_where_it_stands():
    engine = drawing([])
    engine.run(Stream(), max_epochs=1)
    other = Stream()
    other.at = other.began_at = 100
    engine.run(other, max_epochs=2)
    assert engine.state.seen[10:] == list(range(101, 111))


def test_worker_processes_whose_random_numbers_are_lost_are_told_of(caplog):
    state = stopped_at(2, terminate, shuffled(num_workers=2)).state_dict()
    engine = drawing([])
    engine.load_state_dict(state)
    assert not caplog.records
    engine.run(shuffled(num_workers=2), max_epochs=2)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the state of a StatefulDataLoader leaves out the random numbers of its worker processes"
    ]


def test_a_state_that_no_safe_loader_reads_is_refused_when_it_is_saved():
    class Odd(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {"at": object()}

    with pytest.raises(CheckpointError, match=r"what the data's state_dict\(\) returned holds a value of type object"):
        stopped_at(2, terminate, Odd()).state_dict()
