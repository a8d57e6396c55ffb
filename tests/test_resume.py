"""Stopping changes nothing: stopped anywhere and resumed in new objects, a run ends the same to the bit."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from resuming import (
    ITERATIONS,
    Training,
    differences,
    loader_with_generator,
    loader_with_workers,
    plain_loader,
    stateful_loader,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pellucid.engine import CheckpointError, Engine, Events, LimitError, RunError, resume, save_checkpoint
from pellucid.handlers import Checkpoint, EarlyStopping, LRSchedule

NEVER = Events.ITERATION_COMPLETED(once=10**6)
LOADERS = {
    "plain": plain_loader,
    "workers": loader_with_workers,
    "own generator": loader_with_generator,
    "stateful": stateful_loader,
}


def stop(training: Training, iteration: int, how: str) -> None:
    """Run until the iteration and stop there."""

    @training.engine.on(Events.ITERATION_COMPLETED(once=iteration))
    def end(engine: Engine, batch: Any) -> None:
        if how == "error":
            raise KeyError("a handler of the user's")
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        engine.terminate()

    if how == "terminate":
        training.run()
    else:
        with pytest.raises(KeyError if how == "error" else KeyboardInterrupt):
            training.run()


@functools.cache
def undisturbed(loader: str) -> tuple[dict[str, Any], list[int]]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), NEVER, make_loader=LOADERS[loader])
        training.run()
        return training.outcome(), training.seen


def finish(training: Training, loader: str) -> None:
    """Run to the end, and compare with the run that was never stopped."""
    training.run()
    outcome, seen = undisturbed(loader)
    assert list(differences(training.outcome(), outcome)) == []
    assert training.seen == seen[len(seen) - len(training.seen) :]


@pytest.mark.parametrize("how", ["terminate", "error", "Ctrl-C"])
@pytest.mark.parametrize("iteration", range(1, ITERATIONS + 1))
def test_a_run_stopped_at_any_iteration_in_any_way_ends_the_same(tmp_path, iteration, how):
    stop(Training(tmp_path), iteration, how)
    resumed = Training(tmp_path, seed=99 if iteration > 1 else 0, after_validation=iteration % 2 == 0)
    found = resumed.resume()
    done = iteration if how == "terminate" else iteration - 1  # what has failed is not saved
    assert (0 if found is None else found.iteration) == done
    finish(resumed, "plain")


@pytest.mark.parametrize(
    ("loader", "iteration"),
    [
        *(("workers", iteration) for iteration in (1, 3, 4, 8, 13, 15)),
        *((loader, iteration) for loader in ("own generator", "stateful") for iteration in range(1, ITERATIONS + 1)),
    ],
)
def test_loaders_of_every_kind_go_on_where_they_were(tmp_path, loader, iteration):
    stop(Training(tmp_path, make_loader=LOADERS[loader]), iteration, "terminate")
    resumed = Training(tmp_path, seed=99, make_loader=LOADERS[loader])
    assert resumed.resume().iteration == iteration
    finish(resumed, loader)


@pytest.mark.parametrize("after_validation", [False, True])
@pytest.mark.parametrize("in_background", [False, True])
def test_three_stops_in_a_row_end_the_same(tmp_path, after_validation, in_background):
    for iteration, how in ((4, "error"), (9, "Ctrl-C"), (12, "terminate")):
        options = {"async_save": in_background}
        training = Training(tmp_path, seed=iteration - 4, after_validation=after_validation, options=options)
        training.resume()
        stop(training, iteration, how)
    resumed = Training(tmp_path, seed=99)
    resumed.resume()
    finish(resumed, "plain")


@pytest.mark.parametrize(
    "every",
    [
        Events.STARTED,
        Events.EPOCH_STARTED(once=2),
        Events.GET_BATCH_STARTED(once=6),
        Events.ITERATION_STARTED(once=6),
        Events.BACKWARD_COMPLETED(once=6),
        Events.UPDATE_COMPLETED(once=2),
        Events.METRICS_RECORDED(once=2),
        Events.EPOCH_COMPLETED(once=2),
        Events.TERMINATE,
        Events.COMPLETED,
    ],
    ids=str,
)
def test_a_checkpoint_asked_for_in_any_event_is_exact(tmp_path, every):
    training = Training(tmp_path, every)

    @training.engine.on(Events.ITERATION_COMPLETED(once=10))
    def lose(engine: Engine, batch: Any) -> None:
        if every in (Events.TERMINATE, Events.COMPLETED):
            engine.terminate()
        else:
            raise KeyError("what is not saved is lost")

    with contextlib.suppress(KeyError):
        training.run()
    resumed = Training(tmp_path, NEVER, seed=99)
    assert resumed.resume() is not None
    finish(resumed, "plain")


def test_a_checkpoint_can_be_saved_between_two_runs(tmp_path):
    training = Training(tmp_path / "unused", NEVER)
    training.engine.run(training.loader, max_iters=7)
    save_checkpoint(training.engine, tmp_path / "own")
    resumed = Training(tmp_path / "unused too", NEVER, seed=99)
    assert resume(resumed.engine, tmp_path / "own").iteration == 7
    finish(resumed, "plain")


def test_batches_that_were_seen_are_not_loaded_again(tmp_path):
    stop(Training(tmp_path), 3, "terminate")
    resumed = Training(tmp_path, seed=99)
    resumed.resume()
    loaded: list[int] = []
    dataset = resumed.loader.dataset
    own = type(dataset).__getitem__
    try:
        type(dataset).__getitem__ = lambda self, index: (loaded.append(index), own(self, index))[1]
        resumed.engine.run(resumed.loader, max_iters=4)
    finally:
        type(dataset).__getitem__ = own
    validation = 22
    assert len(loaded) == 4 + validation, "the last batch of the epoch, and a validation"


@pytest.mark.parametrize("kind", ["ignite", "torchmetrics", "a collection"])
@pytest.mark.parametrize("stop_at", [2, 4])
def test_metrics_that_are_half_way_through_an_epoch_go_on(tmp_path, kind, stop_at):
    import torchmetrics
    from ignite.metrics import Average

    def make() -> Engine:
        metric: Any = {
            "ignite": lambda: Average(),
            "torchmetrics": lambda: torchmetrics.MeanMetric(),
            "a collection": lambda: torchmetrics.MetricCollection(
                {"mean": torchmetrics.MeanMetric(), "largest": torchmetrics.MaxMetric()}
            ),
        }[kind]()
        return Engine(lambda engine, batch: torch.tensor(float(batch)), metrics={"value": metric})

    numbers = [8.0, 1.0, 5.0, 3.0, 2.0]
    wanted = dict(make().run(numbers).metrics)
    engine = make()
    engine.run(numbers, max_iters=stop_at)
    save_checkpoint(engine, tmp_path)
    again = make()
    resume(again, tmp_path)
    assert dict(again.run(numbers, max_epochs=1).metrics) == wanted


# ---------------------------------------------------------------------- limits


def count_steps(directory: Any) -> tuple[Engine, list[int]]:
    steps: list[int] = []
    model = torch.nn.Linear(1, 1)

    def step(engine: Engine, batch: Any) -> None:
        steps.append(engine.state.iteration)
        engine.backward(engine.model(torch.ones(1)).sum())
        engine.update()

    engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    Checkpoint(directory).attach(engine)
    return engine, steps


def test_a_finished_run_goes_on_only_to_a_higher_limit(tmp_path):
    """CASES B20."""
    engine, _ = count_steps(tmp_path)
    engine.run([1, 2, 3], max_epochs=2)
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    for limit, expected in ((2, []), (4, [7, 8, 9, 10, 11, 12])):
        again, steps = count_steps(tmp_path / "not here")
        assert resume(again, tmp_path).iteration == 6
        again.run([1, 2, 3], max_epochs=limit)
        assert steps == expected
        if not expected:
            assert list(differences(again.model.state_dict(), weights)) == []
    again, steps = count_steps(tmp_path / "not here")
    resume(again, tmp_path)
    with pytest.raises(LimitError, match="max_epochs=1 is below what is done already"):
        again.run([1, 2, 3], max_epochs=1)


def test_what_follows_a_finished_run_that_was_resumed_draws_as_it_would_have(tmp_path):
    def finish(seed: int) -> list[float]:
        torch.manual_seed(seed)
        engine, _ = count_steps(tmp_path)
        resume(engine, tmp_path)
        drawn = []
        for _ in range(2):
            engine.run([1, 2, 3], max_epochs=2)
            drawn.append(torch.rand(()).item())
        return drawn

    assert finish(seed=0) == finish(seed=1)


@pytest.mark.parametrize("stop_after", range(1, 6))
def test_patience_goes_on_and_a_stopped_run_stays_stopped(tmp_path, stop_after):
    """CASES B27."""

    def make() -> tuple[Engine, EarlyStopping]:
        engine, _ = count_steps(tmp_path)

        @engine.on(Events.EPOCH_COMPLETED)
        def record(engine: Engine, batch: Any) -> None:
            engine.record({"score": [1.0, 0.9, 0.9, 0.9, 0.9][engine.state.epoch - 1]})

        return engine, EarlyStopping("score", mode="max", patience=3).attach(engine)

    engine, _ = make()
    engine.run([1, 2], max_epochs=min(stop_after, 5))
    again, stopping = make()
    resume(again, tmp_path)
    again.run([1, 2], max_epochs=5)
    assert again.state.epoch == 4 and stopping.stopped
    assert again.state.stop_reason == "terminated"


@pytest.mark.parametrize(
    "watch",
    [
        lambda: EarlyStopping("score", mode="max", patience=9),
        lambda: Checkpoint("unused", monitor="score", mode="max"),
        lambda: LRSchedule(lambda optimizer: ReduceLROnPlateau(optimizer, mode="max"), monitor="score"),
    ],
    ids=["EarlyStopping", "Checkpoint", "LRSchedule"],
)
def test_a_score_that_has_come_need_not_come_again(tmp_path, monkeypatch, watch):
    monkeypatch.chdir(tmp_path)

    def make() -> Engine:
        engine, _ = count_steps(tmp_path / "checkpoints")
        engine.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda engine, batch: engine.record({"score": 1.0}))
        watch().attach(engine)
        return engine

    make().run([1, 2], max_epochs=2)
    again = make()
    assert resume(again, tmp_path / "checkpoints").epoch == 2
    assert again.run([1, 2], max_epochs=4).epoch == 4


def test_the_loss_scale_goes_on(tmp_path):
    """CASES B23."""
    from pellucid.engine import SingleDevice

    scales: dict[str, list[float]] = {"one": [], "two": []}

    def make(name: str) -> Engine:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)

        def step(engine: Engine, batch: Any) -> None:
            with engine.autocast():
                loss = engine.model(torch.ones(2)).sum()
            engine.backward(loss * (float("inf") if engine.state.iteration == 3 else 1.0))
            engine.update()
            scales[name].append(engine.state_dict()["gradients"]["scale"]["scale"])

        strategy = SingleDevice("cpu", precision="16-mixed", scaler={"init_scale": 64.0, "growth_interval": 2})
        return Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)

    one = make("one")
    one.run(range(10))
    two = make("two")
    two.run(range(10), max_iters=5)
    save_checkpoint(two, tmp_path)
    again = make("two")
    resume(again, tmp_path)
    again.run(range(10), max_epochs=1)
    assert scales["two"] == scales["one"] and len(set(scales["one"])) > 2
    assert again.state.updates == one.state.updates == 9
    assert list(differences(again.model.state_dict(), one.model.state_dict())) == []


# ---------------------------------------------------------------------- what resume refuses


def test_nothing_there_is_none(tmp_path):
    engine, _ = count_steps(tmp_path)
    assert resume(engine, tmp_path) is None
    assert resume(engine, tmp_path / "nowhere") is None


def test_a_running_engine_is_refused(tmp_path):
    engine, _ = count_steps(tmp_path)
    engine.add_event_handler(Events.STARTED, lambda engine, batch: resume(engine, tmp_path))
    with pytest.raises(RunError, match="is for an engine at rest"):
        engine.run([1])


def make_engine(model: torch.nn.Module, *, groups: int = 1, name: str = "") -> Engine:
    parameters = list(model.parameters())
    size = len(parameters) // groups
    params = [{"params": parameters[i * size : (i + 1) * size]} for i in range(groups)]
    optimizer: Any = torch.optim.Adam(params)
    return Engine(lambda engine, batch: None, model, optimizer={name: optimizer} if name else optimizer)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (lambda: make_engine(torch.nn.Linear(3, 2)), r"'weight' has the shape \(2, 2\) there and \(2, 3\) here"),
        (lambda: make_engine(torch.nn.Linear(2, 2, bias=False)), "nothing missing there, 'bias' unknown here"),
        (
            lambda: make_engine(torch.nn.Linear(2, 2), groups=2),
            r"groups of \[2\] parameters, and this engine's has \[1, 1\]",
        ),
        (lambda: make_engine(torch.nn.Linear(2, 2), name="adam"), "'adam' missing there, 'optimizer' unknown here"),
        (lambda: Engine(lambda engine, batch: None), "the models in .* '' unknown here"),
    ],
)
def test_an_engine_that_was_built_otherwise_is_refused_and_left_as_it_was(tmp_path, engine, says):
    save_checkpoint(make_engine(torch.nn.Linear(2, 2)), tmp_path)
    other = engine()
    before = {} if other.model is None else {key: value.clone() for key, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        resume(other, tmp_path)
    if other.model is not None:
        assert list(differences(other.model.state_dict(), before)) == []


def test_handlers_that_were_not_there_are_named(tmp_path, caplog):
    engine, _ = count_steps(tmp_path)
    EarlyStopping("a", mode="max", patience=1).attach(engine)
    save_checkpoint(engine, tmp_path)
    other = make_engine(torch.nn.Linear(1, 1))
    other = count_steps(tmp_path)[0]
    Checkpoint(tmp_path / "second").attach(other)
    resume(other, tmp_path)
    assert "Checkpoint 2 is attached and begins afresh; the state of EarlyStopping is not used" in caplog.text
