"""Weights saved under each strategy load under every other one, and into a plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel import Case, States, equal_to_the_bit, make_loader, make_net, make_optimizer, train_step
from ranks import run_on_ranks

from pellucid.engine import Engine

ON_RANKS = ("single", "ddp", "fsdp")
IN_ONE_PROCESS = ("single", "dp")


def _trained(strategy: str) -> Engine:
    net = make_net(batch_norm=True)
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net), strategy=strategy)
    engine.run(make_loader(24), max_epochs=1)
    return engine


def _save(strategy: str) -> States:
    engine = _trained(strategy)
    state = engine.strategy.full_state_dict(engine.model)
    plain = make_net(batch_norm=True)
    plain.load_state_dict(state)
    return {name: value.clone() for name, value in plain.state_dict().items()}


def _loads(strategy: str, states: dict[str, States]) -> dict[str, bool]:
    """Load each state in the place of trained weights; say whether they are in the model then, and can be trained."""
    found = {}
    for name, state in states.items():
        engine = _trained(strategy)
        engine.strategy.load_full_state_dict(engine.model, state)
        found[name] = equal_to_the_bit(dict(engine.strategy.full_state_dict(engine.model)), state)
        engine.run(make_loader(24), max_epochs=2)
        found[name] &= not equal_to_the_bit(dict(engine.strategy.full_state_dict(engine.model)), state)
    return found


def _save_all() -> dict[str, States]:
    return {f"{strategy} on ranks": _save(strategy) for strategy in ON_RANKS}


def _load_all(states: dict[str, States]) -> dict[str, dict[str, bool]]:
    return {strategy: _loads(strategy, states) for strategy in ON_RANKS}


@pytest.fixture(scope="module")
def states() -> dict[str, States]:
    first, second = run_on_ranks(_save_all, 2)
    assert equal_to_the_bit(first["fsdp on ranks"], second["fsdp on ranks"]), "every rank has all of them"
    return first | {strategy: _save(strategy) for strategy in IN_ONE_PROCESS}


def test_weights_load_under_every_strategy_on_ranks(states: dict[str, States]) -> None:
    for found in run_on_ranks(_load_all, 2, states):
        assert found == {strategy: dict.fromkeys(states, True) for strategy in ON_RANKS}


@pytest.mark.parametrize("strategy", IN_ONE_PROCESS)
def test_weights_load_under_every_strategy_in_one_process(strategy: str, states: dict[str, States]) -> None:
    assert _loads(strategy, states) == dict.fromkeys(states, True)


def test_one_step_is_the_same_under_every_strategy_of_one_process(states: dict[str, Any]) -> None:
    single, other = (states[strategy] for strategy in IN_ONE_PROCESS)
    assert all(torch.equal(single[name], other[name]) for name in single)
