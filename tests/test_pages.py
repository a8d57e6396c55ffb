"""Every page in ``docs/``: its code runs, top to bottom, and its links lead somewhere.

The blocks of a page are one script. They are given what the README's example has by then: engines, a model, data, and
the public names of pellucid.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.metrics import Accuracy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pellucid.engine
import pellucid.handlers
from pellucid.engine import Engine, Events
from pellucid.handlers import Validate

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def code_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE))


@pytest.fixture
def names() -> dict[str, Any]:
    data = TensorDataset(torch.randn(60, 2), torch.randint(0, 2, (60,)))
    train_loader, val_loader = DataLoader(data, 10, shuffle=True), DataLoader(data, 20)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def train_step(engine: Engine, batch: Any) -> dict[str, torch.Tensor]:
        inputs, classes = batch
        loss = F.cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    def eval_step(engine: Engine, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return engine.model(batch[0]), batch[1]

    trainer = Engine(train_step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), state={"best": 0.0})
    evaluator = Engine(eval_step, model, mode="eval", metrics={"accuracy": Accuracy()})
    Validate(evaluator, val_loader, every=Events.EPOCH_COMPLETED, prefix="val/").attach(trainer)
    public = {
        name: getattr(package, name) for package in (pellucid.engine, pellucid.handlers) for name in package.__all__
    }
    return {
        **public,
        "torch": torch, "nn": nn, "F": F, "sys": sys, "DataLoader": DataLoader, "Accuracy": Accuracy,
        "data": data, "train_data": data, "train_loader": train_loader, "val_loader": val_loader, "loader": val_loader,
        "model": model, "train_step": train_step, "eval_step": eval_step,
        "trainer": trainer, "evaluator": evaluator, "engine": trainer,
        "train": int, "config": "7",  # something for launch() to call
        "launch": lambda function, *args, nprocs: function(*args),  # starts processes: see test_launch.py
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_the_page_runs(page, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "exit", lambda code: None)
    exec(compile(code_of(page), str(page), "exec"), {"__name__": page.stem, **names})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_page_names_is_there(page):
    text = page.read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    paths = re.findall(r"`((?:tests|benchmarks|examples|docs|notebooks)/[\w./]+)`", text)
    assert [link for link in links if not (DOCS / link).exists()] == []
    assert [path for path in paths if not (DOCS.parent / path).exists()] == []
