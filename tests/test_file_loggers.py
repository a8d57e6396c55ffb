"""CSV and JSON lines: what a kill leaves, and how a resumed run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from logging_back_ends import CSV, JSON_LINES, make_evaluator, make_trainer, of_name, validate
from ranks import run_on_ranks

from pellucid.engine import CheckpointError, Engine, Events, HandlerError, resume
from pellucid.handlers import Checkpoint, CSVLogger, JSONLinesLogger, Validate

HEADER = "epoch,iteration,updates,name,value\n"
both = pytest.mark.parametrize("back_end", [CSV, JSON_LINES], ids=lambda back_end: back_end.name)


def make_training(folder: Path, back_end=CSV, save_every: int = 4):
    """A training that writes its loss in each iteration, and saves at every 4th."""
    trainer = make_trainer()
    log = back_end.make(folder, output="loss", every=1).attach(trainer)
    Checkpoint(folder / "saved", Events.ITERATION_COMPLETED(every=save_every), n_saved=100).attach(trainer)
    return trainer, log


def steps(folder: Path, back_end=CSV) -> list[int]:
    return [step for step, _ in of_name(back_end.read(folder), "train/loss")]


# ---- the format


def test_pandas_reads_a_name_that_came_later(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv", output="loss", every=1).attach(trainer)
    Validate(make_evaluator(), [1.0], prefix="val/").attach(trainer)
    trainer.run(range(2), max_epochs=2)
    table = pandas.read_csv(tmp_path / "metrics.csv")
    assert list(table.columns) == ["epoch", "iteration", "updates", "name", "value"]
    wide = table.pivot_table(index="iteration", columns="name", values="value")
    assert wide["train/loss"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert wide["val/score"].dropna().to_dict() == {2: 1.0, 4: 1.0}


def test_pandas_reads_json_lines(tmp_path):
    trainer = make_trainer()
    JSONLinesLogger(tmp_path / "metrics.jsonl", output="loss", every=1).attach(trainer)
    trainer.run(range(2), max_epochs=1)
    table = pandas.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert table.to_dict("list") == {
        "epoch": [1, 1], "iteration": [1, 2], "updates": [0, 0], "name": ["train/loss"] * 2, "value": [1.0, 2.0]
    }  # fmt: skip


@both
def test_every_bit_of_a_number_and_odd_names_come_back(tmp_path, back_end):
    trainer, names = make_trainer(), ["a,b", 'with "quotes"', "ünï", "two words"]
    back_end.make(tmp_path).attach(trainer)
    values = dict(zip(names, [0.1 + 0.2, 1e-300, 2**53 + 1, torch.tensor(0.1)], strict=True))
    trainer.add_event_handler(Events.COMPLETED, lambda engine, batch: engine.record(values))
    trainer.run([0], max_epochs=1)
    assert [(name, value) for _, name, value in back_end.read(tmp_path)] == [
        (name, float(value) if back_end is CSV else values[name]) for name, value in values.items()
    ]


def test_a_name_of_two_lines_is_still_one_line(tmp_path):
    trainer = make_trainer()
    CSVLogger(tmp_path / "metrics.csv").attach(trainer)
    trainer.add_event_handler(Events.COMPLETED, lambda engine, batch: engine.record({"a\nb": 1.0}))
    trainer.run([0], max_epochs=1)
    assert (tmp_path / "metrics.csv").read_text() == HEADER + "1,1,0,a b,1.0\n"


# ---- killed

KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_file_loggers import make_training
from pellucid.engine import Events
trainer, _ = make_training(Path(sys.argv[2]))
kill = lambda engine, batch: os.kill(os.getpid(), signal.SIGKILL)
trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), kill, last=True)
trainer.run(range(5), max_epochs=2)
"""


def test_after_a_kill_every_row_is_there_and_the_resumed_run_doubles_none(tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]  # read by pandas
    trainer, _ = make_training(tmp_path)
    resume(trainer, tmp_path / "saved")
    trainer.run(range(5), max_epochs=2)
    assert steps(tmp_path) == list(range(1, 11))
    aside = pandas.read_csv(tmp_path / "metrics.1.csv")
    assert aside["iteration"].tolist() == [5, 6]


@both
@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_half_a_line_at_the_end_is_cut_off(tmp_path, back_end, cut, caplog):
    trainer, log = make_training(tmp_path, back_end)
    trainer.run(range(6), max_epochs=1)
    os.truncate(log.path, log.path.stat().st_size - min(cut, len(log.path.read_bytes().splitlines()[-1])))
    trainer, _ = make_training(tmp_path, back_end)
    resume(trainer, tmp_path / "saved")
    trainer.run(range(6), max_epochs=2)
    assert steps(tmp_path, back_end) == [1, 2, 3, 4, 5, *range(7, 13)]
    assert "half a line" in caplog.text


def test_half_a_header_is_written_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,iter")
    trainer, _ = make_training(tmp_path)
    trainer.run(range(2), max_epochs=1)
    assert steps(tmp_path) == [1, 2]


# ---- resumed


@both
@pytest.mark.parametrize("where", ["0001_*", "0002_*", "0003_*"])
def test_a_run_resumed_from_any_checkpoint_has_the_file_of_one_that_was_not_stopped(tmp_path, back_end, where, caplog):
    whole, log = make_training(tmp_path, back_end, save_every=3)
    whole.run(range(5), max_epochs=2)
    wanted = log.path.read_text()
    resumed, log = make_training(tmp_path, back_end)
    resume(resumed, next((tmp_path / "saved").glob(where)))
    resumed.run(range(5), max_epochs=2)
    assert log.path.read_text() == wanted
    assert "are now in" in caplog.text


def test_the_same_logger_goes_back_with_its_engine(tmp_path):
    trainer, _ = make_training(tmp_path)
    trainer.run(range(5), max_epochs=2)
    resume(trainer, next((tmp_path / "saved").glob("0001_*")))
    trainer.run(range(5), max_epochs=2)
    assert steps(tmp_path) == list(range(1, 11))
    assert pandas.read_csv(tmp_path / "metrics.1.csv")["iteration"].tolist() == list(range(5, 11))


def test_what_is_set_aside_twice_goes_into_two_files(tmp_path):
    for _ in range(3):
        trainer, _ = make_training(tmp_path)
        if (tmp_path / "saved").exists():
            resume(trainer, next((tmp_path / "saved").glob("0001_*")))
        trainer.run(range(5), max_epochs=1)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["metrics.1.csv", "metrics.2.csv", "metrics.csv"]


def test_another_training_begins_a_file_of_its_own_and_leaves_the_old_one(tmp_path):
    for epochs in (2, 1):
        trainer = make_trainer()
        CSVLogger(tmp_path / "metrics.csv", output="loss", every=1).attach(trainer)
        trainer.run(range(3), max_epochs=epochs)
    assert steps(tmp_path) == [1, 2, 3]
    assert pandas.read_csv(tmp_path / "metrics.1.csv")["iteration"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_later_process_that_only_evaluates_appends_where_the_training_ended(tmp_path):
    trainer, evaluator = make_trainer(), make_evaluator()
    CSVLogger(tmp_path / "metrics.csv").attach(trainer)
    validate(trainer, evaluator)
    trainer.run(range(9), max_epochs=1)
    before = (tmp_path / "metrics.csv").read_text()
    alone = make_evaluator()
    CSVLogger(tmp_path / "metrics.csv").attach(alone)
    alone.run([5.0])
    assert (tmp_path / "metrics.csv").read_text() == before + "1,9,0,score,5.0\n"


def test_an_evaluation_before_the_first_training_stands_at_the_beginning(tmp_path):
    trainer, evaluator = make_trainer(), make_evaluator()
    CSVLogger(tmp_path / "metrics.csv", output="loss", every=1).attach(trainer).attach(evaluator)
    evaluator.run([5.0])
    trainer.run(range(2), max_epochs=1)
    assert CSV.read(tmp_path) == [(0, "score", 5.0), (1, "train/loss", 1.0), (2, "train/loss", 2.0)]


def test_a_file_that_the_checkpoint_does_not_know_is_appended_to(tmp_path, caplog):
    trainer, _ = make_training(tmp_path)
    trainer.run(range(5), max_epochs=1)
    (tmp_path / "metrics.csv").unlink()
    trainer, _ = make_training(tmp_path)
    resume(trainer, tmp_path / "saved")
    trainer.run(range(5), max_epochs=2)
    assert steps(tmp_path) == [6, 7, 8, 9, 10]
    assert "not the file that the checkpoint was saved with" in caplog.text


# ---- mistakes


def test_two_loggers_on_one_file_are_an_error(tmp_path):
    trainer, evaluator = make_trainer(), make_evaluator()
    validate(trainer, evaluator)
    for engine in (trainer, evaluator):
        CSVLogger(tmp_path / "metrics.csv", output="loss", every=1).attach(engine)
    with pytest.raises(HandlerError, match="Attach one logger to all engines"):
        trainer.run(range(5), max_epochs=1)


@pytest.mark.parametrize("content", ["iteration,loss\n1,2\n", "x"])
def test_a_file_of_another_kind_is_refused_and_left(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match="none of ours"):
        CSVLogger(path)
    assert path.read_text() == content


@pytest.mark.parametrize("path", [None, "", 3])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(TypeError, match="the path of a file was wanted"):
        CSVLogger(path)


@pytest.mark.parametrize("position", [-1, None, "3"])
def test_a_position_that_makes_no_sense_is_refused(tmp_path, position):
    log = CSVLogger(tmp_path / "metrics.csv")
    with pytest.raises(CheckpointError, match="position"):
        log.load_state_dict({**log.state_dict(), "position": position})


def test_rows_are_json(tmp_path):
    trainer = make_trainer()
    log = JSONLinesLogger(tmp_path / "metrics.jsonl", output="loss", every=1).attach(trainer)
    trainer.run([0], max_epochs=1)
    assert [*map(json.loads, log.path.read_text().splitlines())] == [
        {"epoch": 1, "iteration": 1, "updates": 0, "name": "train/loss", "value": 1.0}
    ]


# ---- on ranks


def train_on_ranks(folder: str) -> None:
    for epochs in (2, 3):
        trainer = Engine(lambda engine, batch: {"loss": float(engine.state.iteration)}, strategy="ddp")
        CSVLogger(Path(folder) / "metrics.csv", output="loss", every=1).attach(trainer)
        Checkpoint(Path(folder) / "saved", n_saved=9).attach(trainer)
        if epochs == 3:
            resume(trainer, next((Path(folder) / "saved").glob("0001_*")))
        trainer.run(range(4), max_epochs=epochs)


def test_ranks_resume_one_file(tmp_path):
    run_on_ranks(train_on_ranks, 2, str(tmp_path))
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert pandas.read_csv(tmp_path / "metrics.1.csv")["iteration"].tolist() == [3, 4]
