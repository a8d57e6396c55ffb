"""Several models and optimizers in one engine: a small GAN, equal to its plain loop, counted update by update."""

from __future__ import annotations

import copy
import io
import logging
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import SGD
from updating import Boom, assert_same

from pellucid.engine import Engine, Events, SingleDevice, UpdateError

BATCHES = 7
momentum = partial(SGD, lr=0.05, momentum=0.5)


def make_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return {"generator": generator, "critic": critic}


def make_data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(BATCHES)]


def critic_loss(models: Any, real: Tensor, z: Tensor) -> Tensor:
    fake = models["generator"](z).detach()
    return (softplus(-models["critic"](real)) + softplus(models["critic"](fake))).mean().float()


def generator_loss(models: Any, z: Tensor) -> Tensor:
    return softplus(-models["critic"](models["generator"](z))).mean().float()


class Gan:
    """A generator and its critic, and the engine that trains both; notes every update.

    Args:
        steps: batches in a window.
        overflows: which losses are infinite, as (optimizer, iteration).
        critic_every: as in the papers that train the critic more often, the generator's update comes every n batches.
    """

    def __init__(
        self,
        precision: str = "32-true",
        steps: int = 1,
        overflows: tuple[tuple[str, int], ...] = (),
        generator_every: int = 1,
    ) -> None:
        self.models = make_models()
        self.overflows = overflows
        self.generator_every = generator_every
        self.log: list[tuple[int, str | None]] = []
        scaler = {"init_scale": 64.0, "growth_interval": 2} if precision == "16-mixed" else None
        self.engine = Engine(
            self.step,
            self.models,
            optimizer={"critic": momentum, "generator": momentum},
            strategy=SingleDevice("cpu", precision=precision, scaler=scaler),
            gradient_accumulation_steps=steps,
        )
        self.engine.add_event_handler(Events.UPDATE_COMPLETED, self._note)

    def step(self, engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        real, z = batch
        with engine.autocast():
            loss = critic_loss(engine.model, real, z)
        self.train("critic", loss)
        if engine.state.iteration % self.generator_every == 0:
            with engine.autocast():
                loss = generator_loss(engine.model, z)
            self.train("generator", loss)

    def train(self, name: str, loss: Tensor) -> None:
        infinite = (name, self.engine.state.iteration) in self.overflows
        self.engine.backward(loss * torch.inf if infinite else loss, optimizer=name)
        self.engine.update(name)

    def _note(self, engine: Engine, batch: Any) -> None:
        self.log.append((engine.state.iteration, engine.state.updating))

    def scale(self) -> float:
        scale: float = self.engine.state_dict()["gradients"]["scale"]["scale"]
        return scale

    def weights(self) -> dict[str, Any]:
        return copy.deepcopy({name: model.state_dict() for name, model in self.models.items()})

    def saved(self) -> bytes:
        file = io.BytesIO()
        parts: dict[str, Any] = {"engine": self.engine, **self.models}
        parts |= {f"optimizer of {name}": optimizer for name, optimizer in self.engine.optimizer.items()}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, file: bytes) -> Gan:
        saved = torch.load(io.BytesIO(file), weights_only=True)
        self.engine.load_state_dict(saved["engine"])
        for name, model in self.models.items():
            model.load_state_dict(saved[name])
            self.engine.optimizer[name].load_state_dict(saved[f"optimizer of {name}"])
        return self


def train_by_hand(steps: int = 1) -> dict[str, Any]:
    models, data = make_models(), make_data()
    optimizers = {name: momentum(model.parameters()) for name, model in models.items()}
    for first in range(0, BATCHES, steps):
        window = data[first : first + steps]
        for place, (real, z) in enumerate(window, start=1):
            (critic_loss(models, real, z) / len(window)).backward()
            if place == len(window):
                optimizers["critic"].step()
                optimizers["critic"].zero_grad()
            loss = generator_loss(models, z) / len(window)
            parameters = list(models["generator"].parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            if place == len(window):
                optimizers["generator"].step()
                optimizers["generator"].zero_grad()
    return {name: model.state_dict() for name, model in models.items()}


# ---------------------------------------------------------------- the plain loop, and the counts


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_two_optimizers_equal_the_plain_loop_to_the_bit(steps: int) -> None:
    gan = Gan(steps=steps)
    result = gan.engine.run(make_data())
    assert_same(gan.weights(), train_by_hand(steps))
    windows = -(-BATCHES // steps)
    assert (result.iteration, result.updates) == (BATCHES, 2 * windows)
    assert result.updates_by_optimizer == {"critic": windows, "generator": windows}
    ends = [*range(steps, BATCHES, steps), BATCHES]
    assert gan.log == [(end, name) for end in ends for name in ("critic", "generator")]
    assert [parameter.grad for model in gan.models.values() for parameter in model.parameters()] == [None] * 8


@pytest.mark.parametrize("steps", [1, 2])
def test_data_of_unknown_length_gives_the_same(steps: int) -> None:
    gan = Gan(steps=steps)
    gan.engine.run(lambda state: iter(make_data()))
    assert_same(gan.weights(), train_by_hand(steps), tolerance=0.0 if steps == 1 else 1e-6)


def test_without_windows_no_batch_is_drawn_ahead() -> None:
    gan, drawn, seen = Gan(), [], []
    gan.engine.add_event_handler(Events.ITERATION_STARTED, lambda engine, batch: seen.append(len(drawn)))
    gan.engine.run(lambda state: (drawn.append(batch) or batch for batch in make_data()))
    assert seen == [1, 2, 3, 4, 5, 6, 7]


def test_filters_on_updates_count_all_optimizers_real_updates() -> None:
    gan, seen = Gan(), []
    for event in (Events.UPDATE_STARTED(every=3), Events.UPDATE_COMPLETED(every=3), Events.UPDATE_COMPLETED(once=2)):
        gan.engine.add_event_handler(
            event,
            lambda engine, batch, event=event: seen.append((event.name, engine.state.iteration, engine.state.updating)),
        )
    gan.engine.run(make_data(), max_iters=4)
    started, completed = "UPDATE_STARTED", "UPDATE_COMPLETED"
    assert seen == [
        (completed, 1, "generator"),
        (started, 2, "critic"),
        (completed, 2, "critic"),
        (started, 3, "generator"),
        (completed, 3, "generator"),
    ]


def test_a_critic_that_is_trained_more_often_is_counted_so() -> None:
    gan = Gan(generator_every=3)
    result = gan.engine.run(make_data())
    assert result.updates_by_optimizer == {"critic": 7, "generator": 2}
    assert gan.log == [(i, name) for i in range(1, 8) for name in ("critic", "generator")[: 2 if i % 3 == 0 else 1]]


def test_no_optimizer_is_named_outside_of_its_update() -> None:
    gan, names = Gan(), []
    for event in (Events.ITERATION_STARTED, Events.BACKWARD_COMPLETED, Events.ITERATION_COMPLETED, Events.COMPLETED):
        gan.engine.add_event_handler(event, lambda engine, batch: names.append(engine.state.updating))
    gan.engine.run(make_data())
    assert set(names) == {None}


def test_a_plain_step_of_one_of_the_optimizers_is_counted_and_named_too() -> None:
    gan = Gan()

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        critic_loss(engine.model, *batch).backward()
        engine.optimizer["critic"].step()
        engine.optimizer["critic"].zero_grad()

    engine = Engine(step, gan.models, optimizer=gan.engine.optimizer)
    engine.add_event_handler(Events.UPDATE_COMPLETED, gan._note)
    assert engine.run(make_data()[:2]).updates_by_optimizer == {"critic": 2, "generator": 0}
    assert gan.log == [(1, "critic"), (2, "critic")]


# ---------------------------------------------------------------- one scale


def test_the_scale_grows_once_for_a_window_and_not_once_for_an_optimizer() -> None:
    for steps, unknown in [(1, False), (2, False), (2, True)]:
        gan, scales = Gan("16-mixed", steps), []
        gan.engine.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine, batch, g=gan, s=scales: s.append(g.scale())
        )
        gan.engine.run((lambda state: iter(make_data())) if unknown else make_data())
        assert (
            scales
            == {
                1: [64.0, 128.0, 128.0, 256.0, 256.0, 512.0, 512.0],
                2: [64.0, 64.0, 64.0, 128.0, 128.0, 128.0, 256.0],
            }[steps]
        )


@pytest.mark.parametrize("name", ["critic", "generator"])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_inf_in_one_model_skips_only_that_one(steps: int, name: str) -> None:
    gan = Gan("16-mixed", steps, overflows=((name, 4),))
    result = gan.engine.run(make_data())
    ends = [*range(steps, BATCHES, steps), BATCHES]
    assert gan.log == [(end, one) for end in ends for one in ("critic", "generator") if (one, end) != (name, 4)]
    other = {"critic": "generator", "generator": "critic"}[name]
    assert result.updates_by_optimizer == {name: len(ends) - 1, other: len(ends)}
    assert result.updates == 2 * len(ends) - 1


def test_a_skipped_update_halves_the_one_scale_once() -> None:
    gan, scales = Gan("16-mixed", overflows=(("critic", 1), ("generator", 1), ("critic", 2))), []
    gan.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: scales.append(gan.scale()))
    gan.engine.run(make_data()[:4])
    assert scales == [32.0, 16.0, 16.0, 32.0]


def test_with_one_scale_an_optimizer_may_be_left_out_or_updated_twice() -> None:
    gan = Gan("16-mixed", generator_every=2)
    assert gan.engine.run(make_data()[:4]).updates_by_optimizer == {"critic": 4, "generator": 2}
    assert gan.scale() == 256.0

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        for name in ("critic", "critic", "generator", "critic"):
            loss = generator_loss(engine.model, batch[1]) if name == "generator" else critic_loss(engine.model, *batch)
            engine.backward(loss, optimizer=name)
            assert engine.update(name)

    strategy = SingleDevice("cpu", precision="16-mixed", scaler={"init_scale": 64.0, "growth_interval": 100})
    twice = Engine(step, make_models(), optimizer={"critic": momentum, "generator": momentum}, strategy=strategy)
    assert twice.run(make_data()[:4]).updates_by_optimizer == {"critic": 12, "generator": 4}


# ---------------------------------------------------------------- whose gradient


def test_a_loss_may_be_for_the_parameters_of_one_optimizer_only() -> None:
    models = make_models()
    seen: list[list[bool]] = []

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        for only in ("generator", None):
            engine.backward(generator_loss(engine.model, batch[1]), optimizer=only)
            seen.append([model[0].weight.grad is not None for model in models.values()])  # type: ignore[index]

    Engine(step, models, optimizer={"critic": momentum, "generator": momentum}).run(make_data()[:1])
    assert seen == [[True, False], [True, True]]


def test_frozen_parameters_and_those_a_loss_does_not_reach_get_no_gradient() -> None:
    models = make_models()
    frozen, unreached = nn.Parameter(torch.zeros(1), requires_grad=False), nn.Parameter(torch.zeros(1))
    critic = SGD([*models["critic"].parameters(), frozen, unreached], lr=0.1)

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        engine.backward(critic_loss(engine.model, *batch), optimizer="critic")
        engine.update("critic")

    Engine(step, models, optimizer={"critic": critic, "generator": momentum}).run(make_data())
    assert frozen.grad is None and frozen.item() == unreached.item() == 0.0


def test_an_optimizer_that_has_its_own_way_to_zero_gradients_keeps_it() -> None:
    class Zeroing(SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    models = make_models()

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        engine.backward(critic_loss(engine.model, *batch))
        engine.update("critic")

    engine = Engine(
        step,
        models,
        optimizer={"critic": partial(Zeroing, lr=0.1), "generator": momentum},
    )
    engine.run(make_data())
    assert [torch.count_nonzero(parameter.grad).item() for parameter in models["critic"].parameters()] == [0] * 4


# ---------------------------------------------------------------- stopping, failing, saving


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_saved_after_any_iteration_goes_on_in_new_objects_as_if_it_had_not_been(
    steps: int, precision: str
) -> None:
    full = Gan(precision, steps)
    full.engine.run(make_data(), 2)
    for stop in range(1, 2 * BATCHES):
        first = Gan(precision, steps)
        first.engine.run(make_data(), max_iters=stop)
        second = Gan(precision, steps).load(first.saved())
        result = second.engine.run(make_data(), 2)
        assert_same(second.weights(), full.weights())
        assert first.log + second.log == full.log
        assert result.updates_by_optimizer == full.engine.state.updates_by_optimizer


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_an_error_between_two_updates_does_not_mix_what_is_left_with_the_next_batch(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic was updated, so the batch does not come again; the generator's gradient of it is dropped, loudly."""
    gan = Gan(precision)

    def fail(engine: Engine, batch: Any) -> None:
        if engine.state.iteration == 3 and engine.state.updating == "generator":
            raise Boom

    handle = gan.engine.add_event_handler(Events.UPDATE_STARTED, fail)
    with suppress(Boom), caplog.at_level(logging.WARNING):
        gan.engine.run(make_data())
    assert "left amid a backward or an update" in caplog.text
    assert [parameter.grad for model in gan.models.values() for parameter in model.parameters()] == [None] * 8
    handle.remove()
    result = gan.engine.run(make_data())
    assert (result.iteration, result.updates_by_optimizer) == (7, {"critic": 7, "generator": 6})
    assert (3, "generator") not in gan.log


def test_windows_that_the_epoch_has_cut_are_flushed_for_those_that_have_a_gradient() -> None:
    class Long(list[Any]):
        def __len__(self) -> int:
            return 9

    gan, begun = Gan(steps=4, generator_every=8), []
    gan.engine.add_event_handler(Events.UPDATE_STARTED, lambda engine, batch: begun.append(engine.state.updating))
    assert gan.engine.run(Long(make_data())).updates_by_optimizer == {"critic": 2, "generator": 0}
    assert begun == ["critic", "critic"]


# ---------------------------------------------------------------- what is refused


def test_with_several_optimizers_an_update_says_which() -> None:
    engine = Engine(
        lambda engine, batch: engine.update(), make_models(), optimizer={"critic": momentum, "generator": momentum}
    )
    with pytest.raises(UpdateError, match=r"several optimizers \('critic', 'generator'\): say which"):
        engine.run([1])


@pytest.mark.parametrize("verb", ["update", "backward"])
def test_an_unknown_optimizer_is_refused_with_the_nearest_name(verb: str) -> None:
    def step(engine: Engine, batch: Any) -> None:
        if verb == "update":
            engine.update("critc")
        engine.backward(critic_loss(engine.model, *batch), optimizer="critc")

    engine = Engine(step, make_models(), optimizer={"critic": momentum, "generator": momentum})
    with pytest.raises(UpdateError, match="no optimizer 'critc': did you mean 'critic'"):
        engine.run(make_data())


def test_the_name_of_a_single_optimizer_may_be_left_out() -> None:
    def step(engine: Engine, batch: Any) -> None:
        for name in (None, "critic"):
            engine.backward(critic_loss(engine.model, *batch), optimizer=name)
            engine.update(name)

    engine = Engine(step, make_models(), optimizer={"critic": momentum})
    assert engine.run(make_data()).updates_by_optimizer == {"critic": 14}
