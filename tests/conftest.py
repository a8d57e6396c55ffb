"""What all tests share: each starts from the same random state; small data and a small net to train on."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 20260
# tensors of a few numbers gain nothing from threads, which on a busy machine wait for one another
torch.set_num_threads(1)

# No deadline: the first example pays for what torch sets up. `HYPOTHESIS_PROFILE=thorough make test` looks harder.
settings.register_profile(
    "quick", deadline=None, max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whichever ran before it."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="session")
def no_second_copy() -> Iterator[None]:
    """No test, at its end, has made a second copy of our classes by importing the folders under their own names."""
    yield
    assert not {"engine", "handlers"} & sys.modules.keys()


@pytest.fixture
def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Ten shuffled batches of four: inputs of shape (4, 8), classes of shape (4,) in 0..2."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(40, 8, generator=generator)
    classes = torch.randint(0, 3, (40,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), batch_size=4, shuffle=True)


@pytest.fixture
def model() -> nn.Module:
    """A net for ``loader`` with what looking at it could disturb: batch statistics and dropout masks."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3))
