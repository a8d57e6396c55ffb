from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from pellucid.engine import Engine, Events, HandlerError, SingleDevice
from pellucid.handlers import GradientClip, History


def line(weight=1.0):
    """A model whose gradient is its input."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def step(engine, batch):
    engine.backward((engine.model(torch.tensor(batch))).sum())
    return engine.update()


def make_engine(model, **arguments):
    return Engine(step, model, optimizer=SGD(model.parameters(), lr=1.0), **arguments)


def gradients_seen(engine):
    """The gradients each update is made with: those at the end of UPDATE_STARTED."""
    seen = []
    engine.add_event_handler(
        Events.UPDATE_STARTED, lambda engine, batch: seen.append(engine.model.weight.grad.clone().tolist()[0])
    )
    return seen


def test_the_norm_is_limited_and_recorded_from_before_clipping():
    engine = make_engine(line())
    history = History().attach(engine)
    GradientClip(max_norm=1.0).attach(engine)
    seen = gradients_seen(engine)
    engine.run([[3.0, 4.0], [0.3, 0.4]])
    assert seen == [pytest.approx([0.6, 0.8]), pytest.approx([0.3, 0.4])]
    assert [row.value for row in history] == [5.0, pytest.approx(0.5)]


def test_each_entry_is_limited_by_max_value_and_the_norm_recorded_all_the_same():
    engine = make_engine(line())
    history = History().attach(engine)
    GradientClip(max_value=1.0).attach(engine)
    seen = gradients_seen(engine)
    engine.run([[3.0, -4.0], [0.3, 0.4]])
    assert seen == [[1.0, -1.0], pytest.approx([0.3, 0.4])]
    assert [row.value for row in history] == [5.0, pytest.approx(0.5)]


@pytest.mark.parametrize("arguments", [{"max_norm": 0.5}, {"max_norm": 0.1, "norm_type": 1.0}, {"max_value": 0.05}])
def test_a_run_equals_the_plain_loop_to_the_bit(model, loader, arguments):
    by_hand = copy.deepcopy(model)
    batches = list(loader)
    optimizer = SGD(by_hand.parameters(), lr=0.1)
    torch.manual_seed(0)
    for inputs, classes in batches:
        nn.functional.cross_entropy(by_hand(inputs), classes).backward()
        if "max_value" in arguments:
            clip_grad_value_(by_hand.parameters(), arguments["max_value"])
        else:
            clip_grad_norm_(by_hand.parameters(), **arguments)
        optimizer.step()
        optimizer.zero_grad()

    def train_step(engine, batch):
        engine.backward(nn.functional.cross_entropy(engine.model(batch[0]), batch[1]))
        engine.update()

    engine = Engine(train_step, model, optimizer=SGD(model.parameters(), lr=0.1))
    GradientClip(**arguments).attach(engine)
    torch.manual_seed(0)
    engine.run(batches)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True))


def test_a_whole_window_is_clipped_once():
    engine = make_engine(line(), gradient_accumulation_steps=2)
    GradientClip(max_norm=1.0).attach(engine)
    seen = gradients_seen(engine)
    engine.run([[6.0, 0.0], [0.0, 8.0], [0.0, 2.0]])  # means: (3, 4) and, of the last window's one batch, (0, 2)
    assert seen == [pytest.approx([0.6, 0.8]), pytest.approx([0.0, 1.0])]


def test_gradients_of_a_scaled_loss_are_clipped_unscaled():
    engine = make_engine(line(), strategy=SingleDevice("cpu", precision="fp16", scaler={"init_scale": 1024.0}))
    history = History().attach(engine)
    GradientClip(max_norm=1.0).attach(engine)
    seen = gradients_seen(engine)
    engine.run([[3.0, 4.0]])
    assert (seen, history[0].value) == ([pytest.approx([0.6, 0.8])], 5.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arguments", [{"max_norm": 2.0}, {"max_value": 2.0}])
def test_an_update_with_an_infinite_gradient_stays_skipped_though_clipping_makes_it_finite(fused, arguments):
    model = line()
    strategy = SingleDevice("cpu", precision="fp16", scaler={"init_scale": 4.0})
    engine = Engine(step, model, optimizer=SGD(model.parameters(), lr=1.0, fused=fused), strategy=strategy)
    GradientClip(**arguments).attach(engine)
    updated = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: updated.append(engine.state.output))
    engine.run([[1.0, 0.0], [math.inf, 0.0], [1.0, 0.0]])
    assert (updated, engine.state.updates) == ([True, False, True], 2)
    assert model.weight.tolist() == [[-1.0, 1.0]]


def test_the_updates_of_a_plain_optimizer_step_are_clipped_too():
    def plain_step(engine, batch):
        engine.model(torch.tensor(batch)).sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    model = line()
    engine = Engine(plain_step, model, optimizer=SGD(model.parameters(), lr=1.0))
    GradientClip(max_norm=1.0).attach(engine)
    engine.run([[3.0, 4.0]])
    assert model.weight.tolist() == [pytest.approx([0.4, 0.2])]


def two_models(engine, batch):
    for name, module in engine.model.items():
        engine.backward(module(torch.tensor(batch)).sum(), optimizer=name)
        engine.update(name)


def make_gan():
    models = {"generator": line(), "critic": line()}
    return Engine(two_models, models, optimizer={name: SGD(m.parameters(), lr=1.0) for name, m in models.items()})


def test_of_several_optimizers_each_is_clipped_and_recorded_by_itself():
    engine = make_gan()
    GradientClip(max_norm=1.0).attach(engine)
    result = engine.run([[3.0, 4.0]])
    assert dict(result.metrics) == {"generator/gradient_norm": 5.0, "critic/gradient_norm": 5.0}
    assert all(module.weight.tolist() == [pytest.approx([0.4, 0.2])] for module in engine.model.values())


def test_only_the_named_optimizer_is_clipped():
    engine = make_gan()
    GradientClip(max_norm=1.0, optimizer="critic").attach(engine)
    result = engine.run([[3.0, 4.0]])
    assert dict(result.metrics) == {"critic/gradient_norm": 5.0}
    assert engine.model["generator"].weight.tolist() == [[-2.0, -3.0]]


def test_it_records_as_often_as_asked_or_not_at_all():
    def recorded(**arguments):
        engine = make_engine(line())
        history = History().attach(engine)
        GradientClip(max_norm=1.0, **arguments).attach(engine)
        engine.run([[float(i), 0.0] for i in range(1, 6)])
        return [(row.iteration, row.name, row.value) for row in history]

    assert recorded(record_every=2, record="norm") == [(2, "norm", 2.0), (4, "norm", 4.0)]
    assert recorded(record=None) == []


def test_an_infinite_max_norm_only_measures():
    engine = make_engine(line())
    GradientClip(max_norm=math.inf).attach(engine)
    seen = gradients_seen(engine)
    assert engine.run([[3.0, 4.0]]).metrics["gradient_norm"] == 5.0
    assert seen == [[3.0, 4.0]]


def test_nothing_is_read_from_the_device(monkeypatch):
    reads = []
    engine = make_engine(line())
    GradientClip(max_norm=1.0).attach(engine)
    History().attach(engine)
    for name in ("item", "__float__", "__bool__", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, o=original, n=name, **kw: (reads.append(n), o(self, *args, **kw))[1]
        )
    engine.run([[3.0, 4.0]] * 5)
    assert reads == []


def test_it_announces_what_it_records():
    assert GradientClip(max_norm=1.0).records == ("gradient_norm", "*/gradient_norm")
    assert GradientClip(max_norm=1.0, record=None).records == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "exactly one"),
        ({"max_norm": 1.0, "max_value": 1.0}, TypeError, "exactly one"),
        ({"max_norm": 0.0}, ValueError, "max_norm=0.0: a number above 0"),
        ({"max_value": -1}, ValueError, "max_value=-1"),
        ({"max_norm": math.nan}, ValueError, "max_norm=nan"),
        ({"max_norm": "1"}, TypeError, "max_norm='1'"),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError, "norm_type=0"),
        ({"max_norm": 1.0, "record_every": 0}, ValueError, "record_every=0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        GradientClip(**arguments)


def test_an_engine_without_such_an_optimizer_is_refused():
    with pytest.raises(HandlerError, match="makes no updates"):
        GradientClip(max_norm=1.0).attach(Engine(step, line(), mode="eval"))
    with pytest.raises(HandlerError, match="optimizer='discriminator': the engine has 'generator', 'critic'"):
        GradientClip(max_norm=1.0, optimizer="discriminator").attach(make_gan())


def test_it_comes_off_again():
    engine = make_engine(line())
    clip = GradientClip(max_norm=1.0).attach(engine)
    with pytest.raises(HandlerError, match="already"):
        clip.attach(engine)
    engine.run([[3.0, 4.0]])
    clip.detach(engine)
    assert clip not in engine.attached()
    clip.attach(engine)
