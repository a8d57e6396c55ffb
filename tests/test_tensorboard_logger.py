"""TensorBoard, read back with TensorBoard's own reader."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from logging_back_ends import TENSORBOARD, make_evaluator, make_trainer, of_name
from ranks import run_on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from pellucid.engine import Engine, Events, resume
from pellucid.handlers import Checkpoint, TensorBoardLogger, Validate


def events_in(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    events.Reload()
    return events


def training_engine(model: nn.Module, strategy: str = "single") -> Engine:
    def step(engine, batch):
        loss = engine.model(batch).square().mean()
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    return Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy)


def test_histograms_of_weights_and_gradients_where_both_are_there(tmp_path):
    model = nn.Linear(3, 2)
    trainer = training_engine(model)
    TensorBoardLogger(tmp_path, histograms=Events.UPDATE_STARTED(every=2)).attach(trainer)
    trainer.run([torch.ones(4, 3)] * 5, max_epochs=1)
    events = events_in(tmp_path)
    tags = events.Tags()["histograms"]
    assert sorted(tags) == ["gradients/bias", "gradients/weight", "weights/bias", "weights/weight"]
    assert [event.step for event in events.Histograms("gradients/weight")] == [2, 4]
    assert events.Histograms("weights/weight")[0].histogram_value.num == 6


def test_a_histogram_leaves_out_what_is_not_finite_and_says_so(tmp_path, caplog):
    trainer = make_trainer()
    log = TensorBoardLogger(tmp_path).attach(trainer)
    values = {1: [1.0, float("nan"), 2.0], 2: [float("inf")]}

    @trainer.on(Events.ITERATION_COMPLETED)
    def add(engine, batch):
        log.add_histogram(engine, "weights", torch.tensor(values[engine.state.iteration]))

    trainer.run(range(2), max_epochs=1)
    (event,) = events_in(tmp_path).Histograms("weights")
    assert event.histogram_value.num == 2
    assert caplog.text.count("not finite") == 1


def test_the_model_parts_of_a_mapping_have_their_names(tmp_path):
    models = {"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)}
    trainer = Engine(lambda engine, batch: None, models)
    TensorBoardLogger(tmp_path, histograms=Events.COMPLETED).attach(trainer)
    trainer.run([0], max_epochs=1)
    tags = events_in(tmp_path).Tags()["histograms"]
    assert sorted(tags) == ["weights/one/bias", "weights/one/weight", "weights/two/bias", "weights/two/weight"]


def test_images_figures_and_texts_stand_where_the_training_stands(tmp_path):
    from matplotlib.figure import Figure

    trainer, evaluator = make_trainer(), make_evaluator()
    log = TensorBoardLogger(tmp_path).attach(trainer)
    Validate(evaluator, [1.0], every=Events.ITERATION_COMPLETED(every=3)).attach(trainer)

    @evaluator.on(Events.COMPLETED)
    def show(engine, batch):
        log.add_image(engine, "sample", torch.rand(3, 4, 5))
        log.add_image(engine, "samples", torch.rand(2, 4, 5, 3), dataformats="NHWC")
        log.add_figure(engine, "curve", Figure())
        log.add_text(engine, "note", "**seen**")

    trainer.run(range(6), max_epochs=1)
    events = events_in(tmp_path)
    for name in ("sample", "samples", "curve"):
        assert [event.step for event in events.Images(name)] == [3, 6]
    image = events.Images("sample")[0]
    assert (image.height, image.width) == (4, 5)
    assert [event.step for event in events.Tensors("note/text_summary")] == [3, 6]
    assert events.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"**seen**"]


def test_hyper_parameters_are_in_the_same_folder_once(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    trainer = make_trainer()
    TensorBoardLogger(tmp_path, hparams={"lr": 0.1, "layers": [3, 4]}, output="loss", every=1).attach(trainer)
    trainer.run([0], max_epochs=1)
    trainer.run([0], max_epochs=2)
    events = events_in(tmp_path)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    assert found["lr"].number_value == 0.1
    assert found["layers"].string_value == "[3, 4]"
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("where", ["0001_*", "0002_*"])
def test_a_resumed_run_shows_every_point_once(tmp_path, where):
    def train(checkpoint: Path | None) -> None:
        trainer = make_trainer()
        TENSORBOARD.make(tmp_path, output="loss", every=1).attach(trainer)
        Checkpoint(tmp_path / "saved", Events.ITERATION_COMPLETED(every=4), n_saved=100).attach(trainer)
        if checkpoint is not None:
            resume(trainer, checkpoint)
        trainer.run(range(5), max_epochs=2)

    train(None)
    begun = int(time.time())
    while int(time.time()) == begun:  # the names of the files have the second, and are read in order
        time.sleep(0.01)
    train(next((tmp_path / "saved").glob(where)))
    assert of_name(TENSORBOARD.read(tmp_path), "train/loss") == [(n, float(n)) for n in range(1, 11)]


def test_what_was_written_can_be_read_while_the_run_goes_on(tmp_path):
    trainer, seen = make_trainer(), []
    TENSORBOARD.make(tmp_path, output="loss", every=1).attach(trainer)
    read = lambda engine, batch: seen.append(len(TENSORBOARD.read(tmp_path)))  # noqa: E731
    trainer.add_event_handler(Events.EPOCH_STARTED(once=2), read)
    trainer.run(range(3), max_epochs=2)
    assert seen == [3]


def histograms_on_ranks(folder: str, strategy: str) -> None:
    torch.manual_seed(0)
    trainer = training_engine(nn.Linear(3, 4), strategy)
    TensorBoardLogger(folder, histograms=Events.UPDATE_STARTED).attach(trainer)
    trainer.run([torch.ones(4, 3)] * 4, max_epochs=1)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_histograms_on_ranks_are_of_the_whole_model(tmp_path, strategy):
    run_on_ranks(histograms_on_ranks, 2, str(tmp_path), strategy)
    events = events_in(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    for name in ("weights/weight", "gradients/weight"):
        assert [event.histogram_value.num for event in events.Histograms(name)] == [12, 12]


@pytest.mark.parametrize("directory", [None, "", 3])
def test_a_directory_that_is_none_is_refused(directory):
    with pytest.raises(TypeError, match="the path of a folder was wanted"):
        TensorBoardLogger(directory)


def test_hyper_parameters_that_are_no_mapping_are_refused(tmp_path):
    with pytest.raises(TypeError, match="hparams="):
        TensorBoardLogger(tmp_path, hparams=[1])
