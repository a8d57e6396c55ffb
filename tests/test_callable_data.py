"""Data that a callable makes for each epoch: a run that was stopped goes on with the order it would have had."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from training import BATCH, NoisySamples, Samples, assert_equal_to_the_bit

from pellucid.engine import Engine, Events

Make = Callable[[], Callable[[Any], Any]]
KEPT: dict[str, Any] = {}


def shuffled(generator: torch.Generator | None = None) -> DataLoader[Any]:
    return DataLoader(Samples(), BATCH, shuffle=True, generator=generator)


def made_anew_from_the_epoch() -> Callable[[Any], Any]:
    return lambda state: shuffled(torch.Generator().manual_seed(state.epoch))


def made_anew_from_one_seed() -> Callable[[Any], Any]:
    return lambda state: shuffled(torch.Generator().manual_seed(7))


def made_anew_from_the_global_state() -> Callable[[Any], Any]:
    return lambda state: shuffled()


def kept_in_a_closure() -> Callable[[Any], Any]:
    loader = shuffled(torch.Generator().manual_seed(7))
    return lambda state: loader


def take_from_module() -> Any:
    return KEPT["loader"]


def ask_module(state: Any) -> Any:
    return take_from_module()


def kept_in_a_module() -> Callable[[Any], Any]:
    KEPT["loader"] = shuffled(torch.Generator().manual_seed(7))
    return ask_module


def seeded_and_kept() -> Callable[[Any], Any]:
    generator = torch.Generator()
    loader = shuffled(generator)

    def make(state: Any) -> Any:
        generator.manual_seed(state.epoch)
        return loader

    return make


def drawing_itself() -> Callable[[Any], Any]:
    rng, samples = random.Random(3), Samples()

    def make(state: Any) -> Iterator[Any]:
        order = rng.sample(range(len(samples)), 12)
        return (DataLoader(samples, BATCH).collate_fn([samples[i] for i in order[n : n + 3]]) for n in range(0, 12, 3))

    return make


class Module:
    """Has its loader itself, as a data module has."""

    def __init__(self) -> None:
        self.loader = DataLoader(NoisySamples(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))

    def train(self, state: Any, part: str = "") -> Any:
        return self.loader


DATA: dict[str, Make] = {
    make.__name__: make
    for make in (
        made_anew_from_the_epoch,
        made_anew_from_one_seed,
        made_anew_from_the_global_state,
        kept_in_a_closure,
        kept_in_a_module,
        seeded_and_kept,
        drawing_itself,
    )
}
DATA |= {"a method": lambda: Module().train, "a partial": lambda: partial(Module().train, part="train")}


def collecting(seen: list[Any]) -> Engine:
    return Engine(lambda engine, batch: seen.append([batch[0].clone(), batch[2].tolist(), torch.rand(())]))


@pytest.mark.parametrize("how", ["new objects", "the same objects"])
@pytest.mark.parametrize("name", DATA)
def test_it_goes_on_as_if_it_had_not_been_stopped(name, how):
    torch.manual_seed(0)
    wanted: list[Any] = []
    collecting(wanted).run(DATA[name](), max_epochs=3)
    for stop in range(1, len(wanted) + 1):
        torch.manual_seed(0)
        seen: list[Any] = []
        engine, data = collecting(seen), DATA[name]()
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda engine, batch: engine.terminate())
        engine.run(data, max_epochs=3)
        saved = engine.state_dict()
        torch.manual_seed(1)
        if how == "new objects":
            engine, data = collecting(seen), DATA[name]()
            engine.load_state_dict(saved)
        engine.run(data, max_epochs=3)
        assert_equal_to_the_bit(seen, wanted)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("event", [Events.EPOCH_COMPLETED(once=1), Events.EPOCH_STARTED(once=2), Events.COMPLETED])
def test_what_is_saved_at_an_epochs_border_goes_on(name, event):
    torch.manual_seed(0)
    wanted: list[Any] = []
    collecting(wanted).run(DATA[name](), max_epochs=3)
    torch.manual_seed(0)
    seen: list[Any] = []
    saved: list[Any] = []
    engine = collecting(seen)
    engine.add_event_handler(event, lambda engine, batch: saved.append((engine.state_dict(), len(seen))))
    engine.run(DATA[name](), max_epochs=2)
    state, done = saved[0]
    del seen[done:]
    torch.manual_seed(1)
    again = collecting(seen)
    again.load_state_dict(state)
    again.run(DATA[name](), max_epochs=3)
    assert_equal_to_the_bit(seen, wanted)
