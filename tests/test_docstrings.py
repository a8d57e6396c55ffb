"""Every example in a docstring runs.

An example need not set the scene: it finds ``model``, ``optimizer``, ``loader`` and ``val_loader`` (small batches of
inputs and classes), ``trainer`` (its step returns ``{"loss": ...}``), ``evaluator`` (it measures ``accuracy``), their
``train_step`` and ``eval_step``, ``torch``, ``nn``, ``F``, the public names of pellucid and those of its own module.
Each docstring gets them anew. An example that shows no output only has to run.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType
from typing import Any

import ignite.metrics
import pytest
import torch
from torch import nn
from torch.nn import functional

import pellucid.engine
import pellucid.handlers

PACKAGES: list[ModuleType] = [pellucid.engine, pellucid.handlers]


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = [
        info.name for package in PACKAGES for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    modules = [importlib.import_module(name) for name in names]
    return [found for module in PACKAGES + modules for found in finder.find(module) if found.examples]


class OutputWhereShown(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def namespace(model, loader) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(engine, batch):
        inputs, classes = batch
        loss = functional.cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    def eval_step(engine, batch):
        inputs, classes = batch
        return engine.model(inputs), classes

    names = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
    trainer = pellucid.engine.Engine(train_step, model, optimizer=optimizer)
    metrics = {"accuracy": ignite.metrics.Accuracy()}
    evaluator = pellucid.engine.Engine(eval_step, model, mode="eval", metrics=metrics)
    names |= {"model": model, "optimizer": optimizer, "trainer": trainer, "evaluator": evaluator}
    names |= {"train_step": train_step, "eval_step": eval_step, "loader": loader, "val_loader": loader}
    return names | {"torch": torch, "nn": nn, "F": functional}


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_example_runs(example, namespace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    example.globs.update(namespace)
    runner = doctest.DocTestRunner(OutputWhereShown(), optionflags=doctest.ELLIPSIS)
    told: list[str] = []
    runner.run(example, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)
