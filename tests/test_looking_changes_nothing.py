"""Looking changes nothing: a training with inner runs ends as the one without, to the bit.

First the promise as users meet it: which inner runs, where, over which data, ending how. Then what single parts owe for
it: modes, gradients, buffers, generators. Last what is refused because it would change something.
"""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from functools import cache, partial

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset
from training import (
    BATCH,
    DATA,
    DEEDS,
    ENDINGS,
    LOADERS,
    STEP_PLACES,
    WORKER_LOADERS,
    Boom,
    Look,
    NoisySamples,
    Samples,
    Training,
    assert_equal_to_the_bit,
    flags,
    make_net,
    momentum,
)

from pellucid.engine import DataError, Engine, Events, RunError

PLACES = (Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED, *STEP_PLACES)


@cache
def alone(loader="shuffled", epochs=2):
    return Training(loader).run(epochs).outcome()


def run_in_which_every_event_fires(training):
    """Run two epochs that stop in every way there is, going on after each stop."""

    def stop(training, engine):
        if engine.state.iteration in done:
            return
        done.add(engine.state.iteration)
        engine.record({"loss": 0.5})
        if engine.state.iteration == 2:
            engine.terminate_epoch()
        elif engine.state.iteration == 4:
            engine.interrupt()
        elif engine.state.iteration == 5:
            raise Boom
        elif engine.state.iteration == 6:
            engine.terminate()

    done = set()
    training.at(Events.ITERATION_COMPLETED, stop)
    while training.engine.state.stop_reason != "completed":
        with suppress(Boom):
            training.run(epochs=2)
    return training


@cache
def alone_with_every_event():
    return run_in_which_every_event_fires(Training()).outcome()


# ---------------------------------------------------------------------- the promise


@pytest.mark.parametrize("place", [*Events, *STEP_PLACES], ids=str)
def test_an_evaluation_at_any_event_and_at_any_place_in_the_step_changes_nothing(place):
    looks = []
    watched = Training().at(place, Look()).at(place, lambda training, engine: looks.append(engine.state.iteration))
    assert_equal_to_the_bit(alone_with_every_event(), run_in_which_every_event_fires(watched).outcome())
    assert looks


@pytest.mark.parametrize("ends", ENDINGS)
@pytest.mark.parametrize("does", DEEDS)
def test_an_inner_run_changes_nothing_whatever_it_does_and_however_it_ends(does, ends):
    watched = Training()
    for place in PLACES:
        watched.at(place, Look(does=does, ends=ends))
    assert_equal_to_the_bit(alone(), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("loader", LOADERS)
def test_an_inner_run_changes_nothing_whatever_it_and_the_outer_run_iterate(loader, data):
    watched = Training(loader)
    for place in (Events.STARTED, Events.EPOCH_COMPLETED, Events.GET_BATCH_COMPLETED, "after the forward"):
        watched.at(place, Look(data))
    assert_equal_to_the_bit(alone(loader), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("ends", ["returns", "raises"])
@pytest.mark.parametrize("loader", WORKER_LOADERS)
def test_an_inner_run_over_the_very_loader_whose_workers_serve_the_outer_run_changes_nothing(loader, ends):
    watched = Training(loader)
    for place in (Events.STARTED, Events.EPOCH_COMPLETED(once=1), Events.ITERATION_COMPLETED(once=(3, 7))):
        watched.at(place, Look(ends=ends))
    assert_equal_to_the_bit(alone(loader), watched.run(epochs=2).outcome())


@pytest.mark.parametrize("does", DEEDS)
def test_looks_inside_looks_inside_looks_change_nothing(does):
    innermost = Look(does=does)
    middle = Look(inside=((Events.EPOCH_STARTED, innermost), ("after the forward", innermost)))
    outermost = Look(does=does, inside=((Events.EPOCH_COMPLETED, middle), ("before the forward", middle)))
    watched = Training().at(Events.EPOCH_COMPLETED, outermost).at("after the forward", middle)
    assert_equal_to_the_bit(alone(), watched.run(epochs=2).outcome())


def test_a_look_in_the_middle_of_an_autocast_region_changes_nothing():
    def run(look):
        training = Training()

        def step(engine, batch):
            with torch.autocast("cpu", torch.bfloat16):
                look(training, engine)
                first = engine.model(batch[0])
                look(training, engine)
                loss = (first + engine.model(batch[0])).square().mean()
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()

        Engine(step, training.model, optimizer=training.engine.optimizer).run(training.loader)
        return training.outcome()

    assert_equal_to_the_bit(run(lambda training, engine: None), run(Look(does="leaves modes changed")))


def test_a_look_leaves_gradients_pending_that_the_users_step_accumulates():
    def run(look):
        training = Training()

        def step(engine, batch):
            nn.functional.cross_entropy(engine.model(batch[0]), batch[1]).backward()
            if engine.state.iteration % 3 == 0:
                engine.optimizer.step()
                engine.optimizer.zero_grad(set_to_none=False)

        engine = Engine(step, training.model, optimizer=training.engine.optimizer)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: look(training, engine))
        engine.run(training.loader, max_epochs=2)
        return training.outcome()

    unwatched = run(lambda training, engine: None)
    for deed in DEEDS:
        assert_equal_to_the_bit(unwatched, run(Look(does=deed)))


def test_the_training_goes_on_as_saved_when_it_is_saved_from_inside_an_inner_run():
    saved = []

    def look_and_save(training, engine):
        def save(inner, batch):
            saved.append(training.saved())

        inner = engine.fork(lambda inner, batch: torch.rand(3))
        inner.add_event_handler(Events.ITERATION_COMPLETED, save)
        inner.run(training.loader)

    for loader in ("global noise", "own generator"):
        whole = Training(loader).at(Events.ITERATION_COMPLETED(once=3), look_and_save).run(epochs=2).outcome(since=3)
        resumed = Training(loader, seed=1).load(saved.pop()).run(epochs=2).outcome()
        assert_equal_to_the_bit(whole, resumed)


def test_the_outer_state_is_the_same_before_and_after_a_look():
    def look(training, engine):
        before = repr(engine.state.snapshot())
        Look(ends="raises", inside=((Events.ITERATION_COMPLETED, Look(ends="terminates")),))(training, engine)
        assert repr(engine.state.snapshot()) == before

    training = Training()
    for place in PLACES:
        training.at(place, look)
    training.run(epochs=2)


def test_an_inner_run_knows_how_deep_it_is_and_what_is_around_it():
    seen = []

    def innermost(engine, batch):
        state = engine.state
        seen.append((state.depth, state.parent.depth, state.parent.parent.iteration, state.parent.parent.parent))

    def middle(engine, batch):
        engine.fork(innermost).run([0])

    trainer = Engine(lambda engine, batch: engine.fork(middle).run([0]))
    trainer.run([0, 0])
    assert seen == [(2, 1, 1, None), (2, 1, 2, None)]


def test_an_inner_training_of_a_copy_trains_the_copy():
    def train_a_copy(training, engine):
        copied = engine.fork(training.step, mode="train", model="copy", optimizer=momentum)
        before = {name: value.clone() for name, value in copied.model.state_dict().items()}
        assert_equal_to_the_bit(before, dict(engine.model.state_dict()))
        copied.run(training.loader, max_epochs=2)
        assert copied.state.updates == 10
        assert not torch.equal(copied.model[3].weight, before["3.weight"])

    watched = Training().at(Events.EPOCH_COMPLETED(once=1), train_a_copy).run(epochs=2)
    assert watched.outcome()["weights"].keys() == alone()["weights"].keys()
    assert_equal_to_the_bit(alone()["weights"], watched.outcome()["weights"])


# ---------------------------------------------------------------------- modes, gradients and buffers


def test_a_module_frozen_by_hand_is_frozen_through_training_and_looking():
    training = Training()
    before, frozen = flags(training.model), {name: value.clone() for name, value in training.model[2].named_buffers()}
    seen = []
    training.at(Events.ITERATION_COMPLETED(every=2), Look())
    training.at(Events.ITERATION_COMPLETED(every=2), lambda training, engine: seen.append(flags(training.model)))
    training.run(epochs=2)
    assert before["2"] is False and before["0.1"] is True
    assert seen == [before] * 5 and flags(training.model) == before
    assert_equal_to_the_bit(frozen, dict(training.model[2].named_buffers()))


@pytest.mark.parametrize("ends", ENDINGS)
@pytest.mark.parametrize("frozen", [(), ("2",), ("", "0", "0.0", "0.1", "0.2", "0.3", "1", "2", "3")])
def test_an_evaluation_on_its_own_leaves_every_flag_as_it_was(frozen, ends):
    training = Training()
    for name, module in training.model.named_modules():
        module.training = name not in frozen
    before = flags(training.model)
    Look(ends=ends)(training, training.engine)
    assert flags(training.model) == before


def test_a_model_handed_over_in_eval_mode_trains_in_train_mode():
    training = Training()
    training.model.eval()
    seen = []
    training.at("before the forward", lambda training, engine: seen.append(all(flags(training.model).values())))
    training.run(epochs=1)
    assert seen == [True] * 5


def test_an_evaluation_sees_a_model_wholly_in_eval_mode_and_makes_no_gradients():
    seen = []

    def step(engine, batch):
        seen.append((any(flags(engine.model).values()), torch.is_grad_enabled()))

    Training().at(Events.ITERATION_COMPLETED, lambda training, engine: engine.fork(step).run([0])).run(epochs=1)
    assert seen == [(False, False)] * 5


class Merging(nn.Linear):
    """Keeps a part of its weight apart while it trains, as adapters do: its own ``train`` merges and splits it."""

    def __init__(self):
        super().__init__(2, 2)
        self.merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_a_module_is_put_back_by_its_own_train_method():
    model = nn.Sequential(Merging(), Merging().eval())
    seen = []

    def step(engine, batch):
        engine.fork(lambda inner, batch: seen.append([part.merged for part in engine.model])).run([0])
        seen.append([part.merged for part in engine.model])

    Engine(step, model, optimizer=momentum).run([0])
    assert seen == [[True, True], [False, True]]


class Odd(nn.Module):
    """Has a module in two places, none in a third, one that is compiled to TorchScript, and its own attributes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
        self.again = self.first
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("no_parameter", None)
        self.register_buffer("no_buffer", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.script = torch.jit.script(nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        self.frozen = nn.BatchNorm1d(2).eval()


def test_every_module_parameter_and_buffer_is_found_that_torch_finds():
    model, found = Odd(), {}

    def step(engine, batch):
        before = {name: module.training for name, module in model.named_modules()}
        values = {name: value.clone() for name, value in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

        def spoil(inner, batch):
            found["flags"] = [name for name, module in model.named_modules() if module.training]
            found["gradients"] = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
            model.train()
            for buffer in model.buffers():
                buffer.zero_()

        engine.fork(spoil).run([0])
        assert before == {name: module.training for name, module in model.named_modules()}
        assert_equal_to_the_bit(values, dict(model.state_dict()))
        assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in model.parameters())

    Engine(step, model, optimizer=momentum).run([0])
    assert found == {"flags": [], "gradients": []}


def test_gradients_come_back_as_the_very_tensors_they_were():
    net = make_net()

    def step(engine, batch):
        net(torch.ones(2, 6)).sum().backward()
        before = [(parameter.grad, parameter.grad.clone()) for parameter in net.parameters()]
        Look("a list", does="takes gradients")(Training(), engine)
        for parameter, (gradient, value) in zip(net.parameters(), before, strict=True):
            assert parameter.grad is gradient
            assert_equal_to_the_bit(gradient, value)

    Engine(step, net, optimizer=momentum).run([0])


def test_buffers_that_a_look_changed_or_replaced_come_back():
    net = make_net()
    before = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}

    def spoil(engine, batch):
        net.train()
        net(torch.randn(4, 6))
        net[2].running_var = torch.zeros(8)
        net[0][1].num_batches_tracked.fill_(7)

    Engine(lambda engine, batch: Engine(spoil, mode="eval").run([0]), net, optimizer=momentum).run([0])
    for name, buffer in net.named_buffers():
        assert buffer is before[name][0]
        assert_equal_to_the_bit(buffer, before[name][1])


def test_a_look_at_a_model_of_its_own_may_change_its_buffers():
    averaged = make_net()

    def update_batch_statistics(engine, batch):
        engine.model.train()
        engine.model(batch[0])

    evaluator = Engine(update_batch_statistics, averaged, mode="eval")
    training = Training().at(Events.EPOCH_COMPLETED, lambda training, engine: evaluator.run(training.loader))
    assert_equal_to_the_bit(alone(), training.run(epochs=2).outcome())
    assert averaged[0][1].num_batches_tracked == 10


# ---------------------------------------------------------------------- generators of the data's own


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self):
        self.rng = numpy.random.default_rng(7)

    def __call__(self):
        return self.rng.normal()


class LateJitter:
    """A transform that makes its generator when it is first asked for."""

    def __init__(self):
        self.rng = None

    def __call__(self):
        self.rng = self.rng or random.Random(8)
        return self.rng.random()


def jitter_of_a_closure():
    generator = torch.Generator().manual_seed(9)
    return lambda scale=1.0: scale * torch.rand((), generator=generator).item()


class NoisyCollate:
    def __init__(self):
        self.state = numpy.random.RandomState(10)

    def __call__(self, samples):
        x, y, index = torch.utils.data.default_collate(samples)
        return x + self.state.rand(), y, index


HIDDEN = {
    "in a transform": lambda: DataLoader(Samples(Jitter()), BATCH),
    "in a closure": lambda: DataLoader(Samples(jitter_of_a_closure()), BATCH),
    "in a partial": lambda: DataLoader(Samples(partial(jitter_of_a_closure(), scale=2.0)), BATCH),
    "in a method": lambda: DataLoader(Samples(random.Random(11).random), BATCH),
    "in a collate function": lambda: DataLoader(Samples(), BATCH, collate_fn=NoisyCollate()),
    "in data sets of data sets": lambda: DataLoader(
        Subset(ConcatDataset([NoisySamples(), Samples(Jitter())]), range(5, 20)), BATCH, shuffle=True
    ),
}


@pytest.mark.parametrize("loader", HIDDEN)
def test_generators_that_the_data_keeps_somewhere_inside_are_put_back(loader):
    watched = Training(HIDDEN[loader])
    for place in (Events.STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED):
        watched.at(place, Look())
    assert_equal_to_the_bit(alone(HIDDEN[loader]), watched.run(epochs=2).outcome())


def test_a_generator_that_the_data_makes_during_a_look_does_not_keep_the_others_from_being_put_back():
    def loader():
        return DataLoader(Samples(LateJitter()), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))

    watched = Training(loader).at(Events.STARTED, Look()).run(epochs=2)
    assert watched.samples == Training(loader).run(epochs=2).samples


# ---------------------------------------------------------------------- what is refused


def test_an_engine_started_inside_itself_is_refused_and_the_outer_run_goes_on():
    refused = []

    def start_again(training, engine):
        with pytest.raises(RunError, match=r"running already.*engine\.fork\(step\)"):
            engine.run(training.loader, max_epochs=9)
        refused.append(engine.state.iteration)

    watched = Training()
    for place in [*Events, *STEP_PLACES]:
        watched.at(place, start_again)
    assert_equal_to_the_bit(alone_with_every_event(), run_in_which_every_event_fires(watched).outcome())
    assert len(refused) > 60


def test_an_engine_started_again_from_a_run_inside_it_is_refused():
    def start_again(training, engine):
        inner = engine.fork(lambda inner, batch: engine.run(training.loader))
        with pytest.raises(RunError, match="running already"):
            inner.run([0])
        inner = engine.fork(lambda inner, batch: inner.run([0]))
        with pytest.raises(RunError, match="running already"):
            inner.run([0])

    watched = Training().at(Events.ITERATION_COMPLETED, start_again).run(epochs=2)
    assert_equal_to_the_bit(alone(), watched.outcome())


@pytest.mark.parametrize("epochs_data", [lambda batches: batches, lambda batches: lambda state: batches])
def test_the_iterator_that_the_outer_run_is_consuming_is_refused_and_the_outer_run_goes_on(epochs_data):
    batches = iter(DataLoader(Samples(), BATCH))

    def consume(training, engine):
        for data in (batches, lambda state: batches):
            with pytest.raises(DataError, match="being consumed by the run around this one"):
                engine.fork(lambda inner, batch: None).run(data)

    training = Training().at("before the forward", consume).run(epochs=1, data=epochs_data(batches))
    assert list(training.samples.values()) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13]]


def test_data_that_hands_out_the_iterator_which_the_outer_run_is_consuming_is_refused():
    class Stream:
        def __init__(self):
            self.batches = iter(DataLoader(Samples(), BATCH))

        def __iter__(self):
            return self.batches

    stream = Stream()

    def consume(training, engine):
        with pytest.raises(DataError, match="being consumed by the run around this one"):
            engine.fork(lambda inner, batch: None).run(stream)

    assert len(Training().at("before the forward", consume).run(epochs=1, data=stream).samples) == 5


INNER_TRAININGS = {
    "a fork": lambda engine: engine.fork(lambda inner, batch: None, mode="train", optimizer=momentum),
    "an engine of the same model": lambda engine: Engine(lambda inner, batch: None, engine.model, optimizer=momentum),
    "a part of the model": lambda engine: Engine(lambda inner, batch: None, engine.model[0], optimizer=momentum),
    "a model around it": lambda engine: Engine(
        lambda inner, batch: None, nn.ModuleList([engine.model, nn.ReLU()]), optimizer=momentum
    ),
    "its parameters": lambda engine: Engine(
        lambda inner, batch: None, nn.ParameterList(engine.model.parameters()), optimizer=momentum
    ),
    "its optimizer": lambda engine: Engine(lambda inner, batch: None, optimizer=engine.optimizer),
}


@pytest.mark.parametrize("kind", INNER_TRAININGS)
def test_an_inner_training_of_the_model_in_training_is_refused_and_the_outer_run_goes_on(kind):
    def train(training, engine):
        with pytest.raises(RunError, match=r'trains the model of the run around it.*model="copy"'):
            INNER_TRAININGS[kind](engine).run(training.loader)

    watched = Training()
    for place in PLACES:
        watched.at(place, train)
    assert_equal_to_the_bit(alone(), watched.run(epochs=2).outcome())
