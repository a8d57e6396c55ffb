from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

from pellucid.engine import Engine, Events, HandlerError, SingleDevice
from pellucid.handlers import TerminateOnNan

NAN = math.nan


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    loss: Any
    logits: Any = None


def run(output, /, **arguments):
    """What a run of five iterations does that returns ``output`` at the third, 1.0 else."""
    engine = Engine(lambda engine, batch: output if engine.state.iteration == 3 else 1.0)
    handler = TerminateOnNan(**arguments).attach(engine)
    result = engine.run(range(5))
    return result.iteration, result.stop_reason, handler.reason


@pytest.mark.parametrize(
    ("output", "where"),
    [
        (NAN, ""),
        (-math.inf, ""),
        (complex(0, math.inf), ""),
        (torch.tensor([1.0, NAN]), ""),
        (torch.tensor([1.0, math.inf], dtype=torch.float16), ""),
        (numpy.array([1.0, NAN]), ""),
        (numpy.float32(NAN), ""),
        ({"loss": torch.tensor(1.0), "parts": [0.0, torch.tensor(NAN)]}, "['parts'][1]"),
        (Pair(1.0, {"x": NAN}), "[1]['x']"),
        (Output(1.0, logits=(torch.ones(2), torch.tensor([NAN]))), ".logits[1]"),
        (torch.sparse_coo_tensor([[1]], [NAN], (3,), check_invariants=False), ""),
    ],
)
def test_a_run_stops_at_an_output_that_is_not_finite_and_says_where(output, where):
    iteration, reason, said = run(output)
    assert (iteration, reason) == (3, "terminated")
    assert said == f"the step's output{where} was not finite at iteration 3, epoch 1"


@pytest.mark.parametrize(
    "output",
    [
        None,
        "nan",
        7,
        True,
        {"loss": 1.0, "text": "inf", "none": None},
        torch.tensor([1, 2]),
        torch.tensor([]),
        torch.tensor(3.4e38),
        numpy.array(["nan"]),
        numpy.array([1, 2]),
        Output,
    ],
    ids=repr,
)
def test_anything_else_lets_it_go_on(output):
    assert run(output) == (5, "completed", None)


def test_an_output_that_contains_itself_is_looked_through_once():
    output: list[Any] = [1.0]
    output.append(output)
    assert run(output) == (5, "completed", None)
    output.append(NAN)
    assert run(output)[2] == "the step's output[2] was not finite at iteration 3, epoch 1"


def test_only_what_is_asked_for_of_the_output_is_looked_at():
    output = {"loss": 1.0, "mask": -math.inf}
    only_the_loss = lambda output: output["loss"] if isinstance(output, dict) else output  # noqa: E731
    assert run(output)[1] == "terminated"
    assert run(output, output=only_the_loss)[1] == "completed"
    assert run(output, output=None)[1] == "completed"


def recording(*records, **arguments):
    """A run of five iterations that records these, one at each of the first."""
    engine = Engine(lambda engine, batch: engine.record(dict(records[batch])) if batch < len(records) else None)
    handler = TerminateOnNan(**arguments).attach(engine)
    result = engine.run(range(5))
    return result.iteration, handler.reason


def test_a_run_stops_at_a_record_that_is_not_finite():
    good, bad = {"loss": torch.tensor(1.0)}, {"loss": 1.0, "norm": torch.tensor(NAN)}
    assert recording(good, bad) == (2, "the record['norm'] was not finite at iteration 2, epoch 1")
    assert recording(good, bad, records=False) == (5, None)


def test_every_says_how_often_it_looks():
    engine = Engine(lambda engine, batch: NAN)
    TerminateOnNan(every=3).attach(engine)
    assert engine.run(range(5)).iteration == 3
    bad = {"loss": NAN}
    assert recording({"loss": 1.0}, bad, bad, bad, bad, every=3)[0] == 4  # three after the first it looked at
    engine = Engine(lambda engine, batch: None)
    TerminateOnNan(every=100).attach(engine)

    @engine.on(Events.EPOCH_COMPLETED(every=2))
    def score(engine, batch):
        engine.record({"train/loss": 1.0})
        engine.record({"val/loss": NAN})

    assert engine.run(range(70), max_epochs=5).epoch == 2


def test_the_host_waits_as_often_as_asked(monkeypatch):
    waits = []
    original = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: (waits.append(1), original(self))[1])
    engine = Engine(lambda engine, batch: {"loss": torch.ones(3), "more": torch.ones(2)})
    TerminateOnNan(every=5).attach(engine)
    engine.run(range(20))
    assert len(waits) == 4


# ---- gradients


def step(engine, batch):
    engine.backward((engine.model(torch.ones(1, 1)) * batch).sum())
    engine.update()
    return 1.0


def make_engine(**arguments):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    return Engine(step, model, optimizer=SGD(model.parameters(), lr=1.0, momentum=0.9), **arguments)


def test_a_run_stops_at_a_gradient_that_is_not_finite_and_the_weights_stay_as_they_were():
    engine = make_engine()
    handler = TerminateOnNan(gradients=True).attach(engine)
    weights = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine, batch: weights.append([p.detach().clone() for p in engine.model.parameters()]),
    )
    assert engine.run([1.0, NAN, 1.0]).iteration == 2
    assert handler.reason == "the gradient of 0.weight was not finite at iteration 2, epoch 1"
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_gradients_are_looked_at_only_if_asked_for():
    engine = make_engine()
    TerminateOnNan().attach(engine)
    assert engine.run([1.0, NAN, 1.0]).stop_reason == "completed"


def test_gradients_that_the_loss_scale_skips_are_no_reason_to_stop():
    engine = make_engine(strategy=SingleDevice("cpu", precision="fp16", scaler={"init_scale": 4.0}))
    TerminateOnNan(gradients=True).attach(engine)
    result = engine.run([1.0, math.inf, 1.0])
    assert (result.stop_reason, result.updates) == ("completed", 2)


def test_in_a_mapping_of_models_it_says_which():
    def gan_step(engine, batch):
        for name, factor in batch.items():
            engine.backward(engine.model[name](torch.ones(1, 1)).sum() * factor, optimizer=name)
            engine.update(name)

    models = {"generator": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}
    optimizers = {name: SGD(module.parameters(), lr=1.0) for name, module in models.items()}
    engine = Engine(gan_step, models, optimizer=optimizers)
    handler = TerminateOnNan(gradients=True).attach(engine)
    engine.run([{"generator": 1.0, "critic": 1.0}, {"generator": 1.0, "critic": NAN}])
    assert handler.reason == "the gradient of critic.weight was not finite at iteration 2, epoch 1"
    engine.reset()
    TerminateOnNan(output=None, gradients=True, every=2).attach(engine)  # of each optimizer the second
    handler.detach(engine)
    assert engine.run([{"generator": 1.0, "critic": 1.0}, {"generator": NAN, "critic": 1.0}, {}]).iteration == 2


# ---- the run


def test_what_stopped_it_is_logged_and_forgotten_by_the_next_run(caplog):
    engine = Engine(lambda engine, batch: batch)
    handler = TerminateOnNan().attach(engine)
    with caplog.at_level(logging.ERROR, logger="pellucid.handlers"):
        engine.run([1.0, NAN, 1.0])
    assert "stops the run: the step's output was not finite at iteration 2, epoch 1" in caplog.text
    assert engine.run([1.0, NAN, 1.0]).iteration == 3
    assert handler.reason is None


def test_it_looks_at_an_evaluation_too():
    engine = Engine(lambda engine, batch: batch, mode="eval")
    handler = TerminateOnNan().attach(engine)
    assert [engine.run([1.0, NAN, 1.0]).iteration for _ in range(2)] == [2, 2]
    assert handler.reason is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": 0}, ValueError, "every=0"),
        ({"output": "loss"}, TypeError, "output='loss': a function"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        TerminateOnNan(**arguments)


def test_it_is_attached_once():
    engine = Engine(lambda engine, batch: batch)
    handler = TerminateOnNan(every=2).attach(engine)
    with pytest.raises(HandlerError, match="already"):
        handler.attach(engine)
    handler.detach(engine)
    assert handler not in engine.attached()
    with pytest.raises(HandlerError, match="makes no updates"):
        TerminateOnNan(gradients=True).attach(engine)
    handler.attach(engine)
    engine.run([1.0])
    assert repr(handler) == "TerminateOnNan(every=2, reason=None)"
