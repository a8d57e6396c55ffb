"""One seed for Python, NumPy, torch and the devices, the same on every rank."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from ranks import run_on_ranks

from pellucid.engine import StrategyError
from pellucid.engine.strategies.seeding import seed_everything


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), torch.rand(1).item()


def test_the_same_seed_gives_the_same_numbers_and_is_returned():
    assert seed_everything(7) == 7
    first = draw()
    assert draw() != first
    seed_everything(numpy.int64(7))
    assert draw() == first


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_the_smallest_and_the_largest_seed_will_do(seed):
    assert seed_everything(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "7", None, True])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed):
    seed_everything(7)
    with pytest.raises(StrategyError, match=r"must be a whole number, at least 0 and less than 2\*\*32"):
        seed_everything(seed)
    after = draw()
    seed_everything(7)
    assert draw() == after


def seed_and_draw() -> tuple[tuple[float, float, float], list[float]]:
    seed_everything(7)
    return draw(), torch.nn.Linear(2, 1).weight.flatten().tolist()


def test_what_is_made_before_a_run_is_the_same_on_all_ranks():
    first, second = run_on_ranks(seed_and_draw, 2)
    assert first == second
    assert first == seed_and_draw()
