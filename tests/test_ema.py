from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from ignite.metrics import Average
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pellucid.engine import CheckpointError, Engine, Events, HandlerError, RunError, SingleDevice
from pellucid.handlers import EMA, Validate


def one_weight(value=0.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def downhill(engine, batch):
    """Each update adds the batch to the weight, at a rate of 1."""
    engine.backward(-engine.model.weight.sum() * batch)
    return engine.update()


def make_engine(**arguments):
    model = one_weight()
    return Engine(downhill, model, optimizer=SGD(model.parameters(), lr=1.0), **arguments)


def train_step(engine, batch):
    inputs, classes = batch
    engine.backward(cross_entropy(engine.model(inputs), classes))
    engine.update()


def make_trainer(model, **arguments):
    return Engine(train_step, model, optimizer=SGD(model.parameters(), lr=0.1), **arguments)


def bits(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_equal_to_the_bit(ours, theirs):
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def averages_seen(engine, ema):
    """The averaged weight after each update."""
    seen = []
    engine.add_event_handler(Events.UPDATE_COMPLETED, lambda engine, batch: seen.append(ema.weights()["weight"].item()))
    return seen


# ---- the average


def test_a_constant_decay_gives_the_average_made_by_hand():
    engine = make_engine()
    seen = averages_seen(engine, EMA(decay=0.75, warmup=0).attach(engine))
    engine.run([1.0, 2.0, 3.0])  # the weight is 1, 3, 6
    by_hand = [0.25 * 1, 0.75 * 0.25 + 0.25 * 3, 0.75 * (0.75 * 0.25 + 0.25 * 3) + 0.25 * 6]
    assert seen == by_hand


def test_with_a_warm_up_the_decay_rises_to_its_limit():
    engine = make_engine()
    seen = averages_seen(engine, EMA(decay=0.4, warmup=4).attach(engine))
    engine.run([1.0] * 4)
    average, by_hand = 0.0, []
    for made, weight in enumerate([1.0, 2.0, 3.0, 4.0]):
        decay = min(0.4, (1 + made) / (4 + made))  # 1/4, 2/5, 1/2, ...
        average = decay * average + (1 - decay) * weight
        by_hand.append(average)
    assert seen == pytest.approx(by_hand)


def test_parameters_and_batch_statistics_equal_those_of_torch_to_the_bit(model, loader):
    trainer = make_trainer(model)
    ema = EMA(decay=0.9, warmup=0).attach(trainer)
    theirs = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    theirs.update_parameters(model)  # the first call copies

    @trainer.on(Events.UPDATE_COMPLETED)
    def follow(engine, batch):
        theirs.update_parameters(engine.model)

    trainer.run(loader, max_epochs=2)
    ours, theirs = ema.weights(), theirs.module.state_dict()
    assert ours.pop("1.num_batches_tracked") == model[1].num_batches_tracked == 20  # copied, not averaged
    del theirs["1.num_batches_tracked"]
    assert_equal_to_the_bit(ours, theirs)


def test_it_starts_at_the_weights_the_first_run_begins_with():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.model.load_state_dict({"weight": torch.tensor([[8.0]])})  # after it was attached
    engine.run([4.0])
    assert ema.weights()["weight"].item() == 10.0


@pytest.mark.parametrize(("accumulate", "expected"), [(1, [1, 2, 3, 4, 5]), (3, [1, 2])])
def test_it_averages_after_updates_not_after_batches(accumulate, expected):
    engine = make_engine(gradient_accumulation_steps=accumulate)
    seen = averages_seen(engine, EMA(decay=0.0).attach(engine))
    engine.run([1.0] * 5)
    assert seen == expected


def test_an_update_skipped_for_inf_is_not_averaged():
    engine = make_engine(strategy=SingleDevice("cpu", precision="fp16", scaler={"init_scale": 4.0}))
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    seen = averages_seen(engine, ema)
    engine.run([1.0, math.inf, 2.0])
    assert (seen, ema.averages) == ([0.5, 1.75], 2)


def test_every_nth_update_is_averaged():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0, every=2).attach(engine)
    seen = averages_seen(engine, ema)
    engine.run([1.0] * 5)
    assert (seen, ema.averages) == ([0.0, 1.0, 1.0, 2.5, 2.5], 2)


def test_low_precision_weights_are_averaged_in_float32():
    model = one_weight(1.0)
    engine = Engine(
        downhill,
        model,
        optimizer=lambda parameters: SGD(parameters, lr=1.0),
        strategy=SingleDevice("cpu", precision="bf16-true"),
    )
    ema = EMA(decay=0.999, warmup=0).attach(engine)
    engine.run([0.25] * 4)
    exact = ema.state_dict()["weights"]["weight"]
    assert (exact.dtype, exact.item()) == (torch.float32, pytest.approx(1.0025, abs=1e-5))
    assert ema.weights()["weight"].dtype == torch.bfloat16  # in which 1 + 0.0025 is 1


def test_training_is_the_same_to_the_bit_with_and_without_it(model, loader):
    def train(with_ema):
        net = copy.deepcopy(model)
        trainer = make_trainer(net)
        if with_ema:
            ema = EMA(decay=0.9).attach(trainer)
            evaluator = Engine(lambda engine, batch: engine.model(batch[0]), net, mode="eval")
            Validate(evaluator, loader, every=Events.ITERATION_COMPLETED(every=3), weights=ema).attach(trainer)
        torch.manual_seed(0)
        trainer.run(loader, max_epochs=2)
        return bits(net)

    assert_equal_to_the_bit(train(False), train(True))


def test_nothing_is_read_from_the_device(model, loader, monkeypatch):
    reads = []
    trainer = make_trainer(model)
    EMA(decay=0.9).attach(trainer)
    for name in ("item", "__float__", "__bool__", "tolist", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, o=original, n=name, **kw: (reads.append(n), o(self, *args, **kw))[1]
        )
    trainer.run([(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))] * 3)
    assert reads == []


def test_its_memory_is_its_own_and_the_model_is_left_as_it_was(model, loader):
    before = set(vars(model)), len(model._forward_hooks)
    ema = EMA().attach(make_trainer(model))
    own = {slot.data_ptr() for slot in ema.state_dict()["weights"].values()}
    assert not own & {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert (set(vars(model)), len(model._forward_hooks)) == before
    with ema.applied():
        copied = copy.deepcopy(model)
    assert_equal_to_the_bit(copied.state_dict(), model.state_dict())


def test_a_buffer_that_the_model_replaces_is_followed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("cache", torch.zeros(1), persistent=False)

        def forward(self, x):
            self.seen = self.seen + 1  # a new tensor each time
            return self.weight * x

    def step(engine, batch):
        engine.backward(engine.model(batch).sum())
        engine.update()

    model = Counting()
    engine = Engine(step, model, optimizer=SGD(model.parameters(), lr=1.0))
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([torch.ones(1)] * 2)
    assert {key: value.item() for key, value in ema.weights().items()} == {"weight": -1.25, "seen": 1.25}
    live = model.seen
    with ema.applied():
        model(torch.ones(1))
        assert model.seen.item() == 2.25
    assert (model.seen is live, model.seen.item()) == (True, 2.0)


def test_tied_weights_are_averaged_once_and_have_both_keys():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.second = nn.Linear(2, 2, bias=False)
            self.second.weight = self.first.weight

    def step(engine, batch):
        engine.backward(engine.model.first.weight.sum())
        engine.update()

    model = Tied()
    engine = Engine(step, model, optimizer=SGD(model.parameters(), lr=1.0))
    start = model.first.weight.detach().clone()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([0])
    for weights in (ema.weights(), ema.state_dict()["weights"]):
        assert list(weights) == ["first.weight", "second.weight"]
        assert all(torch.allclose(weight, start - 0.5) for weight in weights.values())
    with ema.applied():
        assert model.second.weight is model.first.weight


# ---- in the model


def test_the_averages_are_in_the_same_parameters_and_the_weights_come_back_to_the_bit(model, loader):
    trainer = make_trainer(model)
    ema = EMA(decay=0.9).attach(trainer)
    trainer.run(loader)
    before, objects = bits(model), [*model.parameters(), *model.buffers()]
    averages = ema.weights()
    with ema.applied():
        assert_equal_to_the_bit(model.state_dict(), averages)
        assert all(a is b for a, b in zip([*model.parameters(), *model.buffers()], objects, strict=True))
        model[0].weight.data.zero_()
    assert_equal_to_the_bit(model.state_dict(), before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_the_weights_come_back_whatever_is_raised(error):
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    with pytest.raises(error), ema.applied():
        assert engine.model.weight.item() == 0.5
        raise error
    assert engine.model.weight.item() == 1.0


def test_the_weights_come_back_also_when_ctrl_c_comes_while_they_are_put_back():
    class Interrupts(torch.Tensor):
        """The second copy into it is interrupted, once."""

        copies = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "copy_":
                cls.copies += 1
                if cls.copies == 2:
                    raise KeyboardInterrupt
            return super().__torch_function__(function, types, args, kwargs or {})

    engine = make_engine()
    engine.model.register_buffer("extra", torch.zeros(1).as_subclass(Interrupts))
    engine.model.register_buffer("last", torch.zeros(1))
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    engine.model.last.fill_(7.0)
    Interrupts.copies = 0
    with pytest.raises(KeyboardInterrupt), ema.applied():
        assert engine.model.last.item() == 0.0
    assert (engine.model.weight.item(), engine.model.last.item()) == (1.0, 7.0)
    with ema.applied():
        assert engine.model.weight.item() == 0.5


def test_applied_inside_applied_changes_nothing_and_gives_nothing_back_too_early():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    with ema.applied():
        with ema.applied():
            assert engine.model.weight.item() == 0.5
        assert engine.model.weight.item() == 0.5
    assert engine.model.weight.item() == 1.0


def test_two_averages_of_one_model_are_applied_one_within_the_other():
    engine = make_engine()
    slow, fast = EMA(decay=0.75, warmup=0).attach(engine), EMA(decay=0.25, warmup=0).attach(engine)
    engine.run([1.0])
    with slow.applied():
        with fast.applied():
            assert engine.model.weight.item() == 0.75
        assert engine.model.weight.item() == 0.25
    assert engine.model.weight.item() == 1.0


def test_between_a_forward_and_its_backward_the_gradient_stays_that_of_the_weights(model, loader):
    inputs, classes = next(iter(loader))
    trainer = make_trainer(model)
    ema = EMA(decay=0.5).attach(trainer)
    trainer.run(loader)
    model.eval()

    def gradients(look):
        loss = cross_entropy(model(inputs), classes)
        if look:
            with ema.applied(), torch.no_grad():
                model(inputs)
        return torch.autograd.grad(loss, list(model.parameters()))

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_training_on_averaged_weights_is_refused():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    with ema.applied(), pytest.raises(RunError, match=r"leave ema.applied\(\) first"):
        engine.run([1.0], max_epochs=2)
    assert engine.model.weight.item() == 1.0


# ---- in an evaluation


def weight_evaluator(model):
    return Engine(lambda engine, batch: model.weight.item() + batch, model, mode="eval", metrics={"mean": Average()})


def test_a_validation_sees_the_averages_and_the_training_never_does():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    seen = []
    Validate(weight_evaluator(engine.model), [0.0], every=Events.ITERATION_COMPLETED, weights=ema).attach(engine)
    Validate(weight_evaluator(engine.model), [0.0], every=Events.ITERATION_COMPLETED, prefix="raw/").attach(engine)
    engine.add_event_handler(
        Events.METRICS_RECORDED, lambda engine, batch: seen.append(dict(engine.state.last_record.values))
    )
    engine.run([1.0, 1.0])
    assert seen == [{"val/mean": 0.5}, {"raw/mean": 1.0}, {"val/mean": 1.25}, {"raw/mean": 2.0}]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_validation_that_breaks_gives_the_weights_back(error):
    def breaks(engine, batch):
        raise error

    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    evaluator = Engine(breaks, engine.model, mode="eval")
    Validate(evaluator, [0.0], every=Events.ITERATION_COMPLETED(once=2), weights=ema).attach(engine)
    with pytest.raises(error):
        engine.run([1.0, 1.0, 1.0])
    assert engine.model.weight.item() == 2.0
    assert engine.run([1.0, 1.0, 1.0]).updates == 3


def test_within_an_autocast_region_of_the_step_the_validation_sees_the_averages_and_the_step_its_weights():
    seen = []

    def step(engine, batch):
        with engine.autocast():
            before = engine.model(torch.ones(1, 1)).item()  # torch keeps the cast weight until the region ends
            engine.record({"now": 0.0})
            seen.append((before, engine.model(torch.ones(1, 1)).item()))
        engine.backward(-engine.model.weight.sum() * batch)
        engine.update()

    def eval_step(engine, batch):
        with engine.autocast():
            seen.append(engine.model(torch.ones(1, 1)).item())

    model = one_weight()
    engine = Engine(
        step, model, optimizer=SGD(model.parameters(), lr=1.0), strategy=SingleDevice("cpu", precision="bf16")
    )
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    evaluator = engine.fork(eval_step)

    @engine.on(Events.METRICS_RECORDED)
    def evaluate(engine, batch):
        with ema.applied(evaluator.model):
            evaluator.run([0])

    engine.run([1.0, 1.0])
    assert seen == [0.0, (0.0, 0.0), 0.5, (1.0, 1.0)]


def test_an_evaluation_of_another_model_is_refused():
    engine = make_engine()
    ema = EMA().attach(engine)
    Validate(weight_evaluator(one_weight()), [0.0], weights=ema).attach(engine)
    with pytest.raises(HandlerError, match="another model than the Linear"):
        engine.run([1.0])
    assert engine.model.weight.item() == 1.0
    with pytest.raises(TypeError, match="an EMA was wanted"):
        Validate(weight_evaluator(engine.model), [0.0], weights=0.999)


def test_it_may_be_applied_to_what_has_the_averaged_model_inside():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    for model in (nn.Sequential(engine.model), {"net": engine.model}):
        with ema.applied(model):
            assert engine.model.weight.item() == 0.5


# ---- several models and optimizers


def make_gan():
    def step(engine, batch):
        for name in batch:
            engine.backward(-engine.model[name].weight.sum(), optimizer=name)
            engine.update(name)

    models = {"generator": one_weight(), "critic": one_weight()}
    return Engine(step, models, optimizer={name: SGD(m.parameters(), lr=1.0) for name, m in models.items()})


def test_each_model_of_a_mapping_is_averaged_after_the_updates_of_its_own_optimizer():
    engine = make_gan()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([["critic"], ["critic", "generator"]])
    weights = ema.weights()
    assert {name: weights[name]["weight"].item() for name in weights} == {"generator": 0.5, "critic": 1.25}
    with ema.applied(engine.model["generator"]):
        assert [module.weight.item() for module in engine.model.values()] == [0.5, 2.0]
        with ema.applied():
            assert [module.weight.item() for module in engine.model.values()] == [0.5, 1.25]
        assert [module.weight.item() for module in engine.model.values()] == [0.5, 2.0]
    assert [module.weight.item() for module in engine.model.values()] == [1.0, 2.0]


def test_only_the_model_asked_for_is_averaged():
    engine = make_gan()
    ema = EMA(decay=0.5, warmup=0, model=engine.model["generator"]).attach(engine)
    engine.run([["critic"], ["critic", "generator"]])
    assert (ema.weights()["weight"].item(), ema.averages) == (0.5, 1)
    with pytest.raises(HandlerError, match="does not have"):
        EMA(model=one_weight()).attach(engine)


def test_of_one_model_with_two_optimizers_each_parameter_is_averaged_once_an_iteration():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = one_weight(), one_weight()
            self.register_buffer("statistic", torch.ones(1))

    def step(engine, batch):
        engine.backward(-engine.model.head.weight.sum() - engine.model.body.weight.sum())
        engine.model.statistic += 1
        engine.update("body")
        engine.update("head")

    model = Two()
    parts = {"body": model.body, "head": model.head}
    engine = Engine(step, model, optimizer={name: SGD(part.parameters(), lr=1.0) for name, part in parts.items()})
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([0, 0])
    assert {key: value.item() for key, value in ema.weights().items()} == {
        "statistic": 2.25,
        "head.weight": 1.25,
        "body.weight": 1.25,
    }


# ---- saving


def test_the_averages_load_into_a_plain_model(model, loader):
    trainer = make_trainer(model)
    ema = EMA(decay=0.9).attach(trainer)
    trainer.run(loader)
    plain = copy.deepcopy(model)
    plain.load_state_dict(ema.weights())
    assert_equal_to_the_bit(plain.state_dict(), ema.weights())
    plain.load_state_dict(ema.state_dict()["weights"])
    assert_equal_to_the_bit(plain.state_dict(), ema.weights())


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_run_that_is_cut_and_resumed_in_new_objects_ends_with_the_averages_of_one_go(model, loader, cut):
    batches = list(loader)

    def start():
        trainer = make_trainer(copy.deepcopy(model))
        return trainer, EMA(decay=0.9, every=2).attach(trainer)

    trainer, whole = start()
    torch.manual_seed(0)
    trainer.run(batches, max_iters=7)

    torch.manual_seed(0)
    first, before = start()
    if cut:
        first.run(batches, max_iters=cut)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in (first, before, first.model, first.optimizer)], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    second, after = start()
    for part, state in zip((second, after, second.model, second.optimizer), states, strict=True):
        part.load_state_dict(state)
    if cut < 7:
        second.run(batches, max_iters=7)
    assert_equal_to_the_bit(after.weights(), whole.weights())
    assert after.averages == whole.averages == 3


def test_a_saved_state_does_not_change_with_the_run():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    saved, weights = ema.state_dict(), ema.weights()
    engine.run([1.0], max_epochs=2)
    assert saved["weights"]["weight"].item() == weights["weight"].item() == 0.5


def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed():
    ema = EMA()
    with pytest.raises(HandlerError, match="attach"):
        ema.load_state_dict({})
    with pytest.raises(HandlerError, match="attach"), ema.applied():
        pass
    engine = make_engine()
    ema.attach(engine)
    good = ema.state_dict()
    for bad in (
        {},
        {**good, "updates": {"generator": 1}},
        {**good, "weights": {}},
        {**good, "weights": {"weight": torch.ones(2, 1)}},
        {**good, "weights": {**good["weights"], "bias": torch.ones(1)}},
    ):
        with pytest.raises(CheckpointError):
            ema.load_state_dict(bad)
    assert ema.weights()["weight"].item() == 0.0


# ---- arguments and attaching


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decay": 1.0}, ValueError, "decay=1.0"),
        ({"decay": -0.1}, ValueError, "decay=-0.1"),
        ({"decay": math.nan}, ValueError, "decay=nan"),
        ({"warmup": -1}, ValueError, "warmup=-1"),
        ({"every": 0}, ValueError, "every=0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        EMA(**arguments)


def test_it_is_attached_to_engines_that_train_its_model():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    with pytest.raises(HandlerError, match="already"):
        ema.attach(engine)
    with pytest.raises(HandlerError, match="does not have"):
        ema.attach(make_engine())
    with pytest.raises(HandlerError, match="makes no updates"):
        EMA().attach(Engine(downhill, one_weight(), mode="eval"))
    engine.run([1.0])
    assert ema.weights()["weight"].item() == 0.5


def test_a_later_engine_goes_on_with_the_average():
    engine = make_engine()
    ema = EMA(decay=0.5, warmup=0).attach(engine)
    engine.run([1.0])
    optimizer = {"fine": SGD(engine.model.parameters(), lr=1.0)}
    later = Engine(downhill, engine.model, optimizer=optimizer)
    ema.attach(later)
    later.run([1.0])
    assert ema.weights()["weight"].item() == 1.25
