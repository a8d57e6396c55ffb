"""Accumulation windows equal the plain loop that knows their true sizes; stopping and looking change nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from updating import (
    DATA,
    EPOCHS,
    STEP_PLACES,
    Batch,
    Boom,
    Stated,
    Updating,
    assert_same,
    make_batches,
    make_net,
    momentum,
    train_by_hand,
    windows_of,
)

from pellucid.engine import CheckpointError, Engine, Events, UpdateError

SIZES = [(count, steps) for count in (5, 6, 7) for steps in (1, 2, 3, 4)]
KNOWN = "a list"


@cache
def unstopped(count: int, steps: int, kind: str, **options: Any) -> dict[str, Any]:
    return Updating(steps, **options).run(DATA[kind](count)).outcome()


# ---------------------------------------------------------------- the plain loop


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize(("count", "steps"), SIZES)
def test_windows_equal_the_plain_loop_that_knows_their_true_sizes(count: int, steps: int, kind: str) -> None:
    windows, data = windows_of(count, steps, kind), DATA[kind](count)
    by_hand = train_by_hand(make_batches(count) if kind == "a callable" else data, windows)
    # a window that ends before one could know it is divided by the full size first, and corrected at the update
    cut = kind != KNOWN and {len(window) for window in windows} != {steps}
    assert_same(unstopped(count, steps, kind), by_hand, tolerance=1e-6 if cut else 0.0)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_full_windows_of_data_of_unknown_length_equal_the_plain_loop_to_the_bit(count: int) -> None:
    steps = {5: 5, 6: 3, 7: 7}[count]
    assert_same(unstopped(count, steps, "a callable"), train_by_hand(make_batches(count), windows_of(count, steps)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_shuffled_loader_with_dropout_equals_the_plain_loop_to_the_bit(steps: int, workers: int) -> None:
    inputs, targets = make_batches(1, sizes=(13,))[0]
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2, shuffle=True, num_workers=workers)
    assert_same(Updating(steps).run(loader).outcome(), train_by_hand(loader, windows_of(7, steps)))


def test_six_equal_batches_in_windows_of_four_give_both_updates_the_gradient_of_one_batch() -> None:
    weight = nn.Linear(1, 1, bias=False)
    gradients = []

    def step(engine: Engine, batch: Tensor) -> None:
        engine.backward(engine.model(batch).mean())
        engine.update()

    engine = Engine(step, weight, optimizer=partial(SGD, lr=0.1), gradient_accumulation_steps=4)
    engine.add_event_handler(Events.UPDATE_STARTED, lambda engine, batch: gradients.append(weight.weight.grad.item()))
    engine.run([torch.ones(2, 1)] * 6)
    assert gradients == [1.0, 1.0]


def test_the_step_is_told_when_a_window_ends() -> None:
    seen: list[Any] = []

    def step(engine: Engine, batch: Batch) -> None:
        engine.backward(mse_loss(engine.model(batch[0]), batch[1]))
        seen.append((engine.state.update_due, engine.update(), engine.state.updates))

    engine = Engine(step, make_net(), optimizer=momentum, gradient_accumulation_steps=2)
    assert not engine.state.update_due
    for data in (make_batches(5), lambda state: iter(make_batches(5))):
        seen.clear()
        engine.reset()
        engine.run(data)
        assert seen == [(False, False, 0), (True, True, 1), (False, False, 1), (True, True, 2), (True, True, 3)]
        assert not engine.state.update_due


def test_without_accumulation_every_batch_ends_a_window_and_an_evaluation_has_none() -> None:
    due: list[bool] = []
    step = lambda engine, batch: due.append(engine.state.update_due)  # noqa: E731
    Engine(step, make_net(), optimizer=momentum).run([1])
    Engine(step, make_net(), mode="eval").run([1])
    assert due == [True, False]


# ---------------------------------------------------------------- weights

TOKENS = (5, 1, 12, 3)
WEIGHTS: dict[str, Callable[[Batch], Any]] = {
    "an int": lambda batch: len(batch[0]),
    "a float": lambda batch: float(len(batch[0])),
    "a whole tensor": lambda batch: torch.tensor(len(batch[0])),
    "a tensor": lambda batch: torch.tensor(float(len(batch[0]))),
}


def train_on_whole_windows(batches: list[Batch], windows: list[range]) -> dict[str, Any]:
    """Train with one batch for each window, made of all that is in it."""
    merged = [
        tuple(torch.cat(parts) for parts in zip(*(batches[i] for i in window), strict=True)) for window in windows
    ]
    outcome = train_by_hand(merged, windows_of(len(merged), 1), dropout=0)
    outcome["updated in"] = [epoch * len(batches) + window[-1] + 1 for epoch in range(EPOCHS) for window in windows]
    return outcome


@pytest.mark.parametrize("kind", ["a list", "a callable"])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("count", "steps"), SIZES)
def test_with_weights_the_gradient_is_the_mean_over_all_items_of_a_window(
    count: int, steps: int, weight: str, kind: str
) -> None:
    batches = make_batches(count, TOKENS)
    data = batches if kind == "a list" else lambda state: iter(batches)
    weighted = Updating(steps, dropout=0, weight=WEIGHTS[weight]).run(data).outcome()
    assert_same(weighted, train_on_whole_windows(batches, windows_of(count, steps)), tolerance=1e-6)


def test_equal_weights_change_nothing_but_the_rounding() -> None:
    weighted = Updating(steps=3, weight=lambda batch: 7).run(make_batches(7)).outcome()
    assert_same(weighted, unstopped(7, 3, KNOWN), tolerance=1e-6)


def test_a_batch_without_items_may_come_first_and_adds_nothing() -> None:
    batches = make_batches(4)
    items = iter([0, 3, 3, 0] * EPOCHS)
    training = Updating(steps=2, dropout=0, weight=lambda batch: torch.tensor(next(items))).run(batches)
    assert_same(training.outcome()["net"], train_by_hand(batches[1:3], windows_of(2, 1), dropout=0)["net"], 1e-6)


# ---------------------------------------------------------------- stopping


def stop_by(deed: str) -> Callable[[Updating, Engine], None]:
    def act(training: Updating, engine: Engine) -> None:
        if deed == "terminate":
            engine.terminate()
        elif deed == "interrupt":
            engine.interrupt()
        else:
            raise Boom if deed == "error" else KeyboardInterrupt

    return act


def at_iteration(iteration: int, action: Callable[[Updating, Engine], None]) -> Callable[[Updating, Engine], None]:
    """Do it once, in this iteration."""
    left = [iteration]

    def act(training: Updating, engine: Engine) -> None:
        if left == [engine.state.iteration]:
            left.clear()
            action(training, engine)

    return act


def run_and_catch(training: Updating, data: Any, **limits: Any) -> None:
    with suppress(Boom, KeyboardInterrupt):
        training.run(data, **limits)
    assert [parameter.grad for parameter in training.net.parameters()] == [None] * 4


@pytest.mark.parametrize("renewed", [False, True], ids=["in the same engine", "in new objects"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("kind", DATA)
def test_a_run_stopped_after_any_iteration_goes_on_as_if_it_had_not_been(
    kind: str, weighted: bool, renewed: bool
) -> None:
    options: Any = {"weight": WEIGHTS["an int"]} if weighted else {}
    deeds = itertools.cycle(["terminate", "error", "interrupt", "Ctrl-C", "terminate"])
    for count, steps in [(5, 2), (7, 3), (6, 4)]:
        for iteration in range(1, EPOCHS * count):
            training = Updating(steps, **options)
            training.at(Events.ITERATION_COMPLETED, at_iteration(iteration, stop_by(next(deeds))))
            run_and_catch(training, DATA[kind](count))
            assert training.engine.state.iteration == iteration
            if renewed:
                training = Updating(steps, **options).load(training.saved())
                torch.manual_seed(99)
            assert_same(training.run(DATA[kind](count)).outcome(), unstopped(count, steps, kind, **options))


@pytest.mark.parametrize("place", [*STEP_PLACES, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED,
                                   Events.BACKWARD_COMPLETED, Events.UPDATE_COMPLETED], ids=str)  # fmt: skip
@pytest.mark.parametrize("deed", ["terminate", "interrupt"])
def test_a_stop_that_is_asked_for_at_any_place_changes_nothing(place: Any, deed: str) -> None:
    alone = unstopped(7, 3, KNOWN)
    for iteration in range(1, EPOCHS * 7):
        training = Updating(steps=3).at(place, at_iteration(iteration, stop_by(deed)))
        run_and_catch(training, DATA[KNOWN](7))
        assert_same(training.run(DATA[KNOWN](7)).outcome(), alone)


@pytest.mark.parametrize("place", [*STEP_PLACES, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED,
                                   Events.BACKWARD_COMPLETED, Events.UPDATE_COMPLETED], ids=str)  # fmt: skip
@pytest.mark.parametrize(("count", "steps", "kind"), [(3, 1, KNOWN), *((5, 2, kind) for kind in DATA), (7, 3, KNOWN)])
def test_after_an_error_at_any_place_nothing_is_lost_and_nothing_is_added_twice(
    count: int, steps: int, kind: str, place: Any
) -> None:
    alone = unstopped(count, steps, kind, dropout=0)
    ways = itertools.cycle([("error", False), ("Ctrl-C", True), ("error", True), ("Ctrl-C", False), ("error", False)])
    for iteration in [*range(1, EPOCHS * count + 1)] * 2:
        deed, renewed = next(ways)
        training = Updating(steps, dropout=0).at(place, at_iteration(iteration, stop_by(deed)))
        run_and_catch(training, DATA[kind](count))
        if renewed:
            training = Updating(steps, dropout=0).load(training.saved())
        outcome = training.run(DATA[kind](count)).outcome()
        if place in ("after the backward", Events.BACKWARD_COMPLETED):
            outcome["updated in"] = alone["updated in"]  # an update that is owed is made when the run goes on
        assert_same(outcome, alone)


@pytest.mark.parametrize("steps", [1, 3])
def test_an_update_that_an_error_has_cut_is_in_no_later_one(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """A handler of UPDATE_STARTED may have changed the gradients already. A window of one batch is repeated."""
    batches = make_batches(6)
    training = Updating(steps, dropout=0).at(Events.UPDATE_STARTED, at_iteration(3, stop_by("error")))
    run_and_catch(training, batches)
    training.run(batches, 1)
    trained_on = batches[3:] if steps == 3 else batches
    by_hand = train_by_hand(trained_on, windows_of(len(trained_on), steps), dropout=0, epochs=1)
    assert_same(training.outcome()["net"], by_hand["net"])
    assert ("that will not come again: 3" in caplog.text) == (steps == 3)


def test_a_second_backward_of_a_batch_that_fails_after_its_update_leaves_no_gradient() -> None:
    def step(engine: Engine, batch: Batch) -> None:
        for _ in range(2):
            engine.backward(mse_loss(engine.model(batch[0]), batch[1]))
            if engine.state.updates == 0:
                engine.update()
        raise Boom

    net = make_net()
    engine = Engine(step, net, optimizer=momentum)
    with suppress(Boom):
        engine.run(make_batches(2))
    assert engine.state.iteration == engine.state.updates == 1
    assert [parameter.grad for parameter in net.parameters()] == [None] * 4


def test_an_error_inside_a_backward_drops_what_it_may_have_been_half_added_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of the window {1, 2, 3} the third batch fails; it comes again, and makes the update alone."""
    batches, failing = make_batches(6), [3]

    def step(engine: Engine, batch: Batch) -> None:
        loss = mse_loss(engine.model(batch[0]), batch[1])
        if failing == [engine.state.iteration]:
            failing.clear()
            loss.register_hook(fail)
        engine.backward(loss)
        engine.update()

    def fail(gradient: Tensor) -> Tensor:
        raise Boom

    net = make_net(dropout=0)
    engine = Engine(step, net, optimizer=momentum, gradient_accumulation_steps=3)
    with suppress(Boom):
        engine.run(batches)
    assert "that will not come again: 2" in caplog.text
    assert engine.run(batches, 1).updates == 2
    by_hand = train_by_hand(batches[2:], [range(1), range(1, 4)], dropout=0, epochs=1)
    assert_same(net.state_dict(), by_hand["net"], tolerance=1e-6)


def test_without_windows_a_failing_batch_takes_no_gradient_along_that_was_there_before_its_backward() -> None:
    """A user may add up gradients by hand; what a batch has added that comes again cannot be told from them."""
    net = nn.Linear(1, 1, bias=False)
    calls = []

    def step(engine: Engine, batch: Tensor) -> None:
        calls.append(batch)
        if len(calls) == 2:
            raise Boom
        engine.backward(engine.model(batch).mean())
        if len(calls) == 4:
            raise Boom

    engine = Engine(step, net, optimizer=partial(SGD, lr=0.1))
    for iterations, gradient in [(2, 1.0), (2, 2.0), (3, None)]:
        with suppress(Boom):
            engine.run([torch.ones(1, 1)] * 3, max_iters=iterations)
        assert (None if net.weight.grad is None else net.weight.grad.item()) == gradient


# ---------------------------------------------------------------- saving


EVENTS_OF_A_RUN = [
    event
    for event in Events
    if event.name
    not in (
        "EXCEPTION_RAISED",
        "TERMINATE",
        "TERMINATE_SINGLE_EPOCH",
        "INTERRUPT",
        "METRICS_RECORDED",
        "UPDATE_STARTED",
    )
]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("event", EVENTS_OF_A_RUN, ids=str)
@pytest.mark.parametrize("kind", [KNOWN, "a callable"])
def test_a_run_saved_at_any_event_goes_on_in_new_objects_as_if_it_had_not_been(
    kind: str, event: Events, precision: str
) -> None:
    options: Any = {"dropout": 0, "precision": precision}
    for count, steps in [(5, 1), (5, 2)]:
        alone = unstopped(count, steps, kind, **options)
        files: list[bytes] = []
        training = Updating(steps, **options)
        training.at(event, lambda training, engine, files=files: files.append(training.saved()))
        assert_same(training.run(DATA[kind](count)).outcome(), alone)
        assert files
        for file in files:
            again = Updating(steps, **options).load(file)
            outcome = again.run(DATA[kind](count)).outcome()
            outcome["updated in"] = alone["updated in"]  # saved amid an update, it is not noted yet or made afterwards
            assert_same(outcome, alone)


def test_a_window_saved_by_an_engine_with_other_windows_is_finished_first() -> None:
    training = Updating(steps=3, dropout=0, weight=WEIGHTS["an int"])
    batches = make_batches(6, TOKENS)
    file = training.run(batches, None, max_iters=2).saved()
    again = Updating(steps=1, dropout=0).load(file).run(batches, 1).outcome()
    windows = [range(2), range(2, 3), range(3, 4), range(4, 5), range(5, 6)]
    merged = [tuple(torch.cat(parts) for parts in zip(*(batches[i] for i in w), strict=True)) for w in windows]
    by_hand = train_by_hand(merged, windows_of(5, 1), dropout=0, epochs=1)
    assert_same(again["net"], by_hand["net"], tolerance=1e-6)


def test_gradients_that_do_not_fit_the_optimizer_are_refused_before_anything_is_changed() -> None:
    saved = Updating(steps=3).run(make_batches(3), None, max_iters=2).engine.state_dict()
    wider = nn.Linear(5, 1)
    engine = Engine(lambda engine, batch: None, wider, optimizer=momentum, gradient_accumulation_steps=3)
    with pytest.raises(CheckpointError, match=r"gradients .* do not fit"):
        engine.load_state_dict(saved)
    assert engine.state.iteration == 0


# ---------------------------------------------------------------- inner runs


def evaluate(training: Updating, outer: Engine) -> Engine:
    return outer.fork(lambda engine, batch: engine.model(batch[0]))


def evaluate_with_gradients(training: Updating, outer: Engine) -> Engine:
    def step(engine: Engine, batch: Batch) -> None:
        with torch.enable_grad():
            mse_loss(engine.model(batch[0]), batch[1]).backward()

    return outer.fork(step)


def train_a_copy(training: Updating, outer: Engine) -> Engine:
    def step(engine: Engine, batch: Batch) -> None:
        engine.backward(mse_loss(engine.model(batch[0]), batch[1]))
        engine.update()

    return outer.fork(step, mode="train", model="copy", optimizer=momentum, gradient_accumulation_steps=3)


def train_a_copy_with_other_windows(training: Updating, outer: Engine) -> Engine:
    """Evaluate within, so that there are three windows and evaluations one in the other."""
    inner = train_a_copy(training, outer)
    inner.add_event_handler(Events.BACKWARD_COMPLETED, lambda engine, batch: evaluate(training, engine).run([batch]))
    return inner


INNER = [evaluate, evaluate_with_gradients, train_a_copy, train_a_copy_with_other_windows]


@pytest.mark.parametrize("place", [*STEP_PLACES, Events.BACKWARD_COMPLETED, Events.UPDATE_STARTED,
                                   Events.ITERATION_COMPLETED], ids=str)  # fmt: skip
@pytest.mark.parametrize("ends", ["returns", "terminate", "interrupt", "error", "Ctrl-C"])
@pytest.mark.parametrize("inner", INNER)
def test_an_inner_run_at_any_place_does_not_touch_the_window(
    inner: Callable[[Updating, Engine], Engine], ends: str, place: Any
) -> None:
    def look(training: Updating, outer: Engine) -> None:
        engine = inner(training, outer)
        if ends != "returns":
            engine.add_event_handler(
                Events.ITERATION_COMPLETED(once=2), lambda one, batch: stop_by(ends)(training, one)
            )
        with suppress(Boom, KeyboardInterrupt):
            engine.run(make_batches(3))
        looks.append(engine.state.stop_reason)

    looks: list[str | None] = []
    for kind in (KNOWN, "a callable") if ends == "returns" else (KNOWN,):
        assert_same(Updating(3).at(place, look).run(DATA[kind](5)).outcome(), unstopped(5, 3, kind))
    assert len(looks) >= EPOCHS * 2


# ---------------------------------------------------------------- limits


def test_with_an_explicit_epoch_length_windows_end_with_the_epoch_and_the_data_goes_on() -> None:
    stream = [*windows_of(5, 2), *(range(w.start + 5, w.stop + 5) for w in windows_of(5, 2))]
    by_hand = train_by_hand(make_batches(10), stream, epochs=1)
    for data in (make_batches(10), (batch for batch in make_batches(10)), Stated(make_batches(10), 3)):
        assert_same(Updating(steps=2).run(data, epoch_length=5).outcome(), by_hand)


@pytest.mark.parametrize("kind", DATA)
def test_a_limit_of_iterations_in_mid_window_is_a_pause(kind: str) -> None:
    alone = unstopped(7, 3, kind)
    for first in range(1, EPOCHS * 7):
        training = Updating(steps=3).run(DATA[kind](7), None, max_iters=first)
        assert training.engine.state.iteration == first
        assert_same(training.run(DATA[kind](7)).outcome(), alone)


@pytest.mark.parametrize("kind", DATA)
def test_an_epoch_ended_in_mid_window_flushes_it(kind: str) -> None:
    """The window {3} of the first epoch, and in the second one all seven batches."""
    training = Updating(steps=2).at(
        Events.ITERATION_COMPLETED, at_iteration(3, lambda _, engine: engine.terminate_epoch())
    )
    training.at(Events.EPOCH_COMPLETED, lambda training, engine: seen.append(list(training.updated_in)))
    seen: list[list[int]] = []
    training.run(DATA[kind](7))
    assert seen[0] == [2, 3]
    if kind == KNOWN:
        assert seen[1] == [2, 3, 5, 7, 9, 10]
    training.outcome()


def test_an_epoch_ended_in_mid_window_gives_its_update_the_mean_of_what_is_in_it() -> None:
    batches = make_batches(7)
    training = Updating(steps=4, dropout=0)
    training.at(Events.ITERATION_COMPLETED, at_iteration(3, lambda _, engine: engine.terminate_epoch()))
    once = training.run(batches, 1).outcome()
    assert_same(once["net"], train_by_hand(batches[:3], [range(3)], dropout=0, epochs=1)["net"], tolerance=1e-6)


def test_reset_forgets_an_unfinished_window() -> None:
    training = Updating(steps=3, dropout=0).run(make_batches(6), None, max_iters=2)
    training.engine.reset()
    training.run(make_batches(6), 1)
    assert_same(training.outcome()["net"], train_by_hand(make_batches(6), windows_of(6, 3), 0, epochs=1)["net"])


# ---------------------------------------------------------------- looking one batch ahead


class Counted:
    """Hands out batches, and notes how many it has handed out when each step begins."""

    def __init__(self, count: int) -> None:
        self.batches, self.drawn = make_batches(count), 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.drawn += 1
            yield batch


class CountedWithLength(Counted):
    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize(
    ("make", "steps", "limits", "ahead"),
    [
        (Counted, 2, {}, 1),
        (Counted, 1, {}, 0),
        (Counted, 2, {"epoch_length": 4}, 0),
        (CountedWithLength, 2, {}, 0),
    ],
)
def test_only_windows_in_data_of_unknown_length_look_one_batch_ahead(
    make: Any, steps: int, limits: dict[str, int], ahead: int
) -> None:
    data, seen = make(4), []
    Updating(steps).at("before the forward", lambda training, engine: seen.append(data.drawn)).run(data, 1, **limits)
    assert seen == [min(place + ahead, 4) for place in (1, 2, 3, 4)]


class Augmented(IterableDataset[Batch]):
    """A stream whose batches are changed at random: by the global generators, or one of its own."""

    def __init__(self, source: str) -> None:
        self.source, self.own, self.numpy = source, random.Random(3), numpy.random.default_rng(4)

    def noise(self) -> float:
        if self.source == "its own generators":
            return self.own.random() + float(self.numpy.random())
        return random.random() + float(numpy.random.rand()) + torch.rand(()).item()

    def __iter__(self) -> Iterator[Batch]:
        for x, y in make_batches(7):
            yield x + self.noise(), y


AUGMENTED: dict[str, Callable[[], Any]] = {
    "its own generators": lambda: DataLoader(Augmented("its own generators"), batch_size=None),
    "global generators": lambda: DataLoader(Augmented("global generators"), batch_size=None),
    "a callable": lambda: lambda state: iter(Augmented("global generators")),
    "two workers": lambda: DataLoader(Augmented("global generators"), batch_size=None, num_workers=2),
    "two workers, shuffled": lambda: DataLoader(
        TensorDataset(*make_batches(1, sizes=(13,))[0]), batch_size=2, shuffle=True, num_workers=2
    ),
}


def seed() -> None:
    for one in (random.seed, numpy.random.seed, torch.manual_seed):
        one(5)


def make_augmented(kind: str) -> tuple[Updating, Any]:
    """Return a training and its data; where the data has generators of its own the step draws from them too."""
    training, data = Updating(steps=3), AUGMENTED[kind]()
    if kind == "its own generators":
        training.at("before the forward", lambda training, engine: data.dataset.noise())
    return training, data


@cache
def unstopped_with_augmentation(kind: str) -> dict[str, Any]:
    training, data = make_augmented(kind)
    seed()
    return training.run(data).outcome()


@pytest.mark.parametrize("renewed", [False, True], ids=["in the same engine", "in new objects"])
@pytest.mark.parametrize("kind", AUGMENTED)
def test_a_stop_between_random_batches_of_which_one_is_drawn_ahead_is_exact(kind: str, renewed: bool) -> None:
    alone = unstopped_with_augmentation(kind)
    has_workers = "workers" in kind
    for iteration in (2, 6, 8) if has_workers else range(1, EPOCHS * 7):
        training, data = make_augmented(kind)
        training.at(Events.ITERATION_COMPLETED, at_iteration(iteration, stop_by(("error", "terminate")[iteration % 2])))
        seed()
        run_and_catch(training, data)
        if renewed:
            file = training.saved()
            training, data = make_augmented(kind)
            training.load(file)
        assert_same(training.run(data).outcome(), alone)


@pytest.mark.parametrize("kind", ["its own generators", "global generators", "a callable"])
def test_a_random_batch_whose_step_failed_comes_again_the_same_and_so_does_the_one_behind_it(kind: str) -> None:
    def train(*errors: int) -> dict[str, Any]:
        training, data = Updating(steps=3, dropout=0), AUGMENTED[kind]()
        for iteration in errors:
            training.at("after the forward", at_iteration(iteration, stop_by("error")))
        seed()
        for _ in errors:
            run_and_catch(training, data)
        return training.run(data).outcome()

    assert_same(train(2, 6, 7, 8), train())


@pytest.mark.parametrize("place", [*STEP_PLACES, Events.GET_BATCH_COMPLETED, Events.ITERATION_COMPLETED], ids=str)
@pytest.mark.parametrize("deed", ["terminate", "error"])
def test_an_iterator_that_can_be_gone_through_once_loses_no_batch_to_a_stop(deed: str, place: Any) -> None:
    by_hand = train_by_hand(make_batches(7), windows_of(7, 7), dropout=0, epochs=1)
    for iteration in range(1, 8):
        data = iter(make_batches(7))
        training = Updating(steps=7, dropout=0).at(place, at_iteration(iteration, stop_by(deed)))
        run_and_catch(training, data, epochs=1)
        training.run(data, 1)
        assert_same(training.outcome()["net"], by_hand["net"])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2", None])
def test_a_window_has_a_whole_number_of_batches(steps: Any) -> None:
    with pytest.raises(UpdateError, match=f"gradient_accumulation_steps must be a whole number .* got {steps!r}"):
        Engine(lambda engine, batch: None, make_net(), optimizer=momentum, gradient_accumulation_steps=steps)


def test_a_plain_optimizer_step_is_refused_inside_windows() -> None:
    training = Updating(steps=2).at("after the backward", lambda training, engine: engine.optimizer.step())
    with pytest.raises(UpdateError, match=r"optimizer\.step\(\) was called by the step itself.*engine\.update\(\)"):
        training.run(make_batches(2))


@pytest.mark.parametrize("weight", [0, -1, 0.0, float("nan")])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_weight_is_more_than_nothing(steps: int, weight: float) -> None:
    with pytest.raises(UpdateError, match=f"weight= is how many items .* got {weight!r}"):
        Updating(steps, weight=lambda batch: weight).run(make_batches(2))


@pytest.mark.parametrize("weights", [[3, None], [None, 3]])
def test_a_window_has_weights_in_all_its_batches_or_in_none(weights: list[Any]) -> None:
    left = iter(weights)
    with pytest.raises(UpdateError, match="some batches of this accumulation window have a weight and some have none"):
        Updating(steps=2, weight=lambda batch: next(left)).run(make_batches(2))


def test_a_batch_has_one_weight() -> None:
    def backward_again(training: Updating, engine: Engine) -> None:
        engine.backward(training.net[0].weight.sum(), weight=4)

    training = Updating(steps=2, weight=lambda batch: 3).at("after the backward", backward_again)
    with pytest.raises(UpdateError, match="weight=3 and then with weight=4 for the same batch"):
        training.run(make_batches(2))


def test_two_losses_of_one_batch_are_added_and_count_as_one_batch() -> None:
    def step(engine: Engine, batch: Batch) -> None:
        loss = mse_loss(engine.model(batch[0]), batch[1])
        engine.backward(loss / 4)
        engine.backward(mse_loss(engine.model(batch[0]), batch[1]) * 3 / 4)
        engine.update()

    net = make_net(dropout=0)
    Engine(step, net, optimizer=momentum, gradient_accumulation_steps=3).run(make_batches(7), EPOCHS)
    by_hand = train_by_hand(make_batches(7), windows_of(7, 3), dropout=0)
    assert_same(net.state_dict(), by_hand["net"], tolerance=1e-6)


def test_batches_that_add_no_gradient_are_not_in_the_mean() -> None:
    def step(engine: Engine, batch: Batch) -> None:
        if engine.state.epoch_iteration != 2:
            engine.backward(mse_loss(engine.model(batch[0]), batch[1]))
        if engine.state.update_due:
            engine.update()

    net, batches = make_net(dropout=0), make_batches(4)
    Engine(step, net, optimizer=momentum, gradient_accumulation_steps=4).run(batches)
    by_hand = train_by_hand([batches[0], *batches[2:]], [range(3)], dropout=0, epochs=1)
    assert_same(net.state_dict(), by_hand["net"], tolerance=1e-6)


def test_an_update_without_any_gradient_is_an_error() -> None:
    engine = Engine(
        lambda engine, batch: engine.update(), make_net(), optimizer=momentum, gradient_accumulation_steps=2
    )
    with pytest.raises(UpdateError, match=r"none of its parameters has a gradient.*engine\.backward\(loss\) first"):
        engine.run(make_batches(2))
