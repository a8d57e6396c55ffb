"""The handler ``ModelSummary``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import nn
from training import Training, assert_equal_to_the_bit

from pellucid.engine import FSDP, Engine, HandlerError
from pellucid.handlers import ModelSummary


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)
        self.head.weight.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = self.body(inputs)
        return self.head(body), body


def summarise(model: Any, **options: Any) -> ModelSummary:
    summary = ModelSummary(**options).attach(engine := Engine(lambda engine, batch: None, model))
    engine.run([0], max_epochs=1)
    return summary


def test_the_table_is_logged_once_with_the_numbers_of_the_whole_and_its_parts(caplog):
    caplog.set_level(logging.INFO, "pellucid.handlers")
    summary = summarise(Net(), example=torch.zeros(3, 4))
    assert str(summary).splitlines() == [
        "module   type        output          parameters  trainable   MiB",
        "(model)  Net         [3, 2], [3, 8]          74         58  0.00",
        "body     Sequential  [3, 8]                  56         56  0.00",
        "head     Linear      [3, 2]                  18          2  0.00",
    ]
    assert caplog.text.count(str(summary)) == 1
    assert summary.rows[0].size_bytes == 4 * (74 + 16) + 8  # two buffers of eight numbers, and a count


def test_it_goes_down_as_deep_as_asked_for():
    assert [row.name for row in summarise(Net(), depth=0).rows] == [""]
    names = ["", "body", "body.0", "body.1", "body.2", "head"]
    assert [row.name for row in summarise(Net(), depth=2).rows] == names
    models = {"generator": nn.Linear(2, 2), "critic": nn.Sequential(nn.Linear(2, 1))}
    assert [row.name for row in summarise(models).rows] == ["generator", "critic", "critic.0"]


def test_shared_parameters_count_once():
    layer = nn.Linear(3, 3)
    assert summarise(nn.Sequential(layer, layer)).rows[0].parameters == 12


def test_looking_at_shapes_changes_nothing():
    watched = Training()
    ModelSummary(2, example=torch.ones(2, 6)).attach(watched.engine)
    assert_equal_to_the_bit(Training().run(epochs=2).outcome(), watched.run(epochs=2).outcome())
    assert not any(module._forward_hooks for module in watched.engine.model.modules())


def test_a_lazy_model_has_no_numbers_yet():
    summary = summarise(nn.Sequential(nn.LazyLinear(2)))
    assert summary.rows[0].parameters is None
    assert str(summary).splitlines()[1].split() == ["(model)", "Sequential", "?", "?", "?"]


def _shard() -> Any:
    summary = ModelSummary().attach(engine := Engine(lambda engine, batch: None, Net(), strategy=FSDP()))
    engine.run([0, 1], max_epochs=1)
    return summary.rows


def test_of_a_sharded_model_the_whole_is_counted():
    for rows in run_on_ranks(_shard, 2):
        assert rows == summarise(Net()).rows


def test_without_a_model_it_says_so():
    with pytest.raises(HandlerError, match="the engine has no model"):
        summarise(None)
    with pytest.raises(ValueError, match="depth=-1: a whole number of at least 0 was wanted"):
        ModelSummary(-1)
    with pytest.raises(HandlerError, match="is for one model"):
        summarise({"a": nn.Linear(1, 1)}, example=torch.ones(1))


def test_it_shows_itself_in_a_notebook():
    summary = summarise(Net())
    assert "<td>Sequential</td>" in summary._repr_html_()
