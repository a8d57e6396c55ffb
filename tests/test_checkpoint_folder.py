"""A checkpoint on disk: damaged, altered, crafted, of the future. It is data, and reading it runs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.engine import CheckpointError, Engine, Events, list_checkpoints, load_weights, remove_checkpoint, resume
from pellucid.handlers import Checkpoint

NEWEST = "0003_epoch_3_iteration_3"


def make_engine() -> Engine:
    model = nn.Linear(2, 1)

    def step(engine: Engine, batch: Any) -> None:
        engine.backward(engine.model(torch.ones(2)).sum())
        engine.update()

    return Engine(step, model, optimizer=torch.optim.Adam(model.parameters()), state={"note": torch.zeros(3)})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three checkpoints."""
    engine = make_engine()
    Checkpoint(tmp_path, n_saved=3).attach(engine)
    engine.run([0], max_epochs=3)
    return tmp_path


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest = change(manifest) or manifest
    path.write_text(json.dumps(manifest))


def state_of(engine: Engine) -> str:
    return repr([engine.model.state_dict(), engine.optimizer.state_dict(), engine.state_dict()])


# ---------------------------------------------------------------------- damage


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: cut(folder / "manifest.json"),
    "manifest empty": lambda folder: (folder / "manifest.json").write_text(""),
    "manifest of another kind": lambda folder: (folder / "manifest.json").write_text("[1]"),
    "manifest too deep": lambda folder: (folder / "manifest.json").write_text("[" * 100_000),
    "manifest is a folder": lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
    "manifest is a pipe": lambda folder: ((folder / "manifest.json").unlink(), os.mkfifo(folder / "manifest.json")),
    "a model in no file": lambda folder: change_manifest(folder, lambda manifest: {**manifest, "modules": {"": ["m"]}}),
    "manifest not of text": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest without format": lambda folder: change_manifest(folder, lambda manifest: manifest.pop("format") and None),
    "format of another type": lambda folder: change_manifest(folder, lambda manifest: {**manifest, "format": "1"}),
    "no files": lambda folder: change_manifest(folder, lambda manifest: {**manifest, "files": []}),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "weights changed": lambda folder: flip(folder / "model.safetensors"),
    "training missing": lambda folder: (folder / "training.pt").unlink(),
    "training cut": lambda folder: cut(folder / "training.pt"),
    "training changed": lambda folder: flip(folder / "training.pt"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(directory, caplog, damage):
    DAMAGE[damage](directory / NEWEST)
    engine = make_engine()
    found = resume(engine, directory)
    assert found.epoch == engine.state.epoch == 2
    assert list(found.passed_over) == [NEWEST] and NEWEST in found.passed_over[NEWEST]
    assert "newer checkpoints cannot be used" in caplog.text and NEWEST in caplog.text


def test_where_none_is_whole_it_is_an_error_and_not_a_new_beginning(directory):
    for folder in directory.iterdir():
        cut(folder / "training.pt")
    engine = make_engine()
    before = state_of(engine)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be used.*bytes and not"):
        resume(engine, directory)
    assert state_of(engine) == before


def test_what_is_no_checkpoint_is_not_looked_at(directory):
    for name in (".writing-xyz", ".removing-0009_epoch_1_iteration_1", "notes", "9_epoch_1_iteration_1"):
        (directory / name).mkdir()
    (directory / "0010_a_file").write_text("")
    assert resume(make_engine(), directory).path.name == NEWEST
    assert len(list_checkpoints(directory)) == 3


def test_one_checkpoint_can_be_named(directory):
    engine = make_engine()
    assert resume(engine, directory / "0001_epoch_1_iteration_1").epoch == engine.state.epoch == 1
    cut(directory / NEWEST / "training.pt")
    with pytest.raises(CheckpointError, match="bytes and not"):
        resume(engine, directory / NEWEST)


def test_a_checkpoint_can_be_moved_and_copied(directory, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "any name"
    shutil.copytree(directory / NEWEST, elsewhere)
    engine = make_engine()
    assert resume(engine, elsewhere).epoch == 3


def test_a_format_of_the_future_is_an_error_and_not_passed_over(directory):
    change_manifest(directory / NEWEST, lambda manifest: {**manifest, "format": 2})
    with pytest.raises(CheckpointError, match="has format 2, and this version of pellucid reads up to 1"):
        resume(make_engine(), directory)
    with pytest.raises(CheckpointError, match="has format 2"):
        load_weights(nn.Linear(2, 1), directory / NEWEST)


# ---------------------------------------------------------------------- what was made to do harm


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def sign(folder: Path) -> None:
    """Let the manifest fit the files again, as whoever crafts one would."""

    def describe(manifest: dict[str, Any]) -> None:
        for name in manifest["files"]:
            content = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    change_manifest(folder, describe)


def put_in(folder: Path, harm: Harm, *keys: Any) -> None:
    training = torch.load(folder / "training.pt", weights_only=True)
    place = training
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = harm
    torch.save(training, folder / "training.pt")


PARTS: dict[str, Callable[[Path, Harm], Any]] = {
    "the whole": lambda folder, harm: torch.save(harm, folder / "training.pt"),
    "a bare pickle": lambda folder, harm: (folder / "training.pt").write_bytes(pickle.dumps(harm)),
    "an optimizer": lambda folder, harm: put_in(folder, harm, "optimizers", "optimizer", "state"),
    "a handler": lambda folder, harm: put_in(folder, harm, "handlers", "Checkpoint"),
    "the random state": lambda folder, harm: put_in(folder, harm, "ranks", 0, "position", "random", "python"),
    "the data's generators": lambda folder, harm: put_in(folder, harm, "ranks", 0, "position", "generators"),
    "a declared field": lambda folder, harm: put_in(folder, harm, "ranks", 0, "fields", "note"),
    "the gradients": lambda folder, harm: put_in(folder, harm, "ranks", 0, "gradients", "gradients"),
    "the weights": lambda folder, harm: (folder / "model.safetensors").write_bytes(pickle.dumps(harm)),
    "the weights by torch": lambda folder, harm: torch.save({"weight": harm}, folder / "model.safetensors"),
}


@pytest.mark.parametrize("part", PARTS)
def test_nothing_in_a_checkpoint_is_unpickled(directory, tmp_path_factory, part):
    """CASES B39."""
    made = tmp_path_factory.mktemp("harm") / "made"
    PARTS[part](directory / NEWEST, Harm(made))
    sign(directory / NEWEST)
    engine = make_engine()
    before = state_of(engine)
    with pytest.raises(CheckpointError, match="cannot be read"):
        resume(engine, directory)
    assert not made.exists()
    assert state_of(engine) == before
    if "weights" in part:
        with pytest.raises(CheckpointError):
            load_weights(nn.Linear(2, 1), directory / NEWEST)
        assert not made.exists()


def test_the_advice_to_load_unsafely_is_not_passed_on(directory):
    PARTS["the whole"](directory / NEWEST, Harm(directory / "made"))
    sign(directory / NEWEST)
    with pytest.raises(CheckpointError) as error:
        resume(make_engine(), directory)
    assert "could run code" in str(error.value) and "weights_only" not in str(error.value)
    assert error.value.__suppress_context__


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "\0", ".hidden"])
@pytest.mark.parametrize("place", ["files", "modules"])
def test_no_name_in_a_manifest_leads_out_of_the_folder(directory, name, place):
    def change(manifest: dict[str, Any]) -> None:
        if place == "files":
            manifest["files"][name] = manifest["files"]["training.pt"]
        else:
            manifest["modules"][""] = name

    change_manifest(directory / NEWEST, change)
    assert resume(make_engine(), directory).epoch == 2, "it is no whole checkpoint"


def test_no_link_leads_out_of_the_folder(directory):
    training = directory / NEWEST / "training.pt"
    training.rename(directory / "elsewhere")
    training.symlink_to(directory / "elsewhere")
    assert "is no regular file" in resume(make_engine(), directory).passed_over[NEWEST]


@pytest.mark.parametrize(
    "change",
    [
        lambda training: training.pop("ranks"),
        lambda training: training.update(ranks=[]),
        lambda training: training.update(ranks=[3]),
        lambda training: training.update(ranks=[{}]),
        lambda training: training["ranks"][0].update(position={"batches": "three"}),
        lambda training: training["ranks"][0].pop("gradients"),
        lambda training: training.update(handlers=[]),
        lambda training: training["handlers"].update(Checkpoint={"run": 3}),
        lambda training: training.update(optimizers={"optimizer": 3}),
        lambda training: training["optimizers"]["optimizer"].update(param_groups=3),
        lambda training: training["optimizers"]["optimizer"].update(state=3),
    ],
)
def test_content_that_makes_no_sense_is_an_error_and_leaves_the_engine_as_it_was(directory, change):
    path = directory / NEWEST / "training.pt"
    training = torch.load(path, weights_only=True)
    change(training)
    torch.save(training, path)
    sign(directory / NEWEST)
    engine = make_engine()
    Checkpoint(directory).attach(engine)
    before = state_of(engine)
    with pytest.raises(CheckpointError):
        resume(engine, directory)
    assert state_of(engine) == before


def test_a_checkpoint_that_was_resumed_from_is_as_it_was(directory):
    content = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    engine = make_engine()
    resume(engine, directory)
    engine.add_event_handler(Events.STARTED, lambda engine, batch: None)
    engine.run([0], max_epochs=4)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == content


# ---------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("a file", "is a file: give the directory of the checkpoints"),
        (f"{NEWEST}/manifest.json", "is a file: give the directory of the checkpoints"),
        ("0009_epoch_9_iteration_9", "manifest.json cannot be read: No such file"),
        ("half", "manifest.json cannot be read: No such file"),
    ],
)
def test_a_path_that_is_no_directory_of_checkpoints_is_an_error_and_no_new_beginning(directory, path, says):
    (directory / "a file").write_text("a file")
    shutil.copytree(directory / NEWEST, directory / "half")
    (directory / "half" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=says):
        resume(make_engine(), directory / path)


def test_what_is_no_path_is_refused(directory):
    found = list_checkpoints(directory)[0]
    for call in (lambda one: resume(make_engine(), one), list_checkpoints, remove_checkpoint,
                 lambda one: load_weights(nn.Linear(2, 1), one)):  # fmt: skip
        for path, says in ((None, "None: the path of a folder was wanted"), (found, "give its path, /.*iteration_3"),
                           ("", "'': the path of a folder")):  # fmt: skip
            with pytest.raises(TypeError, match=says):
                call(path)


def test_only_a_checkpoint_is_removed(directory, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "notes.txt").write_text("what took a year")
    (other / "link").symlink_to(directory / NEWEST)
    for path in (other, other / "notes.txt", other / "link", directory, "/dev/null"):
        with pytest.raises(CheckpointError, match="and is not removed"):
            remove_checkpoint(path)
    assert (other / "notes.txt").read_text() == "what took a year" and len(list_checkpoints(directory)) == 3
    remove_checkpoint(directory / NEWEST)
    remove_checkpoint(directory / NEWEST)
    assert [one.epoch for one in list_checkpoints(directory)] == [2, 1]
