"""What all loggers have in common, each with its real back end."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from logging_back_ends import BACK_ENDS, CSV, make_evaluator, make_trainer, of_name, validate
from ranks import run_on_ranks

from pellucid.engine import CheckpointError, Engine, Events, HandlerError, MonitorError
from pellucid.handlers import CSVLogger, MLflowLogger, TensorBoardLogger, WandbLogger

every_back_end = pytest.mark.parametrize("back_end", BACK_ENDS, ids=lambda back_end: back_end.name)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


# ---- what is written, and where


@every_back_end
def test_output_is_written_every_nth_iteration_and_records_when_they_come(back_end, tmp_path):
    trainer = make_trainer()
    validate(trainer, make_evaluator())
    back_end.make(tmp_path, output="loss", every=4).attach(trainer)
    trainer.run(range(10), max_epochs=1)
    points = back_end.read(tmp_path)
    assert of_name(points, "train/loss") == [(4, 4.0), (8, 8.0)]
    assert of_name(points, "val/score") == [(3, 1.5), (6, 1.5), (9, 1.5)]
    assert len(points) == 5


@every_back_end
def test_an_evaluation_on_its_own_later_stands_where_the_training_ended(back_end, tmp_path):
    trainer, evaluator = make_trainer(), make_evaluator()
    validate(trainer, evaluator)
    log = back_end.make(tmp_path).attach(trainer).attach(evaluator)
    trainer.run(range(9), max_epochs=1)
    before = back_end.read(tmp_path)
    evaluator.run([7.0])
    trainer.run(range(9), max_epochs=2)
    assert log.state_dict()["counts"] == [2, 18, 0]
    points = back_end.read(tmp_path)
    of_trainer, of_evaluator = of_name(points, "val/score"), of_name(points, "score")
    assert [step for step, _ in of_trainer] == [3, 6, 9, 12, 15, 18]
    assert of_evaluator == [(3, 1.5), (6, 1.5), (9, 1.5), (9, 7.0), (12, 1.5), (15, 1.5), (18, 1.5)]
    assert all(point in points for point in before)


@every_back_end
def test_values_that_are_not_finite_are_kept(back_end, tmp_path):
    values = iter([math.nan, math.inf, -math.inf, 0.5])
    trainer = make_trainer(lambda engine, batch: {"loss": torch.tensor(next(values))})
    back_end.make(tmp_path, output="loss", every=1).attach(trainer)
    trainer.run(range(4), max_epochs=1)
    read = [float(value) for _, value in of_name(back_end.read(tmp_path), "train/loss")]
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf, 0.5]


@every_back_end
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_an_error_or_ctrl_c_loses_nothing_and_the_next_run_goes_on(back_end, tmp_path, error):
    errors = [error]

    def step(engine, batch):
        if engine.state.iteration == 3 and errors:
            raise errors.pop()
        return {"loss": float(engine.state.iteration)}

    trainer = make_trainer(step)
    back_end.make(tmp_path, output="loss", every=1).attach(trainer)
    with pytest.raises(type(error)):
        trainer.run(range(5), max_epochs=1)
    assert of_name(back_end.read(tmp_path), "train/loss") == [(1, 1.0), (2, 2.0)]
    trainer.run(range(5), max_epochs=1)
    assert of_name(back_end.read(tmp_path), "train/loss") == [(n, float(n)) for n in range(1, 6)]


@pytest.mark.parametrize("verb", [Engine.terminate, Engine.interrupt], ids=["terminate", "interrupt"])
def test_a_stopped_run_closes_the_file(tmp_path, verb):
    trainer = make_trainer()
    log = CSVLogger(tmp_path / "metrics.csv", output="loss", every=1).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: verb(engine))
    trainer.run(range(5), max_epochs=1)
    assert open_files(log.path) == 0
    trainer.run(range(5), max_epochs=1)
    assert [step for step, _ in of_name(CSV.read(tmp_path), "train/loss")] == [1, 2, 3, 4, 5]


def open_files(path: Path) -> int:
    import psutil

    return sum(Path(one.path) == path for one in psutil.Process().open_files())


def test_an_inner_run_does_not_close_the_file_of_the_training_around_it(tmp_path):
    trainer, evaluator, seen = make_trainer(), make_evaluator(), []
    log = CSVLogger(tmp_path / "metrics.csv").attach(trainer).attach(evaluator)
    validate(trainer, evaluator)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: seen.append(open_files(log.path)))
    trainer.run(range(5), max_epochs=1)
    assert seen == [0, 0, 1, 1, 1]
    assert open_files(log.path) == 0


def test_what_a_handler_of_the_end_records_is_written(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv").attach(trainer)
    trainer.add_event_handler(Events.TERMINATE | Events.COMPLETED, lambda engine, batch: engine.record({"a": 1}))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: engine.terminate())
    trainer.run(range(5), max_epochs=1)
    assert CSV.read(tmp_path) == [(2, "a", 1), (2, "a", 1)]
    assert open_files(tmp_path / "metrics.csv") == 0


# ---- the output


@pytest.mark.parametrize(
    ("returned", "output", "written"),
    [
        ({"loss": 1.0, "norm": 2.0}, ["norm"], {"train/norm": 2.0}),
        ((1.0, 2.0), ["loss", "norm"], {"train/loss": 1.0, "train/norm": 2.0}),
        (torch.tensor(3), "loss", {"train/loss": 3}),
        ((1.0, "text"), lambda output: {"first": output[0]}, {"train/first": 1.0}),
        ({"loss": np.float32(0.5)}, "loss", {"train/loss": 0.5}),
        ({"loss": True}, "loss", {"train/loss": 1}),
    ],
)
def test_output_is_chosen_by_key_by_place_or_by_a_function(tmp_path, returned, output, written):
    trainer = make_trainer(lambda engine, batch: returned)
    CSVLogger(tmp_path / "metrics.csv", output=output, every=1).attach(trainer)
    trainer.run([0], max_epochs=1)
    assert {name: value for _, name, value in CSV.read(tmp_path)} == written


def test_a_prefix_takes_the_place_of_the_engines_name(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv", output="loss", every=1, prefix="").attach(trainer)
    trainer.run([0], max_epochs=1)
    assert CSV.read(tmp_path) == [(1, "loss", 1.0)]


def test_output_that_is_not_there_is_an_error_that_says_what_there_is(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv", output=["los"], every=1).attach(trainer)
    with pytest.raises(MonitorError, match=r"no \['los'\], it has \['loss'\]"):
        trainer.run([0], max_epochs=1)


def test_short_vectors_are_written_by_place_and_what_is_larger_is_named_once(tmp_path, caplog):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv").attach(trainer)
    values = {"recall": torch.tensor([0.5, 1.0]), "matrix": torch.eye(2), "array": np.ones(1)}
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: engine.record(values))
    trainer.run([0, 1], max_epochs=1)
    names = [name for _, name, _ in CSV.read(tmp_path)]
    assert names == ["recall/0", "recall/1", "array/0"] * 2
    assert [record.getMessage() for record in caplog.records if "'matrix' is no number" in record.getMessage()] != []
    assert len(caplog.records) == 1


# ---- what it costs


class Counted(torch.Tensor):
    """A tensor that counts how often a value of it is brought to the host."""

    reads = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = ("item", "__float__", "__bool__", "__int__", "tolist", "cpu", "numpy")
        Counted.reads += getattr(function, "__name__", "") in names
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize(("every", "most"), [(10, 10), (None, 0)])
def test_values_are_read_when_due_all_at_once_and_else_never(tmp_path, monkeypatch, every, most):
    monkeypatch.setattr(Counted, "reads", 0)
    loss = torch.tensor(0.5).as_subclass(Counted)
    trainer = make_trainer(lambda engine, batch: {"loss": loss, "norm": loss + 1, "other": loss + 2})
    if every is not None:
        CSVLogger(tmp_path / "m.csv", output=["loss", "norm", "other"], every=every).attach(trainer)
    trainer.run(range(100), max_epochs=1)
    assert Counted.reads == most


@every_back_end
def test_no_graph_is_kept_and_no_tensor_more_as_the_run_goes_on(back_end, tmp_path):
    weight, alive, counts = torch.ones(10, requires_grad=True), [], {}

    def step(engine, batch):
        alive.append(weakref.ref(activation := weight * 2))
        return {"loss": activation.sum()}

    def count(engine, batch):
        gc.collect()
        counts[engine.state.iteration] = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    trainer = make_trainer(step)
    back_end.make(tmp_path, output=lambda output: {"loss": output["loss"]}, every=1).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=[50, 200]), count)
    trainer.run(range(200), max_epochs=1)
    assert counts[50] == counts[200]
    assert {reference() for reference in alive} == {None}


# ---- ranks


def log_on_rank(folder: str, kind: int) -> list[str]:
    import os

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    mine = Path(folder) / os.environ["RANK"]
    mine.mkdir()
    trainer = Engine(lambda engine, batch: {"loss": float(batch)}, strategy="ddp")
    log = BACK_ENDS[kind].make(mine, output="loss", every=1).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"a": 1}))
    trainer.run(range(6), max_epochs=1)
    log.state_dict()
    return sorted(path.name for path in mine.iterdir())


@pytest.mark.parametrize("kind", range(len(BACK_ENDS)), ids=[back_end.name for back_end in BACK_ENDS])
def test_only_rank_0_writes(tmp_path, kind):
    first, second = run_on_ranks(log_on_rank, 2, str(tmp_path), kind)
    assert first != []
    assert second == []
    points = BACK_ENDS[kind].read(tmp_path / "0")
    assert of_name(points, "train/loss") == [(1, 0.0), (2, 2.0), (3, 4.0)]


# ---- mistakes


@pytest.mark.parametrize(
    ("module", "make", "command"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoardLogger("runs"), r"pip install 'pellucid\[tensorboard\]'"),
        ("mlflow.tracking", lambda: MLflowLogger(), r"pip install 'pellucid\[mlflow\]'"),
        ("wandb", lambda: WandbLogger(), r"pip install 'pellucid\[wandb\]'"),
    ],
)
def test_an_absent_package_is_named_with_the_command_that_installs_it(monkeypatch, module, make, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=command):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"output": 3}, TypeError, "output=3"),
        ({"output": []}, TypeError, r"output=\[\]"),
        ({"output": "loss", "every": 0}, ValueError, "every=0"),
        ({"prefix": 1}, TypeError, "prefix=1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments, error, text):
    with pytest.raises(error, match=text):
        CSVLogger(tmp_path / "metrics.csv", **arguments)


def test_a_function_that_returns_no_mapping_is_an_error(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv", output=lambda output: output["loss"], every=1).attach(trainer)
    with pytest.raises(MonitorError, match=r"a mapping of names to numbers was wanted"):
        trainer.run([0], max_epochs=1)


@every_back_end
def test_a_state_that_does_not_fit_is_refused(back_end, tmp_path):
    log = back_end.make(tmp_path)
    with pytest.raises(CheckpointError, match=type(log).__name__):
        log.load_state_dict({**log.state_dict(), "more": 1})
    with pytest.raises(CheckpointError, match=type(log).__name__):
        log.load_state_dict({})


def test_a_logger_is_attached_to_an_engine_once(tmp_path):
    trainer = make_trainer()
    log = CSVLogger(tmp_path / "metrics.csv").attach(trainer)
    with pytest.raises(HandlerError, match="twice"):
        log.attach(trainer)


# ---- the page


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, model, loader):
    import re

    page = (Path(__file__).parents[1] / "docs" / "loggers.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def step(engine, batch):
        loss = torch.nn.functional.cross_entropy(engine.model(batch[0]), batch[1])
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    trainer = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    names = {"trainer": trainer, "train_loader": loader, "torch": torch}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    trainer.run(loader, max_epochs=3)
    table = Path("runs/digits/metrics.csv").read_text()
    assert "train/loss" in table and ",lr,0.1" in table
    assert list(Path("runs/pictures").glob("events*"))
