from __future__ import annotations

import collections
import copy

import pytest
import torch
from ignite.metrics import Accuracy, Average, Loss
from torch import nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from pellucid.engine import (
    DataError,
    Engine,
    Events,
    HandlerError,
    ModelError,
    SingleDevice,
    UpdateError,
    create_supervised_evaluator,
    create_supervised_trainer,
    supervised_evaluation_step,
    supervised_training_step,
)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def hand_loop(model, optimizer, loader, epochs):
    losses = []
    model.train()
    for _ in range(epochs):
        for x, y in loader:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_supervised_trainer_is_the_hand_loop_to_the_bit(model, loader):
    by_hand, losses = copy.deepcopy(model), []
    torch.manual_seed(1)
    wanted = hand_loop(by_hand, sgd(by_hand), loader, epochs=3)
    torch.manual_seed(1)
    trainer = create_supervised_trainer(model, sgd(model), functional.cross_entropy)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e, batch: losses.append(e.state.output["loss"].item()))
    result = trainer.run(loader, max_epochs=3)
    assert losses == wanted
    assert equal(model.state_dict(), by_hand.state_dict())
    assert (result.iteration, result.updates) == (30, 30)


def test_a_supervised_evaluator_is_the_hand_loop_to_the_bit(model, loader):
    outputs = []
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(functional.cross_entropy)})
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: outputs.append(engine.state.output))
    torch.manual_seed(1)
    result = evaluator.run(loader)
    assert model.training
    model.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        wanted = [(model(x), y) for x, y in loader]
    y_pred, y = (torch.cat(parts) for parts in zip(*wanted, strict=True))
    assert all(
        torch.equal(a, b) for got, want in zip(outputs, wanted, strict=True) for a, b in zip(got, want, strict=True)
    )
    assert result.metrics["accuracy"] == (y_pred.argmax(1) == y).float().mean().item()
    assert result.metrics["loss"] == pytest.approx(functional.cross_entropy(y_pred, y).item())


def test_the_output_of_the_trainer_is_loss_prediction_and_target(model, loader):
    trainer, seen = create_supervised_trainer(model, sgd(model), nn.CrossEntropyLoss()), []

    @trainer.on(Events.ITERATION_COMPLETED)
    def look(engine, batch):
        output = engine.state.output
        seen.append((output["loss"].shape, output["y_pred"].shape, output["y"] is batch[1]))
        assert not any(tensor.requires_grad for tensor in output.values())

    trainer.run(loader)
    assert seen == [((), (4, 3), True)] * 10


def test_options_are_passed_on(model, loader):
    strategy = SingleDevice("cpu")
    options = {"strategy": strategy, "state": {"best": 0.0}, "name": "mine"}
    trainer = create_supervised_trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        functional.cross_entropy,
        metrics={"loss": Average(lambda output: output["loss"])},
        **options,
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()}, **options)
    for engine, mode, metric in ((trainer, "train", "loss"), (evaluator, "eval", "accuracy")):
        assert engine.model is model
        assert engine.strategy is strategy
        assert (engine.name, engine.state.best, engine.state.mode) == ("mine", 0.0, mode)
        assert list(engine.run(loader).metrics) == [metric]
    with pytest.raises(TypeError, match="optimiser"):
        create_supervised_trainer(model, None, functional.cross_entropy, optimiser=sgd(model))


def test_metrics_of_both_libraries_take_the_trainers_output(model, loader):
    metrics = {"ignite": Accuracy(), "torch": MulticlassAccuracy(3, average="micro")}
    trainer = create_supervised_trainer(model, sgd(model), functional.cross_entropy, metrics=metrics)
    values = trainer.run(loader).metrics
    assert values["ignite"] == pytest.approx(values["torch"])


def test_the_steps_are_public_and_serve_an_engine_of_ones_own(model, loader):
    trainer = Engine(supervised_training_step(functional.cross_entropy), model, optimizer=sgd(model))
    fork = trainer.fork(supervised_evaluation_step, metrics={"accuracy": Accuracy()})
    assert trainer.run(loader).updates == 10
    assert 0 <= fork.run(loader).metrics["accuracy"] <= 1


@pytest.mark.parametrize("pair", [tuple, list, lambda xy: collections.namedtuple("Pair", "x y")(*xy)])
def test_a_batch_is_any_pair(pair):
    evaluator, seen = create_supervised_evaluator(nn.Identity()), []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: seen.append(engine.state.output))
    evaluator.run([pair((torch.ones(2), torch.zeros(2)))])
    assert [value.tolist() for value in seen[0]] == [[1.0, 1.0], [0.0, 0.0]]


BAD_BATCHES = [
    (torch.ones(2, 3), r"take batches \(x, y\), got a Tensor: write a step of your own for others"),
    (torch.ones(()), "got a Tensor:"),
    ((torch.ones(2),), "got a tuple of 1:"),
    ([torch.ones(2)] * 3, "got a list of 3:"),
    ({"x": torch.ones(2), "y": torch.ones(2)}, "got a dict of 2:"),
    ("xy", "got a str of 2:"),
    (3, "got a int:"),
    (None, "got a NoneType:"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES)
def test_a_batch_that_is_no_pair_is_an_error_that_says_what_came(batch, message):
    model = nn.Linear(2, 1)
    for engine in (
        create_supervised_trainer(model, sgd(model), functional.mse_loss),
        create_supervised_evaluator(model),
    ):
        with pytest.raises(DataError, match=message):
            engine.run([batch])


@pytest.mark.parametrize("loss_fn", [None, "mse", nn.MSELoss, torch.ones(())])
def test_a_loss_function_that_cannot_be_called_is_refused_at_once(loss_fn):
    model = nn.Linear(2, 1)
    with pytest.raises(HandlerError, match=r"loss_fn is called as loss_fn\(y_pred, y\)"):
        create_supervised_trainer(model, sgd(model), loss_fn)


def test_mistakes_of_construction_are_those_of_an_engine():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(UpdateError, match="holds none of the model's"):
        create_supervised_trainer(model, sgd(other), functional.mse_loss)
    with pytest.raises(ModelError, match="model is a str"):
        create_supervised_evaluator("resnet18")
    with pytest.raises(HandlerError, match="metrics= takes a mapping"):
        create_supervised_evaluator(model, Accuracy())


def test_a_loss_that_is_no_scalar_is_an_error():
    model = nn.Linear(2, 1)
    trainer = create_supervised_trainer(model, sgd(model), nn.MSELoss(reduction="none"))
    with pytest.raises(UpdateError, match=r"scalar loss of shape \(\), got shape \(4, 1\)"):
        trainer.run([(torch.ones(4, 2), torch.ones(4, 1))])
