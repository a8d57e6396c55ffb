"""Precision: the type of the forward pass, the loss scale and the updates it skips, compiling in place."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from updating import Batch, Boom, Updating, assert_same, make_batches, make_net, momentum

from pellucid.engine import Engine, Events, SingleDevice, StrategyError, UpdateError

SHORT = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
NAMES = ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


# ---------------------------------------------------------------- the four precisions


@pytest.mark.parametrize("precision", [*NAMES, *SHORT])
def test_each_precision_has_its_types(precision: str) -> None:
    seen: list[torch.dtype] = []

    def step(engine: Engine, batch: Tensor) -> None:
        with engine.autocast():
            y = engine.model(batch)
        loss = y.float().mean()
        engine.backward(loss)
        seen.extend([batch.dtype, y.dtype, engine.model.weight.dtype, engine.model.weight.grad.dtype])
        engine.update()

    engine = Engine(step, nn.Linear(4, 1), optimizer=momentum, strategy=SingleDevice("cpu", precision=precision))
    engine.run([torch.ones(2, 4)])
    full, half, brain = torch.float32, torch.float16, torch.bfloat16
    name = SHORT.get(precision, precision)
    assert engine.state.precision == engine.strategy.precision == name
    assert (
        seen
        == {
            "32-true": [full, full, full, full],
            "bf16-mixed": [full, brain, full, full],
            "16-mixed": [full, half, full, full],
            "bf16-true": [brain, brain, brain, brain],
        }[name]
    )


@pytest.mark.parametrize("precision", ["fp64", "16", 16, None, "32-True", ""])
def test_a_precision_that_does_not_exist_is_refused_and_those_that_do_are_named(precision: Any) -> None:
    with pytest.raises(StrategyError, match=f"precision={precision!r} does not exist.*'32-true', 'bf16-mixed'.*'fp16'"):
        SingleDevice("cpu", precision=precision)


def test_at_full_precision_the_autocast_region_leaves_the_users_own_alone() -> None:
    def step(engine: Engine, batch: Tensor) -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16), engine.autocast():
            return engine.model(batch).dtype

    outputs: list[Any] = []
    engine = Engine(step, nn.Linear(4, 1))
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: outputs.append(engine.state.output))
    engine.run([torch.ones(1, 4)])
    assert outputs == [torch.bfloat16]


def test_in_bf16_true_floats_of_a_batch_are_cast_and_all_else_stays() -> None:
    batch = {"x": torch.ones(1), "ids": torch.tensor([1]), "mask": torch.tensor([True]), "text": ["a"]}
    batch["done"] = torch.ones(1, dtype=torch.bfloat16)  # type: ignore[assignment]
    cast = SingleDevice("cpu", precision="bf16-true").prepare_batch(batch)
    types = {name: value.dtype for name, value in cast.items() if isinstance(value, Tensor)}
    assert types == {"x": torch.bfloat16, "ids": torch.int64, "mask": torch.bool, "done": torch.bfloat16}
    assert all(cast[name] is batch[name] for name in ("ids", "mask", "text", "done"))


def test_in_bf16_true_the_model_is_cast_in_place_before_its_optimizer_is_made() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = [*model.parameters()]
    given = Adam(model.parameters())
    engine = Engine(
        lambda engine, batch: None, model, optimizer=given, strategy=SingleDevice("cpu", precision="bf16-true")
    )
    assert engine.model is model and all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} == {torch.bfloat16}
    assert model[1].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("precision", NAMES)
def test_an_evaluator_of_the_same_model_has_its_precision_without_being_told(precision: str) -> None:
    model = nn.Linear(4, 1)
    trainer = Engine(lambda engine, batch: None, model, strategy=SingleDevice("cpu", precision=precision))
    evaluator = Engine(lambda engine, batch: None, model, mode="eval")
    assert evaluator.strategy is trainer.strategy and evaluator.state.precision == precision


@pytest.mark.parametrize("precision", NAMES)
def test_every_precision_learns(precision: str) -> None:
    x = torch.randn(16, 4)
    losses: list[float] = []

    def step(engine: Engine, batch: Batch) -> None:
        with engine.autocast():
            loss = mse_loss(engine.model(batch[0]).float(), batch[1].float())
        engine.backward(loss)
        engine.update()
        losses.append(loss.item())

    engine = Engine(step, nn.Linear(4, 1), optimizer=momentum, strategy=SingleDevice("cpu", precision=precision))
    engine.run([(x, x.sum(1, keepdim=True))] * 60)
    assert losses[-1] < 0.01 * losses[0]


# ---------------------------------------------------------------- looking from inside an autocast region


def look_not(engine: Engine) -> None:
    pass


def look(engine: Engine) -> None:
    def evaluate(engine: Engine, batch: Batch) -> Tensor:
        with engine.autocast():
            return engine.model(batch[0])

    engine.fork(evaluate).run(make_batches(2))


def look_and_fail(engine: Engine) -> None:
    def evaluate(engine: Engine, batch: Batch) -> None:
        with engine.autocast():
            engine.model(batch[0])
            raise Boom

    with suppress(Boom):
        engine.fork(evaluate).run(make_batches(2))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("looker", [look, look_and_fail])
def test_an_evaluation_inside_an_autocast_region_leaves_the_gradients_bit_identical(
    looker: Callable[[Engine], None], precision: str
) -> None:
    def gradients(looker: Callable[[Engine], None]) -> list[Tensor]:
        found: list[Tensor] = []

        def step(engine: Engine, batch: Batch) -> None:
            x, y = batch
            with engine.autocast():
                looker(engine)
                loss = mse_loss(engine.model(x), y.to(engine.model(x).dtype))
                looker(engine)
            engine.backward(loss.float())
            engine.update()

        net = make_net()
        engine = Engine(
            step,
            net,
            optimizer=momentum,
            strategy=SingleDevice("cpu", precision=precision),
            gradient_accumulation_steps=2,
        )
        engine.add_event_handler(
            Events.UPDATE_STARTED, lambda engine, batch: found.extend(p.grad.clone() for p in net.parameters())
        )
        torch.manual_seed(3)
        engine.run(make_batches(3))
        return found

    alone, watched = gradients(look_not), gradients(looker)
    assert len(alone) == len(watched) == 8
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


# ---------------------------------------------------------------- the loss scale


OVERFLOWS_AT = 2
SCALER = {"init_scale": 1024.0, "growth_interval": 2}


class Scaled:
    """A training with a loss scale, in which the losses of some batches overflow; notes what each update was like."""

    def __init__(
        self,
        optimizer: Callable[[Any], Optimizer] = momentum,
        steps: int = 1,
        overflows_at: tuple[int, ...] = (OVERFLOWS_AT,),
    ) -> None:
        self.net = make_net(dropout=0)
        self.overflows_at = overflows_at
        self.log: list[tuple[int, bool, float]] = []  # iteration, whether the weights moved, the scale after it
        self.engine = Engine(
            self.step,
            self.net,
            optimizer=optimizer,
            strategy=SingleDevice("cpu", precision="16-mixed", scaler=SCALER),
            gradient_accumulation_steps=steps,
        )

    def step(self, engine: Engine, batch: Batch) -> None:
        x, y = batch
        with engine.autocast():
            loss = mse_loss(engine.model(x).float(), y)
        if engine.state.iteration in self.overflows_at:
            loss = loss * torch.inf
        before = copy.deepcopy(self.net.state_dict())
        engine.backward(loss)
        updated = engine.update()
        moved = any(not torch.equal(before[name], value) for name, value in self.net.state_dict().items())
        assert moved == updated
        self.log.append((engine.state.iteration, moved, self.scale()))

    def scale(self) -> float:
        scale: float = self.engine.state_dict()["gradients"]["scale"]["scale"]
        return scale

    def saved(self) -> bytes:
        file = io.BytesIO()
        parts = {"engine": self.engine, "net": self.net, "optimizer": self.engine.optimizer}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, file: bytes) -> Scaled:
        saved = torch.load(io.BytesIO(file), weights_only=True)
        self.engine.load_state_dict(saved["engine"])
        self.net.load_state_dict(saved["net"])
        self.engine.optimizer.load_state_dict(saved["optimizer"])
        return self


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": momentum,
    "fused SGD": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "fused Adam": partial(Adam, lr=0.01, fused=True),
    "foreach": partial(SGD, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_skipped_for_inf_is_no_update(optimizer: str) -> None:
    """B25: four iterations, inf at the second; no warning, as every warning is an error here."""
    training = Scaled(OPTIMIZERS[optimizer])
    rate = torch.optim.lr_scheduler.ExponentialLR(training.engine.optimizer, gamma=0.5)
    initial = rate.get_last_lr()[0]
    fired: list[tuple[str, int]] = []
    for event in (Events.UPDATE_STARTED, Events.UPDATE_COMPLETED):
        training.engine.add_event_handler(
            event, lambda engine, batch, event=event: fired.append((event.name, engine.state.iteration))
        )
    training.engine.add_event_handler(Events.UPDATE_COMPLETED, lambda engine, batch: rate.step())
    result = training.engine.run(make_batches(4))
    assert (result.updates, result.iteration) == (3, 4)
    assert [iteration for name, iteration in fired if name == "UPDATE_STARTED"] == [1, 2, 3, 4]
    assert [iteration for name, iteration in fired if name == "UPDATE_COMPLETED"] == [1, 3, 4]
    assert training.log == [(1, True, 1024.0), (2, False, 512.0), (3, True, 512.0), (4, True, 1024.0)]
    assert rate.get_last_lr() == [initial * 0.5**3]


@pytest.mark.parametrize("stop", range(1, 10))
def test_scale_and_weights_after_a_resume_equal_the_full_run(stop: int) -> None:
    """B23: growth interval 2, two forced infs, saved at any iteration of ten."""
    options: Any = {"overflows_at": (3, 7), "steps": 2}
    full, first = Scaled(**options), Scaled(**options)
    full.engine.run(make_batches(10))
    first.engine.run(make_batches(10), max_iters=stop)
    second = Scaled(**options).load(first.saved())
    second.engine.run(make_batches(10), max_epochs=1)
    assert first.log + second.log == full.log
    assert [updated for _, updated, _ in full.log] == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert_same(second.net.state_dict(), full.net.state_dict())
    assert_same(second.engine.optimizer.state_dict(), full.engine.optimizer.state_dict())


def test_an_inf_in_one_batch_skips_its_whole_window_and_no_other() -> None:
    training = Scaled(steps=3)
    result = training.engine.run(make_batches(7))
    assert [updated for _, updated, _ in training.log] == [False, False, False, False, False, True, True]
    assert (result.updates, training.log[-1]) == (2, (7, True, 1024.0))


def test_a_window_that_the_epoch_has_cut_can_be_flushed_by_a_new_engine() -> None:
    """The update comes before any backward there."""

    class Long(list[Batch]):
        def __len__(self) -> int:
            return 9

    full, first = Scaled(steps=4), Scaled(steps=4)
    full.engine.run(Long(make_batches(6)))
    first.engine.run(Long(make_batches(6)), max_iters=6)
    second = Scaled(steps=4).load(first.saved())
    result = second.engine.run(Long(make_batches(6)), max_epochs=1)
    assert (result.updates, result.iteration) == (1, 6)
    assert_same(second.net.state_dict(), full.net.state_dict())


@pytest.mark.parametrize("place", [Events.BACKWARD_COMPLETED, Events.UPDATE_STARTED, Events.UPDATE_COMPLETED])
@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_an_error_amid_an_update_leaves_the_scale_as_if_it_had_not_been(place: Events, iteration: int) -> None:
    full, training = Scaled(), Scaled()
    left = [iteration]

    def fail(engine: Engine, batch: Any) -> None:
        if left and engine.state.iteration == left[0]:
            left.clear()
            raise Boom

    training.engine.add_event_handler(place, fail)
    with suppress(Boom):
        training.engine.run(make_batches(4))
    training.engine.run(make_batches(4))
    full.engine.run(make_batches(4))
    assert training.scale() == full.scale()
    assert_same(training.net.state_dict(), full.net.state_dict())
    assert training.engine.state.updates == 3


def test_a_batch_whose_update_was_skipped_is_done_though_its_step_fails_afterwards() -> None:
    training = Scaled()
    training.overflows_at = (1,)

    def step(engine: Engine, batch: Batch) -> None:
        engine.backward(mse_loss(engine.model(batch[0]), batch[1]) * torch.inf)
        assert not engine.update()
        raise Boom

    engine = Engine(step, make_net(), optimizer=momentum, strategy=SingleDevice("cpu", precision="16-mixed"))
    with suppress(Boom):
        engine.run(make_batches(3))
    assert engine.state.iteration == 1


def test_gradients_are_at_their_true_scale_when_an_update_starts() -> None:
    def gradient(precision: str) -> Tensor:
        found: list[Tensor] = []
        training = Updating(steps=2, dropout=0, precision=precision)
        weight: Any = training.net[0].weight
        training.at(Events.UPDATE_STARTED, lambda _, engine: found.append(weight.grad.clone()))
        training.run(make_batches(2), 1)
        return found[0]

    assert torch.allclose(gradient("16-mixed"), gradient("32-true"), rtol=1e-2, atol=1e-3)


def test_a_handler_that_takes_all_gradients_away_calls_the_update_off() -> None:
    for precision in ("32-true", "16-mixed"):
        training = Updating(steps=1, dropout=0, precision=precision)

        def call_off(training: Updating, engine: Engine) -> None:
            if engine.state.iteration == 2:
                engine.optimizer.zero_grad()

        training.at(Events.UPDATE_STARTED, call_off).run(make_batches(3), 1)
        assert (training.updated_in, training.engine.state.updates) == ([1, 3], 2)


def test_a_plain_optimizer_step_is_refused_with_a_loss_scale() -> None:
    training = Updating(steps=1, precision="16-mixed").at(
        "after the backward", lambda _, engine: engine.optimizer.step()
    )
    with pytest.raises(UpdateError, match=r"a loss scale need engine\.backward"):
        training.run(make_batches(1))


def test_an_inner_training_on_a_copy_has_a_scale_and_a_window_of_its_own() -> None:
    def inner(training: Updating, engine: Engine) -> None:
        def step(engine: Engine, batch: Batch) -> None:
            engine.backward(mse_loss(engine.model(batch[0]), batch[1]) * torch.inf)
            engine.update()

        copied = engine.fork(step, mode="train", model="copy", optimizer=momentum, gradient_accumulation_steps=3)
        result = copied.run(make_batches(4))
        scales.append((result.updates, copied.state_dict()["gradients"]["scale"]["scale"]))

    scales: list[tuple[int, float]] = []
    alone = Updating(steps=2, precision="16-mixed").run(make_batches(5))
    watched = Updating(steps=2, precision="16-mixed").at("after the backward", inner).run(make_batches(5))
    assert_same(watched.outcome(), alone.outcome())
    assert scales == [(0, 16.0)] * 10


def test_options_of_the_scaler_are_torchs_and_go_with_its_precision() -> None:
    with pytest.raises(TypeError, match="growth_factr"):
        SingleDevice("cpu", precision="fp16", scaler={"growth_factr": 2.0})
    with pytest.raises(StrategyError, match=r"scaler=.* is for precision='16-mixed', not '32-true'"):
        SingleDevice("cpu", scaler=SCALER)


# ---------------------------------------------------------------- the host does not wait


class Watched(Tensor):
    """A tensor that notes when its number is asked for, which on a device is waited for."""

    asked: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "__bool__", "__float__", "__int__", "__index__", "tolist", "numpy", "__contains__"):
            ASKED.append(name)
        return super().__torch_function__(func, types, args, kwargs or {})


ASKED: list[str] = []


@pytest.fixture
def watched_loss() -> Iterator[Callable[[Tensor], Tensor]]:
    ASKED.clear()
    yield lambda loss: loss.as_subclass(Watched)
    ASKED.clear()


def train_watched(watch: Callable[[Tensor], Tensor], steps: int, weighted: bool, precision: str) -> Engine:
    net = make_net()
    for module in net:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter.detach().as_subclass(Watched)))

    def step(engine: Engine, batch: Batch) -> Tensor:
        with engine.autocast():
            loss = mse_loss(engine.model(batch[0]), batch[1])
        weight = watch(torch.tensor(3)) if weighted else None
        engine.backward(watch(loss) / 2, weight=weight)
        with engine.autocast():
            loss = mse_loss(engine.model(batch[0]), batch[1])
        engine.backward(watch(loss) / 2, weight=weight)
        engine.update()
        return loss

    engine = Engine(
        step,
        net,
        optimizer=partial(SGD, lr=0.1, foreach=False),
        strategy=SingleDevice("cpu", precision=precision),
        gradient_accumulation_steps=steps,
    )
    engine.run(make_batches(100))
    return engine


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("steps", "weighted"), [(1, False), (3, False), (3, True)])
def test_no_update_asks_for_a_number_on_the_device(
    watched_loss: Callable[[Tensor], Tensor], steps: int, weighted: bool, precision: str
) -> None:
    engine = train_watched(watched_loss, steps, weighted, precision)
    assert engine.state.updates == -(-100 // steps)
    assert ASKED == []
    bool(watched_loss(torch.ones(())))
    assert ASKED == ["__bool__"], "the watch itself works"


# ---------------------------------------------------------------- compiling in place


EAGER = {"backend": "eager"}


def compiled(**options: Any) -> SingleDevice:
    return SingleDevice("cpu", compile=EAGER, **options)


def train_compiled(strategy: SingleDevice) -> Updating:
    training = Updating(steps=2, dropout=0)
    training.engine = Engine(
        training.step, training.net, optimizer=momentum, strategy=strategy, gradient_accumulation_steps=2
    )
    training.engine.add_event_handler(Events.UPDATE_COMPLETED, training._note)
    return training.run(make_batches(5))


def test_a_model_compiled_in_place_keeps_its_keys_and_its_identity_and_trains_the_same() -> None:
    plain, quick = train_compiled(SingleDevice("cpu")), train_compiled(compiled())
    assert quick.engine.model is quick.net and quick.net._compiled_call_impl is not None
    assert not any("_orig_mod" in name for name in (*quick.net.state_dict(), *dict(quick.net.named_parameters())))
    assert_same(quick.outcome(), plain.outcome())


def test_a_compiled_model_is_compiled_once_and_shared_with_its_evaluator() -> None:
    model = make_net()
    trainer = Engine(lambda engine, batch: None, model, strategy=compiled())
    implementation = model._compiled_call_impl
    evaluator = Engine(lambda engine, batch: engine.model(batch), model, mode="eval")
    assert evaluator.strategy is trainer.strategy
    assert model._compiled_call_impl is implementation
    evaluator.run([torch.ones(2, 4)])


def test_modules_of_a_mapping_are_compiled_each_and_a_model_compiled_by_hand_stays_as_it_is() -> None:
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    models["a"].compile(backend="eager")
    by_hand = models["a"]._compiled_call_impl
    Engine(lambda engine, batch: None, models, strategy=compiled())
    assert models["a"]._compiled_call_impl is by_hand
    assert models["b"]._compiled_call_impl is not None


def test_a_compiled_model_can_be_copied_and_a_copy_trained_inside() -> None:
    training = train_compiled(compiled())
    copied = copy.deepcopy(training.net)
    assert torch.equal(copied(torch.ones(1, 4)), training.net.eval()(torch.ones(1, 4)))
    weights = copy.deepcopy(training.net.state_dict())

    def step(engine: Engine, batch: Batch) -> None:
        engine.backward(mse_loss(engine.model(batch[0]), batch[1]))
        engine.update()

    fork = training.engine.fork(step, mode="train", model="copy", optimizer=momentum)
    fork.run(make_batches(2))
    assert fork.model is not training.net and fork.model._compiled_call_impl is not None
    assert_same(training.net.state_dict(), weights)


@pytest.mark.parametrize("precision", NAMES)
def test_a_strategy_says_its_precision_and_can_be_copied(precision: str) -> None:
    scaler = SCALER if precision == "16-mixed" else None
    strategy = copy.deepcopy(SingleDevice("cpu", precision=precision, compile=EAGER, scaler=scaler))
    assert repr(strategy) == f"SingleDevice('cpu', precision={precision!r})"
