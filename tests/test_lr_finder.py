from __future__ import annotations

import copy
import math
import random

import matplotlib.pyplot as pyplot
import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from pellucid.engine import Engine, Events, HandlerError, RunError, SingleDevice
from pellucid.handlers import EMA, GradientClip, LRFinder, LRFinderResult, LRSchedule


def train_step(engine, batch):
    inputs, classes = batch
    loss = cross_entropy(engine.model(inputs), classes)
    engine.backward(loss)
    engine.update()
    return {"loss": loss}


def make_trainer(model, optimizer=None, **arguments):
    optimizer = optimizer or SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Engine(train_step, model, optimizer=optimizer, **arguments)


def everything(engine, loader):
    """All that a search must leave as it was, as exact numbers."""
    optimizer = engine.optimizer.state_dict()
    gradients = [None if p.grad is None else p.grad.tolist() for p in engine.model.parameters()]
    moments = [[name, value.tolist()] for state in optimizer["state"].values() for name, value in state.items()]
    weights = [[name, value.tolist()] for name, value in engine.model.state_dict().items()]
    generator = None if loader.generator is None else loader.generator.get_state().tolist()
    randomness = [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), generator]
    modes = [engine.model.training, torch.is_grad_enabled()]
    return repr([weights, gradients, moments, optimizer["param_groups"], randomness, modes])


def shuffled_loader():
    """A loader with a generator of its own."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(40, 8, generator=generator), torch.randint(0, 3, (40,), generator=generator))
    return DataLoader(data, batch_size=4, shuffle=True, generator=generator)


# ---- what it leaves alone


def test_at_rest_model_optimizer_and_random_state_stay_as_they_were_to_the_bit(model):
    loader, trainer = shuffled_loader(), make_trainer(model)
    trainer.run(loader)
    cross_entropy(model(torch.ones(2, 8)), torch.tensor([0, 1])).backward()  # gradients that are waiting, too
    before, state = everything(trainer, loader), repr(trainer.state.snapshot())
    result = LRFinder(iterations=25).run(trainer, loader)
    assert (everything(trainer, loader), repr(trainer.state.snapshot())) == (before, state)
    assert len(result.rates) == 25


@pytest.mark.parametrize("event", [Events.STARTED, Events.ITERATION_STARTED, Events.UPDATE_STARTED])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_within_a_running_engine_the_run_goes_on_as_if_nothing_had_been(model, event, accumulate):
    def train(search):
        torch.manual_seed(0)
        loader = shuffled_loader()
        trainer = make_trainer(copy.deepcopy(model), gradient_accumulation_steps=accumulate)
        ema = EMA(decay=0.9).attach(trainer)
        LRSchedule(lambda optimizer: ExponentialLR(optimizer, 0.9)).attach(trainer)
        if search:
            finder = LRFinder(iterations=5)
            trainer.add_event_handler(event(every=2), lambda engine, batch: finder.run(engine, loader))
        trainer.run(loader, max_epochs=2)
        return everything(trainer, loader), repr(ema.weights())

    assert train(search=False) == train(search=True)


def test_within_a_step_between_backward_and_update_the_gradient_is_left_alone(model, loader):
    def train(search):
        def step(engine, batch):
            inputs, classes = batch
            engine.backward(cross_entropy(engine.model(inputs), classes))
            if search:
                LRFinder(iterations=3).run(engine, batches, step=train_step)
            engine.update()

        net = copy.deepcopy(model)
        torch.manual_seed(0)
        Engine(step, net, optimizer=SGD(net.parameters(), lr=0.1)).run(batches[:4])
        return repr(net.state_dict())

    batches = list(loader)
    assert train(search=False) == train(search=True)


def test_a_search_that_fails_leaves_everything_as_it_was(model):
    def step(engine, batch):
        train_step(engine, batch)
        raise KeyboardInterrupt

    loader, trainer = shuffled_loader(), make_trainer(model)
    before = everything(trainer, loader)
    with pytest.raises(KeyboardInterrupt):
        LRFinder().run(trainer, loader, step=step)
    assert everything(trainer, loader) == before
    assert trainer.run(loader).stop_reason == "completed"


def test_a_step_that_would_train_the_outer_model_is_refused_before_it_has(model):
    loader = shuffled_loader()
    optimizer = SGD(model.parameters(), lr=0.1)

    def with_the_outer_optimizer(engine, batch):
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    def with_the_outer_model(engine, batch):
        engine.backward(cross_entropy(model(batch[0]), batch[1]))
        engine.update()

    def with_no_update(engine, batch):
        return cross_entropy(engine.model(batch[0]), batch[1])

    for step, error in (
        (with_the_outer_optimizer, HandlerError),
        (with_the_outer_model, RuntimeError),
        (with_no_update, HandlerError),
    ):
        trainer = Engine(step, model.eval(), optimizer=optimizer)  # whose own statistics do not move
        before = everything(trainer, loader)
        with pytest.raises(error):
            LRFinder(iterations=3).run(trainer, loader)
        assert everything(trainer, loader) == before


# ---- the search


def test_each_update_of_the_copy_has_the_next_rate(model, loader):
    def rates(**arguments):
        used = []

        def step(engine, batch):
            used.append(engine.optimizer.param_groups[0]["lr"])
            return train_step(engine, batch)

        result = LRFinder(0.001, 0.1, iterations=5, **arguments).run(make_trainer(model), loader, step=step)
        assert result.rates == tuple(used)
        return used

    assert rates() == pytest.approx([0.001, 0.1**2.5, 0.01, 0.1**1.5, 0.1])
    assert rates(mode="linear") == pytest.approx([0.001, 0.02575, 0.0505, 0.07525, 0.1])


def test_the_losses_are_those_of_a_loop_by_hand(model, loader):
    batches = list(loader)
    by_hand, losses = copy.deepcopy(model), []
    torch.manual_seed(0)
    optimizer = SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    result = LRFinder(0.01, 1.0, iterations=8, diverge=1e9).run(make_trainer(model), batches)
    for rate, (inputs, classes) in zip(result.rates, batches, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        loss = cross_entropy(by_hand(inputs), classes)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert result.losses == tuple(losses)


def test_the_copy_gets_a_fresh_optimizer_of_the_same_kind_and_options():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [
        {"params": [model[1].bias, model[0].weight], "lr": 0.01, "weight_decay": 0.5},
        {"params": [model[1].weight], "lr": 0.001},
    ]
    optimizer = AdamW(groups, betas=(0.8, 0.9), fused=True)
    ExponentialLR(optimizer, 0.9)  # which leaves options of its own in the groups
    seen = []

    def step(engine, batch):
        loss = engine.model(batch).sum()
        engine.backward(loss)
        engine.update()
        seen.append(engine.optimizer)
        return loss

    engine = Engine(step, model, optimizer=optimizer)
    engine.run([torch.ones(1, 1)])
    LRFinder(0.001, 0.1, iterations=2).run(engine, [torch.ones(1, 1)], step=step)
    inner = seen[-1]
    assert type(inner) is AdamW and inner is not optimizer
    assert [[tuple(p.shape) for p in group["params"]] for group in inner.param_groups] == [[(1,), (1, 1)], [(1, 1)]]
    for ours, theirs in zip(inner.param_groups, optimizer.param_groups, strict=True):
        assert {**ours, "params": 0, "lr": 0} == {**theirs, "params": 0, "lr": 0}
    assert [group["lr"] for group in inner.param_groups] == pytest.approx([0.1, 0.01])  # in their proportion
    assert [state["step"].item() for state in inner.state.values()] == [2.0] * 3
    assert not {id(p) for p in model.parameters()} & {id(p) for p in inner.state}


def test_a_rate_that_is_a_tensor_is_not_shared_with_the_outer_optimizer(model, loader):
    rate = torch.tensor(0.1)
    trainer = make_trainer(model, Adam(model.parameters(), lr=rate, foreach=False))
    LRFinder(iterations=5).run(trainer, loader)
    assert (trainer.optimizer.param_groups[0]["lr"] is rate, rate.item()) == (True, pytest.approx(0.1))


def test_the_handlers_of_the_outer_engine_hear_nothing_of_it(model, loader):
    trainer = make_trainer(model)
    heard = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED | Events.UPDATE_STARTED | Events.METRICS_RECORDED | Events.STARTED,
        lambda engine, batch: heard.append(1),
    )
    GradientClip(max_norm=1.0).attach(trainer)
    LRFinder(iterations=5).run(trainer, loader)
    assert (heard, dict(trainer.state.metrics), trainer.state.updates) == ([], {}, 0)


def made_up(losses, **arguments):
    """A search whose step returns these losses."""

    def step(engine, batch):
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        return losses[engine.state.iteration - 1]

    model = nn.Linear(1, 1)
    engine = Engine(step, model, optimizer=SGD(model.parameters(), lr=0.1))
    return LRFinder(1e-4, 1.0, **{"iterations": len(losses), "smooth": 0.0, **arguments}).run(engine, [0])


def test_it_stops_where_the_loss_diverges():
    result = made_up([2.0, 1.0, 3.9, 4.1, 1.0, 1.0])
    assert (result.losses, result.diverged) == ((2.0, 1.0, 3.9, 4.1), True)
    assert made_up([2.0, 1.0, 3.9, 4.1], diverge=5.0).diverged is False
    assert made_up([-4.0, -5.0, -4.0, 9.0, 10.1, 0.0]).losses == (-4.0, -5.0, -4.0, 9.0, 10.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_search_and_is_no_part_of_the_result(value):
    result = made_up([3.0, 2.0, 1.5, value, 1.0])
    assert (result.losses, result.diverged) == ((3.0, 2.0, 1.5), True)
    assert result.suggestion() == result.rates[1]


def test_in_half_precision_it_searches_with_a_scale_of_its_own(model, loader):
    trainer = make_trainer(model, strategy=SingleDevice("cpu", precision="fp16", scaler={"init_scale": 64.0}))
    before = trainer.state_dict()["gradients"]
    assert len(LRFinder(1e-5, 1e-2, iterations=10).run(trainer, loader).losses) == 10
    assert trainer.state_dict()["gradients"] == before


def gan_step(engine, batch):
    loss = {}
    for name in ("generator", "critic"):
        loss[name] = engine.model[name](torch.ones(1, 1)).pow(2).sum()
        engine.backward(loss[name], optimizer=name)
        engine.update(name)
    gan_step.rates = {name: optimizer.param_groups[0]["lr"] for name, optimizer in engine.optimizer.items()}
    return {"generator_loss": loss["generator"]}


def test_of_several_optimizers_the_named_one_is_tried_and_the_others_keep_their_rates():
    models = {"generator": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}
    optimizers = {
        "generator": SGD(models["generator"].parameters(), lr=0.1),
        "critic": Adam(models["critic"].parameters()),
    }
    engine = Engine(gan_step, models, optimizer=optimizers)
    before = repr([module.state_dict() for module in models.values()])
    LRFinder(iterations=3, output="generator_loss", optimizer="generator").run(engine, [0])
    assert gan_step.rates == {"generator": pytest.approx(1.0), "critic": 0.001}
    LRFinder(iterations=3, output="generator_loss").run(engine, [0])
    assert gan_step.rates == {"generator": pytest.approx(1.0), "critic": pytest.approx(1.0)}
    assert repr([module.state_dict() for module in models.values()]) == before


@pytest.mark.parametrize(
    ("output", "value", "loss"),
    [
        (None, 1.5, 1.5),
        (None, torch.tensor([1.5]), 1.5),
        (None, {"loss": torch.tensor(1.5), "other": 2.0}, 1.5),
        ("other", {"loss": 1.0, "other": 1.5}, 1.5),
        (lambda output: output[1], (0.0, 1.5), 1.5),
    ],
)
def test_the_loss_is_read_from_the_output(output, value, loss):
    assert made_up([value, value], output=output).losses == (loss, loss)


@pytest.mark.parametrize(
    ("output", "value", "message"),
    [
        (None, None, "no loss, one number, in the step's output NoneType"),
        (None, {"los": 1.0}, r"in output\['loss'\] of the step's output dict"),
        ("other", {"loss": 1.0}, r"output\['other'\]"),
        ("other", 1.0, "output float"),
        (None, torch.ones(2), "output Tensor"),
    ],
)
def test_an_output_without_the_loss_is_an_error(output, value, message):
    with pytest.raises(HandlerError, match=message + r".*LRFinder\(output=...\)"):
        made_up([value, value], output=output)


# ---- the result


def test_the_suggestion_is_where_the_loss_falls_fastest():
    losses = [5.0, 5.0, 4.5, 3.0, 2.8, 2.7, 2.7, 3.0, 1e9, 0.0]
    result = made_up(losses)
    assert result.suggestion() == result.rates[2]
    assert f"suggestion: {result.rates[2]:.3g}" in repr(result)


def test_smoothing_does_not_shift_the_curve():
    losses = [1 / (1 + math.exp((i - 50) / 4)) for i in range(100)]  # a fall that is steepest at 50
    result = made_up(losses, smooth=0.8, iterations=100)
    assert result.suggestion() == result.rates[50]
    assert abs(result.smoothed[50] - 0.5) < 0.02


def test_a_loss_that_diverges_does_not_hide_the_fall_before_it():
    falling = [2 - 1 / (1 + math.exp((50 - i) / 4)) for i in range(70)]  # steepest at 50
    result = made_up([*falling, 20.0, 4000.0], smooth=0.9, diverge=1e9)
    assert 45 <= result.rates.index(result.suggestion()) <= 55


@pytest.mark.parametrize("losses", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.1, 1.2, 1.3], [1.0, 0.5], [math.nan, 1.0]])
def test_without_a_fall_there_is_no_suggestion_but_an_error(losses):
    result = made_up(losses)
    with pytest.raises(RunError, match=r"no rate to suggest.*plot\(\)"):
        result.suggestion()
    assert "suggestion: none" in repr(result)


def test_a_rate_suggested_for_data_that_can_be_learned_is_of_the_right_size(model):
    inputs = torch.randn(400, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=20, shuffle=True)
    result = LRFinder(1e-5, 10.0).run(make_trainer(model), loader)
    assert 1e-3 < result.suggestion() < 1.0


def test_the_plot_shows_both_curves_and_the_suggestion_on_a_logarithmic_axis():
    result = made_up([5.0, 5.0, 4.5, 3.0, 2.8, 2.7, 2.7, 3.0, 1e9, 0.0])
    figure = result.plot(title="rates")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["loss", "smoothed", f"suggestion {result.suggestion():.2g}"]
    assert axes.get_ylim()[1] < 10 and axes.get_title() == "rates"
    assert figure._repr_png_()[:4] == b"\x89PNG" and pyplot.get_fignums() == []


def test_the_plot_may_go_into_axes_that_are_there_and_needs_no_suggestion():
    figure, axes = pyplot.subplots()
    assert made_up([1.0, 1.0, 1.0], mode="linear").plot(ax=axes) is figure
    assert (axes.get_xscale(), len(axes.get_legend().get_texts())) == ("linear", 2)
    pyplot.close(figure)
    with pytest.raises(RunError, match="first loss was not finite"):
        made_up([math.nan, 1.0]).plot()


def test_the_result_is_frozen_and_plain():
    result = made_up([2.0, 1.0, 1.0])
    assert result == LRFinderResult(result.rates, (2.0, 1.0, 1.0), result.smoothed, False, "exp")
    with pytest.raises(AttributeError):
        result.diverged = True


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_lr": 0.0}, ValueError, "min_lr=0.0"),
        ({"min_lr": 1.0, "max_lr": 0.1}, ValueError, "max_lr=0.1"),
        ({"max_lr": math.inf}, ValueError, "max_lr=inf"),
        ({"iterations": 1}, ValueError, "iterations=1"),
        ({"mode": "log"}, ValueError, "mode='log'"),
        ({"smooth": 1.0}, ValueError, "smooth=1.0"),
        ({"diverge": 0.5}, ValueError, "diverge=0.5"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        LRFinder(**arguments)


def test_an_engine_whose_training_cannot_be_copied_is_refused(model, loader):
    with pytest.raises(HandlerError, match="makes no updates"):
        LRFinder().run(Engine(train_step, model, mode="eval"), loader)
    with pytest.raises(HandlerError, match="optimizer='adam': the engine has 'optimizer'"):
        LRFinder(optimizer="adam").run(make_trainer(model), loader)
    other = nn.Linear(1, 1)
    with pytest.raises(HandlerError, match="parameters that are not the model's"):
        LRFinder().run(make_trainer(model, SGD([*model.parameters(), *other.parameters()], lr=0.1)), loader)

    class NeedsMore(Optimizer):
        def __init__(self, params, secret):
            super().__init__(params, {"lr": 0.1})

    with pytest.raises(HandlerError, match=r"NeedsMore cannot be made anew.*secret"):
        LRFinder().run(make_trainer(model, NeedsMore(model.parameters(), 1)), loader)
