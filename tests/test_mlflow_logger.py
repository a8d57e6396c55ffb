"""MLflow, with a real store, read back with its own client."""

from __future__ import annotations

import contextlib

import pytest
from logging_back_ends import MLFLOW, make_trainer, mlflow_uri, of_name
from mlflow import MlflowClient

from pellucid.engine import Engine, Events, resume
from pellucid.handlers import Checkpoint, MLflowLogger


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def the_run(folder, log):
    return MlflowClient(tracking_uri=mlflow_uri(folder)).get_run(log.run_id)


def fail(engine):
    raise ValueError


def press_ctrl_c(engine):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        (lambda engine: None, "FINISHED"),
        (Engine.terminate, "FINISHED"),
        (Engine.interrupt, "KILLED"),
        (fail, "FAILED"),
        (press_ctrl_c, "KILLED"),
    ],
)
def test_the_status_says_how_the_run_ended(tmp_path, ends, status):
    trainer = make_trainer()
    log = MLFLOW.make(tmp_path, output="loss", every=1).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: ends(engine))
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        trainer.run(range(4), max_epochs=1)
    assert the_run(tmp_path, log).info.status == status
    trainer.run(range(4), max_epochs=2)
    assert the_run(tmp_path, log).info.status == "FINISHED"
    assert [step for step, _ in of_name(MLFLOW.read(tmp_path), "train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_parameters_tags_and_names(tmp_path):
    trainer = make_trainer()
    arguments = {"experiment": "digits", "run_name": "first", "hparams": {"lr": 0.1}, "tags": {"kind": "small"}}
    log = MLFLOW.make(tmp_path, **arguments).attach(trainer)
    trainer.add_event_handler(Events.COMPLETED, lambda engine, batch: engine.record({"top@5, %": 1.0}))
    trainer.run([0], max_epochs=1)
    run = the_run(tmp_path, log)
    assert (run.info.run_name, run.data.params, run.data.tags["kind"]) == ("first", {"lr": "0.1"}, "small")
    assert run.data.metrics == {"top_5_ _": 1.0}
    assert log.client.get_experiment(run.info.experiment_id).name == "digits"


def test_more_than_one_request_takes(tmp_path):
    trainer = make_trainer()
    MLFLOW.make(tmp_path, output="loss", every=1).attach(trainer)
    trainer.run(range(1200), max_epochs=1)
    assert [step for step, _ in of_name(MLFLOW.read(tmp_path), "train/loss")] == list(range(1, 1201))


def test_a_resumed_run_goes_on_with_the_same_mlflow_run(tmp_path):
    def train(epochs: int) -> str | None:
        trainer = make_trainer()
        log = MLFLOW.make(tmp_path, output="loss", every=1).attach(trainer)
        Checkpoint(tmp_path / "saved").attach(trainer)
        if epochs > 1:
            resume(trainer, tmp_path / "saved")
        trainer.run(range(3), max_epochs=epochs)
        return log.run_id

    assert train(1) == train(2)
    assert of_name(MLFLOW.read(tmp_path), "train/loss") == [(n, float(n)) for n in range(1, 7)]


# MLflow uses what SQLAlchemy has deprecated since
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_the_database_that_is_mlflows_default_needs_no_more_than_the_extra(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trainer = make_trainer()
    log = MLflowLogger(uri, output="loss", every=1).attach(trainer)
    trainer.run(range(2), max_epochs=1)
    history = MlflowClient(tracking_uri=uri).get_metric_history(log.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 2.0)]


def test_an_address_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(TypeError, match="tracking_uri="):
        MLflowLogger(tmp_path)
