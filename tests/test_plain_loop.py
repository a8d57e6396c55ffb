"""A run equals the ten-line PyTorch loop to the bit, and so does one that was stopped anywhere and goes on.

A stopped run goes on in the same objects or, through their state dictionaries, in new ones.
"""

from __future__ import annotations

import io
import random
from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler
from training import (
    BATCH,
    BATCHES,
    FIRINGS,
    LOADERS,
    REPEATABLE,
    SAMPLES,
    VERBS,
    WORKER_LOADERS,
    Boom,
    Look,
    NumpySampler,
    Samples,
    Training,
    adam,
    assert_equal_to_the_bit,
    fail,
    global_noise,
    interrupt,
    make_net,
    momentum,
    press_ctrl_c,
    random_states,
    run_on,
    seed_everything,
    stop_at,
    terminate,
)

from pellucid.engine import Engine, Events

EVERY_LOADER = LOADERS | WORKER_LOADERS


def plain_loop(loader, optimizer, epochs):
    seed_everything(0)
    model, data = make_net(), EVERY_LOADER[loader]()
    optimizer = optimizer(model.parameters())
    seed_everything(0)
    samples, losses = [], []
    for _ in range(epochs):
        for x, y, index in data:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            samples.append(index.tolist())
            losses.append(loss.item())
    weights = dict(model.state_dict())
    return {"weights": weights, "optimizer": optimizer.state_dict(), "samples": samples, "losses": losses} | {
        "random": random_states()
    }


def outcome_of(training):
    return training.outcome() | {
        "samples": list(training.samples.values()),
        "losses": list(training.losses.values()),
    }


@pytest.mark.parametrize(
    ("loader", "optimizer"),
    [*((loader, momentum) for loader in EVERY_LOADER), ("shuffled", adam), ("two workers", adam)],
)
def test_a_run_equals_the_plain_loop(loader, optimizer):
    plain = plain_loop(loader, optimizer, epochs=2)
    ours = outcome_of(Training(loader, optimizer).run(epochs=2))
    assert_equal_to_the_bit(plain, {name: ours[name] for name in plain})


@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_a_run_whose_step_is_written_in_plain_pytorch_equals_the_plain_loop(optimizer):
    def step(engine, batch):
        x, y, index = batch
        loss = cross_entropy(engine.model(x), y)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        samples.append(index.tolist())
        losses.append(loss.item())

    samples, losses = [], []
    plain = plain_loop("two workers", optimizer, epochs=2)
    seed_everything(0)
    model, data = make_net(), EVERY_LOADER["two workers"]()
    engine = Engine(step, model, optimizer=optimizer(model.parameters()))
    seed_everything(0)
    engine.run(data, max_epochs=2)
    ours = {"weights": dict(model.state_dict()), "optimizer": engine.optimizer.state_dict()}
    assert_equal_to_the_bit(plain, ours | {"samples": samples, "losses": losses, "random": random_states()})
    assert engine.state.updates == 10


# ---------------------------------------------------------------------- stopping is a pause


def iterations_to_stop_in(loader):
    """All ten; the middle of an epoch, its end and the next one's middle where each stop starts worker processes."""
    return (2, 5, 7) if loader in WORKER_LOADERS else range(1, 11)


@cache
def unstopped(loader="shuffled", since=0):
    return Training(loader).run(epochs=2).outcome(since=since)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("place", FIRINGS, ids=str)
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_never_been_stopped(place, verb):
    for firing in range(1, FIRINGS[place] + 1):
        training = stop_at(Training(), place, firing, verb)
        assert run_on(training) == 1 or place is Events.COMPLETED
        assert_equal_to_the_bit(unstopped(), training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize(
    "place", [Events.GET_BATCH_COMPLETED, "before the forward", Events.ITERATION_COMPLETED], ids=str
)
@pytest.mark.parametrize("loader", REPEATABLE)
def test_a_run_over_any_data_that_fails_anywhere_goes_on_as_if_it_had_not(loader, place):
    for firing in range(1, 11):
        training = stop_at(Training(loader), place, firing, fail)
        assert run_on(training) == 1
        assert_equal_to_the_bit(unstopped(loader), training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("verb", [fail, press_ctrl_c], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("place", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, "before the forward"], ids=str)
def test_the_first_batch_of_an_epoch_comes_again_with_the_same_noise(place, verb):
    for firing in (1, 6):
        training = stop_at(Training("global noise"), place, firing, verb)
        assert run_on(training) == 1
        assert_equal_to_the_bit(unstopped("global noise"), training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_generator_that_the_data_shares_with_the_step_goes_on_as_if_it_had_not_been_stopped(verb):
    def draw(training, engine):
        torch.rand(2, generator=training.loader.generator)

    whole = Training("own generator").at("before the forward", draw).run(epochs=2).outcome()
    for firing in range(1, 11):
        training = stop_at(Training("own generator"), Events.ITERATION_COMPLETED, firing, verb)
        assert run_on(training.at("before the forward", draw)) == 1
        assert_equal_to_the_bit(whole, training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("verb", [terminate, press_ctrl_c], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("loader", [*WORKER_LOADERS, "global noise"])
def test_a_run_over_any_data_stopped_between_two_batches_goes_on_as_if_it_had_not(loader, verb):
    for firing in iterations_to_stop_in(loader):
        training = stop_at(Training(loader), Events.ITERATION_COMPLETED, firing, verb)
        assert run_on(training) == 1
        assert_equal_to_the_bit(unstopped(loader), training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_run_stopped_at_every_single_event_goes_on_as_if_it_had_not(verb):
    training = Training()
    stopped = set()
    for place in FIRINGS:
        if place is not Events.STARTED:

            def stop_once(training, engine, place=place):
                here = (place, engine.state.epoch, engine.state.iteration)
                if here not in stopped:
                    stopped.add(here)
                    verb(engine)

            training.at(place, stop_once)
    assert run_on(training) > 40
    assert_equal_to_the_bit(unstopped(), training.outcome())


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("iteration", [2, 5, 7])
def test_a_stop_just_after_the_run_was_taken_up_again_loses_nothing(iteration, verb):
    training = stop_at(Training(), Events.ITERATION_COMPLETED, iteration, terminate)
    stop_at(training, Events.STARTED, (2, 3), verb)
    assert run_on(training) == 3
    assert_equal_to_the_bit(unstopped(), training.outcome())


@pytest.mark.parametrize("loader", [*LOADERS, "two workers", "persistent workers"])
def test_whatever_happens_between_stop_and_going_on_changes_nothing(loader):
    def use_everything():
        Look()(training, training.engine)
        Training(loader, seed=3).run(epochs=1)
        list(training.loader)
        seed_everything(4)

    for firing in (2, 5, 8):
        training = stop_at(Training(loader), Events.ITERATION_COMPLETED, firing, terminate)
        stop_at(training, Events.STARTED, 1, interrupt)
        assert run_on(training, between=use_everything) == 2
        assert_equal_to_the_bit(unstopped(loader), training.outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("loader", ["shuffled", "own generator", "two workers", "persistent workers"])
def test_a_run_in_pieces_equals_the_run_in_one_go(loader):
    for limits in ([{"epochs": 1}], [{"max_iters": n} for n in (1, 3, 5, 6)], [{"max_iters": 4}, {"epochs": 1}]):
        training = Training(loader)
        for limit in limits:
            training.run(**limit)
        assert_equal_to_the_bit(unstopped(loader), training.run(epochs=2).outcome(), f"{limits}: ")


@pytest.mark.parametrize("loader", ["shuffled", "own generator", "two workers", "persistent workers"])
def test_a_run_over_epochs_of_an_explicit_length_stopped_anywhere_goes_on_as_if_it_had_not(loader):
    whole = Training(loader).run(epochs=3, epoch_length=4).outcome()
    for firing in iterations_to_stop_in(loader):
        training = stop_at(Training(loader), Events.ITERATION_COMPLETED, firing, terminate)
        training.run(epochs=3, epoch_length=4)
        assert_equal_to_the_bit(whole, training.run(epochs=3).outcome(), f"stopped at firing {firing}: ")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_run_over_data_that_is_asked_for_and_made_from_random_numbers_goes_on_as_if_it_had_not(verb):
    def asked_for(state):
        return [BATCHES[place] for place in torch.randperm(len(BATCHES))]

    whole = Training(lambda: asked_for).run(epochs=3).outcome(next_epoch=False)
    for firing in range(1, 13):
        training = stop_at(Training(lambda: asked_for), Events.ITERATION_COMPLETED, firing, verb)
        assert run_on(training, epochs=3) == 1
        assert_equal_to_the_bit(whole, training.outcome(next_epoch=False), f"stopped at firing {firing}: ")


@pytest.mark.parametrize(
    "place", [Events.GET_BATCH_COMPLETED, "before the forward", Events.ITERATION_COMPLETED], ids=str
)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_run_over_an_iterator_goes_on_with_the_same_iterator_as_if_it_had_not_been_stopped(verb, place):
    whole = Training(lambda: iter(BATCHES)).run(epochs=1).outcome(next_epoch=False)
    for firing in range(1, 5):
        training = stop_at(Training(lambda: iter(BATCHES)), place, firing, verb)
        assert run_on(training, epochs=1) == 1
        assert_equal_to_the_bit(whole, training.outcome(next_epoch=False), f"stopped at firing {firing}: ")


class Flaky(Sampler):
    """Fails once, at its n-th index, after it has drawn it."""

    def __init__(self, fails_at):
        self.rng, self.drawn, self.fails_at = random.Random(12), 0, fails_at

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for _ in range(SAMPLES):
            index = self.rng.randrange(SAMPLES)
            self.drawn += 1
            if self.drawn == self.fails_at:
                raise Boom
            yield index


class FlakySamples(Samples):
    """Fails once, at the n-th sample it is asked for; its noise comes from a generator of its own, if from no other."""

    def __init__(self, fails_at, noise=None):
        super().__init__(noise or random.Random(2).random)
        self.asked, self.fails_at = 0, fails_at

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == self.fails_at:
            raise Boom
        return super().__getitem__(index)


@pytest.mark.parametrize(
    "make",
    [
        lambda at: DataLoader(FlakySamples(at), BATCH, shuffle=True),
        lambda at: DataLoader(FlakySamples(at), BATCH, shuffle=True, generator=torch.Generator().manual_seed(5)),
        lambda at: DataLoader(FlakySamples(at), BATCH, sampler=NumpySampler()),
        lambda at: DataLoader(Samples(), BATCH, sampler=Flaky(at)),
    ],
    ids=["shuffled", "own generator", "numpy sampler", "the sampler itself"],
)
def test_a_run_whose_data_fails_goes_on_as_if_it_had_not(make):
    whole = Training(lambda: make(0)).run(epochs=2).outcome()
    for at in range(1, 2 * SAMPLES + 1):
        training = Training(lambda at=at: make(at))
        assert run_on(training) == 1
        assert_equal_to_the_bit(whole, training.outcome(), f"failed at sample {at}: ")


def test_a_run_whose_data_fails_in_the_first_batch_of_an_epoch_goes_on_with_the_same_noise():
    for at in (2, 3, SAMPLES + 1, SAMPLES + 2):
        training = Training(lambda at=at: DataLoader(FlakySamples(at, noise=global_noise), BATCH, shuffle=True))
        assert run_on(training) == 1
        assert_equal_to_the_bit(unstopped("global noise"), training.outcome(), f"failed at sample {at}: ")


# ---------------------------------------------------------------------- in new objects


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("loader", [*REPEATABLE, "two workers, global noise", "persistent workers"])
@pytest.mark.parametrize("place", [Events.ITERATION_COMPLETED, "before the forward"], ids=str)
def test_a_run_that_failed_goes_on_in_new_objects_as_if_it_had_not(loader, place):
    for firing in iterations_to_stop_in(loader):
        failed = stop_at(Training(loader), place, firing, fail)
        with pytest.raises(Boom):
            failed.run(epochs=2)
        resumed = Training(loader, seed=1).load(through_a_file(failed.saved())).run(epochs=2)
        done = firing if place is Events.ITERATION_COMPLETED else firing - 1
        assert_equal_to_the_bit(unstopped(loader, since=done), resumed.outcome(), f"failed at firing {firing}: ")


@pytest.mark.parametrize("loader", [*LOADERS, "two workers", "persistent workers"])
@pytest.mark.parametrize("place", [Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED], ids=str)
def test_a_training_saved_while_it_runs_goes_on_in_new_objects_as_the_one_that_was_saved(loader, place):
    checkpoints = []

    def save(training, engine):
        checkpoints.append((engine.state.iteration, through_a_file(training.saved())))

    whole = Training(loader).at(place, save).run(epochs=2)
    assert_equal_to_the_bit(unstopped(loader), whole.outcome())
    for iteration, saved in checkpoints[:-1]:
        if iteration not in (0, *iterations_to_stop_in(loader)):
            continue
        resumed = Training(loader, seed=1).load(saved).run(epochs=2)
        expected = unstopped(loader, since=iteration)
        assert_equal_to_the_bit(expected, resumed.outcome(), f"saved at iteration {iteration}: ")


def test_a_training_that_is_saved_and_loaded_in_every_iteration_ends_as_the_one_that_never_was():
    training = Training("shuffled")
    for iteration in range(1, 10):
        training.run(max_iters=iteration)
        training = Training("shuffled", seed=iteration).load(through_a_file(training.saved()))
    assert_equal_to_the_bit(unstopped(since=9), training.run(epochs=2).outcome())


@pytest.mark.parametrize("new_objects", [False, True], ids=["in the same objects", "in new objects"])
@pytest.mark.parametrize("seeded_by", ["its epoch", "its generator"])
def test_data_that_a_handler_seeds_for_each_epoch_goes_on_as_if_it_had_not_been_stopped(seeded_by, new_objects):
    def make(seed=0):
        generator = torch.Generator()
        if seeded_by == "its epoch":
            sampler = DistributedSampler(Samples(), num_replicas=1, rank=0)
            set_epoch = sampler.set_epoch
        else:
            sampler = RandomSampler(Samples(), generator=generator)
            set_epoch = generator.manual_seed
        training = Training(lambda: DataLoader(Samples(), BATCH, sampler=sampler), seed=seed)
        return training.at(Events.EPOCH_STARTED, lambda training, engine: set_epoch(engine.state.epoch))

    whole = make().run(epochs=3)
    for iteration in range(1, 15):
        stopped = make().run(max_iters=iteration)
        if new_objects:
            stopped = make(seed=1).load(through_a_file(stopped.saved()))
        resumed = stopped.run(epochs=3).outcome(since=iteration, next_epoch=False)
        expected = whole.outcome(since=iteration, next_epoch=False)
        assert_equal_to_the_bit(expected, resumed, f"stopped at iteration {iteration}: ")
