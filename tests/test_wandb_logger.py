"""Weights & Biases in offline mode, its files read as they are on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from logging_back_ends import WANDB, make_trainer, of_name, wandb_records

from pellucid.engine import Events, resume
from pellucid.handlers import Checkpoint, WandbLogger


def test_the_offline_folder_has_the_run_and_its_config(tmp_path):
    trainer = make_trainer()
    log = WANDB.make(tmp_path, name="first", hparams={"lr": 0.1}, output="loss", every=1).attach(trainer)
    trainer.run(range(2), max_epochs=1)
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert path.name == f"run-{log.run_id}.wandb"
    (run,) = (record.run for record in wandb_records(path) if record.HasField("run"))
    assert (run.project, run.display_name) == ("tests", "first")
    assert [(item.key, json.loads(item.value_json)) for item in run.config.update if item.key == "lr"] == [("lr", 0.1)]


def test_no_process_of_the_client_outlives_the_run(tmp_path):
    trainer, during = make_trainer(), []
    WANDB.make(tmp_path, output="loss", every=1).attach(trainer)
    before = children()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: during.append(children()))
    trainer.run(range(3), max_epochs=1)
    assert len(during[0] - before) >= 1
    assert children() <= before


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


# what the client's own processes do is not seen here: their share in it is what the environment forbids them
NO_CONNECTION = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
tried = []
def refuse(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect") and getattr(arguments[0], "family", None) != socket.AF_UNIX:
        tried.append((event, str(arguments)))
sys.addaudithook(refuse)
from pathlib import Path
from logging_back_ends import WANDB, make_trainer
trainer = make_trainer()
WANDB.make(Path(sys.argv[2]), output="loss", every=1).attach(trainer)
trainer.run(range(3), max_epochs=1)
import atexit
atexit._run_exitfuncs()
assert "WANDB_ERROR_REPORTING" not in os.environ
print(tried)
"""


def test_offline_the_client_tries_no_connection(tmp_path):
    arguments = [sys.executable, "-c", NO_CONNECTION, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_a_resumed_run_goes_on_under_the_same_id(tmp_path):
    def train(epochs: int) -> str | None:
        trainer = make_trainer()
        log = WANDB.make(tmp_path, output="loss", every=1).attach(trainer)
        Checkpoint(tmp_path / "saved").attach(trainer)
        if epochs > 1:
            resume(trainer, tmp_path / "saved")
        trainer.run(range(3), max_epochs=epochs)
        return log.run_id

    assert train(1) == train(2)
    assert of_name(WANDB.read(tmp_path), "train/loss") == [(n, float(n)) for n in range(1, 7)]


def test_the_run_of_the_user_goes_on(tmp_path):
    import wandb

    quiet = wandb.Settings(silent=True, console="off")
    mine = wandb.init(project="mine", mode="offline", dir=tmp_path, settings=quiet)
    try:
        trainer = make_trainer()
        WANDB.make(tmp_path, output="loss", every=1).attach(trainer)
        trainer.run(range(2), max_epochs=1)
        assert wandb.run is mine
        mine.log({"after": 1.0})
    finally:
        mine.finish()
        wandb.teardown()
    points = WANDB.read(tmp_path)
    assert of_name(points, "after") == [(0, 1.0)]
    assert of_name(points, "train/loss") == [(1, 1.0), (2, 2.0)]


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="mode='of'"):
        WandbLogger(mode="of")
