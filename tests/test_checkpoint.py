"""The handler ``Checkpoint``: what it saves when, which it keeps, and what a failed save leaves behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import stat
import threading
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pellucid.engine import (
    CheckpointError,
    Engine,
    EventError,
    Events,
    MonitorError,
    list_checkpoints,
    load_weights,
    resume,
    save_checkpoint,
)
from pellucid.handlers import EMA, Checkpoint


def make_engine(model: Any = None, scores: Any = (), **options: Any) -> Engine:
    """Records ``scores`` by epoch; each step adds one to the bias."""
    model = nn.Linear(2, 1) if model is None else model

    def step(engine: Engine, batch: Any) -> None:
        with torch.no_grad():
            next(iter(engine.model.parameters())).add_(1.0)

    engine = Engine(step, model, **options)

    @engine.on(Events.EPOCH_COMPLETED)
    def record(engine: Engine, batch: Any) -> None:
        if engine.state.epoch <= len(scores):
            engine.record({"score": scores[engine.state.epoch - 1]})

    return engine


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def epochs(checkpoints: Any) -> list[int]:
    return [one.epoch for one in checkpoints]


# ---------------------------------------------------------------------- which are kept


def test_without_a_score_the_newest_are_kept(tmp_path):
    engine = make_engine()
    checkpoint = Checkpoint(tmp_path / "new" / "folder", n_saved=2).attach(engine)
    engine.run([0, 1], max_epochs=4)
    assert names(checkpoint.directory) == ["0003_epoch_3_iteration_6", "0004_epoch_4_iteration_8"]
    assert (checkpoint.last.epoch, checkpoint.last.iteration, checkpoint.best) == (4, 8, None)


@pytest.mark.parametrize("attach_first", [False, True])
@pytest.mark.parametrize(
    ("mode", "best"), [("max", [2, 4]), ("min", [5, 1])], ids=["the larger is better", "the smaller is better"]
)
def test_the_best_and_the_newest_are_kept_whatever_the_order_of_attaching(tmp_path, mode, best, attach_first):
    scores = [0.5, 0.9, 0.7, 0.8, 0.4, 0.6]
    engine = make_engine(scores=() if attach_first else scores)
    checkpoint = Checkpoint(tmp_path, monitor="score", mode=mode, n_saved=2).attach(engine)
    if attach_first:
        engine.add_event_handler(
            Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"score": scores[engine.state.epoch - 1]})
        )
    engine.run([0], max_epochs=6)
    assert sorted(epochs(checkpoint.checkpoints)) == sorted([*best, 6])
    assert checkpoint.best.epoch == best[0] and checkpoint.last.epoch == 6
    weights = load_file(checkpoint.best.path / "model.safetensors")
    first = load_file(checkpoint.last.path / "model.safetensors")
    assert float((first["weight"] - weights["weight"])[0, 0]) == pytest.approx(6 - best[0]), "of that very iteration"


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_not_finite_is_never_best(tmp_path, odd, mode):
    engine = make_engine(scores=[odd, 1.0, odd])
    checkpoint = Checkpoint(tmp_path, monitor="score", mode=mode).attach(engine)
    engine.run([0], max_epochs=3)
    assert checkpoint.best.epoch == 2
    assert [one.score for one in checkpoint.checkpoints] == [None, 1.0]


def test_only_the_best_are_kept_where_it_was_asked_for(tmp_path):
    engine = make_engine(scores=[1.0, 3.0, 2.0])
    checkpoint = Checkpoint(tmp_path, monitor="score", mode="max", keep_last=False).attach(engine)
    engine.run([0], max_epochs=3)
    assert epochs(checkpoint.checkpoints) == [2]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_only_best_is_the_only_one(tmp_path, in_background):
    engine = make_engine(scores=[1.0, 2.0, 1.5, 3.0])
    checkpoint = Checkpoint(tmp_path, monitor="score", mode="max", keep_last=False, async_save=in_background)
    checkpoint.attach(engine)
    engine.run([0], max_epochs=4)
    assert epochs(checkpoint.checkpoints) == [4] and len(names(tmp_path)) == 1


def test_a_score_counts_only_for_the_iteration_it_was_recorded_at(tmp_path):
    engine = make_engine()
    checkpoint = Checkpoint(tmp_path, Events.ITERATION_COMPLETED(every=2), monitor="score", mode="max", n_saved=9)
    checkpoint.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda engine, batch: engine.record({"score": 1.0}))
    engine.run(range(7))
    assert [(one.iteration, one.score) for one in checkpoint.checkpoints] == [(7, None), (3, 1.0)]


def test_the_same_moment_is_saved_once(tmp_path):
    engine = make_engine(scores=[1.0])
    Checkpoint(tmp_path, Events.EPOCH_COMPLETED | Events.COMPLETED, monitor="score", mode="max").attach(engine)
    engine.run([0])
    assert names(tmp_path)[-1].startswith("0002"), "COMPLETED was asked for"
    engine = make_engine(scores=[1.0])
    Checkpoint(tmp_path / "b", monitor="score", mode="max").attach(engine)
    engine.run([0])
    assert names(tmp_path / "b") == ["0001_epoch_1_iteration_1"]


def test_the_end_of_a_run_is_saved(tmp_path):
    for number, limit in enumerate([{"max_iters": 5}, {"max_epochs": 2}]):
        engine = make_engine()
        checkpoint = Checkpoint(tmp_path / str(number), Events.ITERATION_COMPLETED(every=100)).attach(engine)
        engine.run(range(3), **limit)
        assert checkpoint.last.iteration == engine.state.iteration


def test_runs_that_share_a_directory_leave_each_other_alone(tmp_path, caplog):
    for _ in range(2):
        engine = make_engine()
        checkpoint = Checkpoint(tmp_path).attach(engine)
        engine.run([0], max_epochs=2)
    assert names(tmp_path) == ["0002_epoch_2_iteration_2", "0004_epoch_2_iteration_2"]
    assert epochs(checkpoint.checkpoints) == [2]
    assert caplog.text.count("has 1 checkpoint(s) of another run, which are left alone") == 1
    resumed = make_engine()
    own = Checkpoint(tmp_path).attach(resumed)
    assert resume(resumed, tmp_path).path.name == "0004_epoch_2_iteration_2"
    resumed.run([0], max_epochs=3)
    assert names(tmp_path) == ["0002_epoch_2_iteration_2", "0005_epoch_3_iteration_3"], "it knows its own again"
    assert epochs(own.checkpoints) == [3]


def test_two_checkpoints_of_one_engine_keep_their_own(tmp_path):
    engine = make_engine(scores=[1.0, 2.0])
    often = Checkpoint(tmp_path, Events.ITERATION_COMPLETED, n_saved=2).attach(engine)
    best = Checkpoint(tmp_path, monitor="score", mode="min", keep_last=False).attach(engine)
    engine.run([0, 1], max_epochs=2)
    assert [one.iteration for one in often.checkpoints] == [4, 4]
    assert epochs(best.checkpoints) == [1]


# ---------------------------------------------------------------------- a save that fails


@pytest.fixture
def saved_once(tmp_path):
    engine = make_engine(state={"note": None})
    checkpoint = Checkpoint(tmp_path).attach(engine)
    engine.run([0])
    return engine, checkpoint, names(tmp_path)


def fails_to_write(error: OSError) -> Any:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("where", ["save", "fsync", "rename"])
def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(saved_once, tmp_path, monkeypatch, where):
    """CASES B18: the disk is full."""
    engine, checkpoint, before = saved_once
    error = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(torch if where == "save" else os, where, fails_to_write(error))
        with pytest.raises(OSError, match="No space left"):
            engine.run([0], max_epochs=2)
    assert names(tmp_path) == before
    again = make_engine(state={"note": None})
    assert resume(again, tmp_path).epoch == 1
    engine.run([0], max_epochs=3)
    assert epochs(checkpoint.checkpoints) == [3]


def test_what_a_safe_loader_would_not_read_is_refused_when_it_is_saved(saved_once, tmp_path):
    engine, _, before = saved_once
    engine.state.note = object()
    with pytest.raises(
        CheckpointError, match="state field 'note' holds a value of type object, which a safe loader would not read"
    ):
        engine.run([0], max_epochs=2)
    assert names(tmp_path) == before


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="whoever may do everything can write anywhere")
def test_a_folder_that_cannot_be_written_to_is_an_error(saved_once, tmp_path):
    engine, _, before = saved_once
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            engine.run([0], max_epochs=2)
    finally:
        tmp_path.chmod(0o700)
    assert names(tmp_path) == before


def test_a_file_in_the_place_of_the_directory_is_an_error_before_the_first_step(tmp_path):
    engine = make_engine()
    Checkpoint(tmp_path / "file").attach(engine)
    (tmp_path / "file").write_text("a file")
    with pytest.raises(FileExistsError, match="file is a file: give Checkpoint the path of a folder"):
        engine.run([0])
    assert engine.state.iteration == 0
    with pytest.raises(FileExistsError):
        Checkpoint(tmp_path / "file")


def test_the_directory_is_the_one_it_was_when_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    checkpoints = Checkpoint("runs"), Checkpoint("~/runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for checkpoint in checkpoints:
        engine = make_engine()
        checkpoint.attach(engine)
        engine.run([0])
    assert names(tmp_path / "runs") == names(tmp_path / "home" / "runs") == ["0001_epoch_1_iteration_1"]
    assert resume(make_engine(), "~/runs").path == checkpoints[1].last.path
    assert names(tmp_path / "elsewhere") == []


def test_whoever_may_read_the_directory_may_read_a_checkpoint(tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        engine = make_engine()
        Checkpoint(tmp_path).attach(engine)
        engine.run([0])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "0001_epoch_1_iteration_1").stat().st_mode) == 0o755


@pytest.mark.parametrize("skip", [False, True])
def test_the_end_of_an_epoch_that_was_cut_short_is_saved(tmp_path, skip):
    engine = make_engine()
    Checkpoint(tmp_path, Events.ITERATION_COMPLETED, n_saved=9).attach(engine)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(once=2), lambda engine, batch: engine.terminate_epoch(skip_epoch_completed=skip)
    )
    engine.run([0, 1, 2])
    again = make_engine()
    resume(again, tmp_path)
    again.run([0, 1, 2], max_epochs=2)
    assert again.state.iteration == 5


def test_what_a_process_that_is_gone_left_half_written_is_removed(tmp_path):
    for name in (".writing-abc", ".removing-0001_epoch_1_iteration_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.pt").write_bytes(b"half")
    engine = make_engine()
    Checkpoint(tmp_path).attach(engine)
    engine.run([0])
    assert names(tmp_path) == ["0001_epoch_1_iteration_1"]


# ---------------------------------------------------------------------- in the background


def test_in_the_background_the_state_is_that_of_the_moment(tmp_path, monkeypatch):
    let_go = threading.Event()
    write = torch.save

    def slowly(*args: Any, **kwargs: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert let_go.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(torch, "save", slowly)
    engine = make_engine()
    checkpoint = Checkpoint(tmp_path, Events.ITERATION_COMPLETED(once=1), async_save=True).attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda engine, batch: let_go.set())
    engine.run(range(6))
    assert [one.iteration for one in checkpoint.checkpoints] == [6]
    engine = make_engine()
    checkpoint = Checkpoint(tmp_path / "b", Events.ITERATION_COMPLETED(once=1), n_saved=2, async_save=True)
    checkpoint.attach(engine)
    before = float(engine.model.weight.detach()[0, 0])
    engine.run(range(6))
    assert [one.iteration for one in checkpoint.checkpoints] == [6, 1]
    weights = load_file(checkpoint.checkpoints[1].path / "model.safetensors")
    assert float(weights["weight"][0, 0]) == pytest.approx(before + 1)


def test_an_error_in_the_background_leaves_the_run_at_the_next_event(tmp_path, monkeypatch):
    failed = threading.Event()

    def fail(*args: Any, **kwargs: Any) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    engine = make_engine()
    Checkpoint(tmp_path, Events.ITERATION_COMPLETED(once=1), async_save=True).attach(engine)

    @engine.on(Events.ITERATION_STARTED(once=2))
    def wait(engine: Engine, batch: Any) -> None:
        assert failed.wait(30)
        for thread in threading.enumerate():
            if thread.name == "pellucid checkpoint":
                thread.join()

    with pytest.raises(OSError, match="No space left"):
        engine.run(range(100))
    assert engine.state.iteration == 2
    assert names(tmp_path) == []


def test_no_thread_outlives_the_run_whatever_ends_it(tmp_path):
    for ending in (KeyError, KeyboardInterrupt, None):
        engine = make_engine()
        Checkpoint(tmp_path, Events.ITERATION_COMPLETED, async_save=True).attach(engine)

        def end(engine: Engine, batch: Any, ending: Any = ending) -> None:
            if ending is None:
                engine.terminate()
            else:
                raise ending

        engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), end)
        with contextlib.suppress(KeyError, KeyboardInterrupt):
            engine.run(range(9))
        assert not [thread for thread in threading.enumerate() if thread.name == "pellucid checkpoint"]


# ---------------------------------------------------------------------- what is in it


class Odd(nn.Module):
    """Tied weights, a part of a larger tensor, an extra state, complex and bool buffers, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.part = nn.Parameter(torch.arange(12.0).reshape(3, 4)[:, 1])
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.tensor([1j, 2.0]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.calls = 7

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def save_model(model: Any, directory: Path) -> Path:
    engine = make_engine(model)
    checkpoint = Checkpoint(directory).attach(engine)
    checkpoint.save(engine)
    return checkpoint.last.path


def test_every_kind_of_tensor_comes_back_under_the_users_own_keys(tmp_path):
    model = Odd()
    path = save_model(model, tmp_path)
    assert set(load_file(path / "model.safetensors")) == set(model.state_dict()) - {"phase", "_extra_state"}
    other = Odd()
    other.calls = 0
    with torch.no_grad():
        other.part.add_(1)
        other.phase.mul_(2)
    load_weights(other, path)
    for key, value in model.state_dict().items():
        assert key == "_extra_state" or torch.equal(other.state_dict()[key], value)
    assert other.calls == 7 and other.head.weight is other.embed.weight


def test_weights_load_in_plain_pytorch_with_two_lines(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    path = save_model(model, tmp_path)
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plain.load_state_dict(load_file(path / "model.safetensors"))
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_mapping_of_models_has_a_file_for_each(tmp_path):
    models = {"generator": nn.Linear(1, 2), "../critic": nn.Linear(2, 1), "1": nn.Linear(1, 1)}
    engine = Engine(lambda engine, batch: None, models)
    checkpoint = Checkpoint(tmp_path).attach(engine)
    checkpoint.save(engine)
    path = checkpoint.last.path
    assert {name for name in names(path) if name.startswith("model")} == {
        "model-generator.safetensors",
        "model-1.safetensors",
        "model-1-2.safetensors",
    }
    for part, model in models.items():
        other = nn.Linear(model.in_features, model.out_features)
        load_weights(other, path, part=part)
        assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointError, match=r"no model '': part= must be one of \['generator'"):
        load_weights(nn.Linear(1, 2), path)


def test_weights_that_do_not_fit_a_plain_module_are_refused_and_leave_it_alone(tmp_path):
    path = save_model(nn.Linear(2, 3), tmp_path)
    other = nn.Linear(3, 3)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match=r"'weight' has the shape \(3, 2\) there and \(3, 3\) here"):
        load_weights(other, path)
    assert torch.equal(other.weight, before)
    named = nn.ModuleDict({"layer": nn.Linear(2, 3)})
    with pytest.raises(CheckpointError, match=r"missing there, 'bias', 'weight' unknown here: is it 'layer.bias'\?"):
        load_weights(named, path)
    with pytest.raises(CheckpointError, match=r"it has the checkpoints 0001_epoch_0_iteration_0: name one"):
        load_weights(nn.Linear(2, 3), tmp_path)
    with pytest.raises(CheckpointError, match="it is no checkpoint"):
        load_weights(nn.Linear(2, 3), tmp_path / "nowhere")


@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(0.1),
        numpy.arange(3, dtype=numpy.int16),
        OrderedDict(b=1, a=[numpy.float64(2.0)]),
        Counter("aab"),
        defaultdict(list, {1: [None, (2, {3})]}),
        torch.float16,
        torch.Size([1, 2]),
        2**70,
        b"bytes",
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_declared_field_comes_back_as_what_it_was(tmp_path, value):
    Checkpoint(tmp_path).attach(engine := make_engine(state={"field": copy.deepcopy(value)}))
    engine.run([0], max_epochs=1)
    resumed = make_engine(state={"field": type(value)(list) if isinstance(value, defaultdict) else 0})
    assert resume(resumed, tmp_path)
    found = resumed.state.field
    assert type(found) is type(value) and repr(found) == repr(value)
    assert not isinstance(found, numpy.ndarray) or found.dtype == value.dtype


def test_a_field_that_cannot_be_saved_is_an_error_before_the_first_step(tmp_path):
    Checkpoint(tmp_path).attach(engine := make_engine(state={"path": tmp_path}))
    with pytest.raises(CheckpointError, match="state field 'path' holds a value of type PosixPath"):
        engine.run([0], max_epochs=1)
    assert engine.state.iteration == 0


def test_a_lazy_model_is_saved_once_it_has_shapes_and_loads_into_one_that_has_none(tmp_path):
    def make() -> Engine:
        return Engine(lambda engine, batch: engine.model(batch).sum(), nn.LazyLinear(2))

    with pytest.raises(CheckpointError, match="the model's state has 'weight', 'bias' without a shape yet"):
        save_checkpoint(make(), tmp_path)
    saved = make()
    saved.run([torch.ones(1, 3)], max_epochs=1)
    save_checkpoint(saved, tmp_path)
    assert resume(resumed := make(), tmp_path)
    assert torch.equal(resumed.model.weight, saved.model.weight)


def test_what_an_optimizer_keeps_beside_its_parameters_comes_back(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["shared"] = {"steps": self.state.get("shared", {}).get("steps", 0) + 1}
            return super().step(closure)

    def make() -> Engine:
        def step(engine: Engine, batch: Any) -> None:
            engine.backward(engine.model(batch).sum())
            engine.update()

        model = nn.Linear(2, 1)
        return Engine(step, model, optimizer=Counting(model.parameters(), lr=0.1))

    saved = make()
    saved.run([torch.ones(1, 2)] * 3, max_epochs=1)
    save_checkpoint(saved, tmp_path)
    assert resume(resumed := make(), tmp_path)
    assert resumed.optimizer.state["shared"] == {"steps": 3}


def test_averages_come_back(tmp_path):
    engine = Engine(
        lambda engine, batch: (engine.backward(engine.model(torch.ones(2)).sum()), engine.update())[0],
        nn.Linear(2, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    ema = EMA(0.5).attach(engine)
    Checkpoint(tmp_path).attach(engine)
    engine.run(range(3))
    other = Engine(engine._step, nn.Linear(2, 1), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    again = EMA(0.5).attach(other)
    Checkpoint(tmp_path).attach(other)
    resume(other, tmp_path)
    assert torch.equal(again.weights()["weight"], ema.weights()["weight"])


# ---------------------------------------------------------------------- what is refused when it is made


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"directory": 3}, TypeError, "directory=3: the path of a folder was wanted"),
        ({"directory": ""}, TypeError, "directory='': the path"),
        ({"n_saved": 0}, ValueError, "n_saved=0: a whole number of at least 1"),
        ({"n_saved": 1.5}, TypeError, "n_saved=1.5"),
        ({"mode": "max"}, ValueError, "give monitor= too"),
        ({"keep_last": False}, ValueError, "give monitor= too"),
        ({"monitor": "a"}, ValueError, "monitor='a' needs mode='max'"),
        ({"monitor": "a", "mode": "best"}, ValueError, "mode='best'"),
        ({"monitor": 3, "mode": "max"}, TypeError, "monitor=3"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, error, says):
    with pytest.raises(error, match=says):
        Checkpoint(**{"directory": tmp_path, **arguments})


def test_an_event_that_is_none_is_refused_when_it_is_attached(tmp_path):
    with pytest.raises(EventError):
        Checkpoint(tmp_path, "epoch_complete").attach(make_engine())


def test_a_score_that_nobody_records_is_an_error(tmp_path):
    engine = make_engine(scores=[1.0, 1.0])
    Checkpoint(tmp_path, monitor="scor", mode="max").attach(engine)
    with pytest.raises(MonitorError, match="did you mean 'score'"):
        engine.run([0], max_epochs=2)


def test_it_comes_off_again(tmp_path):
    engine = make_engine()
    checkpoint = Checkpoint(tmp_path).attach(engine)
    checkpoint.detach(engine)
    engine.run([0])
    assert not list_checkpoints(tmp_path) and engine.attached() == ()
    assert "Checkpoint" in repr(checkpoint)
