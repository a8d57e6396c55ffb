"""The handler ``Predictions``: each sample once, in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch.utils.data import DataLoader, TensorDataset

from pellucid.engine import Engine, Events, HandlerError
from pellucid.handlers import Predictions, SavedPredictions


def numbers(samples: int, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size)


def evaluator(step: Any = lambda engine, batch: batch[0] * 10) -> Engine:
    return Engine(step, mode="eval")


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_it_has_what_the_step_gave_for_each_sample(tmp_path, samples, on_disk):
    predictions = Predictions(directory=tmp_path if on_disk else None, chunk_samples=3).attach(engine := evaluator())
    for _ in range(2):  # a new run begins afresh
        engine.run(numbers(samples))
        found = predictions.result.load() if on_disk else predictions.result
        assert torch.equal(found, torch.arange(samples) * 10)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("transform", [
    lambda x: {"logits": torch.stack([x, -x], 1).to(torch.bfloat16), "class": x},
    lambda x: (x, x.double() / 3),
    lambda x: x > 20,
])  # fmt: skip
def test_it_keeps_what_is_asked_for_in_its_form(tmp_path, transform, on_disk):
    predictions = Predictions(transform, directory=tmp_path if on_disk else None).attach(engine := evaluator())
    engine.run(numbers(5))
    found = predictions.result.load() if on_disk else predictions.result
    torch.testing.assert_close(found, transform(torch.arange(5) * 10), rtol=0, atol=0)


def test_on_disk_it_is_read_batch_by_batch_and_only_a_chunk_is_in_memory(tmp_path):
    predictions = Predictions(directory=tmp_path, chunk_samples=4).attach(engine := evaluator())
    engine.run(numbers(9))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["index.json", *(f"part-000-0000{number}.safetensors" for number in range(3))]
    saved = SavedPredictions(tmp_path)
    assert len(saved) == len(predictions.result) == 9
    assert [batch.tolist() for batch in saved] == [[0, 10], [20, 30], [40, 50], [60, 70], [80]]


@pytest.mark.parametrize("end", ["terminate", "error", "Ctrl-C"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_that_does_not_complete_leaves_none(tmp_path, on_disk, end):
    predictions = Predictions(directory=tmp_path if on_disk else None).attach(engine := evaluator())
    engine.run(numbers(9))
    errors = {"error": KeyError, "Ctrl-C": KeyboardInterrupt}

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def stop(engine: Engine, batch: Any) -> None:
        if end in errors:
            raise errors[end]
        engine.terminate()

    if end in errors:
        with pytest.raises(errors[end]):
            engine.run(numbers(9))
    else:
        engine.run(numbers(9))
    with pytest.raises(HandlerError, match="no evaluation has completed yet, or the last one did not"):
        predictions.result  # noqa: B018
    if on_disk:
        with pytest.raises(HandlerError, match="no predictions of an evaluation that was run to its end"):
            SavedPredictions(tmp_path)


def _predict(samples: int, directory: Path | None) -> Any:
    predictions = Predictions(directory=directory, chunk_samples=3).attach(engine := evaluator())
    engine.run(numbers(samples))
    return predictions.result.load() if directory else predictions.result


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_give_what_one_process_gives(tmp_path, world_size, on_disk):
    for samples in (1, 2, 3, 7, 8):
        directory = tmp_path / str(samples) if on_disk else None
        for found in run_on_ranks(_predict, world_size, samples, directory):
            assert torch.equal(found, torch.arange(samples) * 10), samples


@pytest.mark.parametrize("output", [3, torch.tensor(1.0), None, {"a": torch.zeros(2), "b": torch.zeros(3)}, ()])
def test_what_has_no_samples_is_refused(output):
    Predictions().attach(engine := evaluator(lambda engine, batch: output))
    with pytest.raises(HandlerError, match="a tensor whose first dimension is the samples was wanted"):
        engine.run([0])


def test_batches_that_do_not_fit_together_are_refused_with_the_remedy():
    Predictions().attach(engine := evaluator(lambda engine, batch: torch.zeros(2, batch)))
    with pytest.raises(HandlerError, match=r"the batches do not fit together .*padding"):
        engine.run([3, 4])


def test_it_is_for_evaluations():
    with pytest.raises(HandlerError, match="attaches to an evaluation engine"):
        Predictions().attach(Engine(lambda engine, batch: None))
    with pytest.raises(TypeError, match="transform=3: a function"):
        Predictions(3)


def test_inside_a_training_it_is_the_latest_evaluations():
    seen: list[Any] = []
    predictions = Predictions().attach(inner := evaluator(lambda engine, batch: batch[0] + engine.state.parent.epoch))
    trainer = Engine(lambda engine, batch: None)

    @trainer.on(Events.EPOCH_COMPLETED)
    def look(engine: Engine, batch: Any) -> None:
        inner.run(numbers(3))
        seen.append(predictions.result.tolist())

    trainer.run([0], max_epochs=2)
    assert seen == [[1, 2, 3], [2, 3, 4]]


def test_saved_ones_give_an_iterator_that_opens_one_file_at_a_time(tmp_path):
    Predictions(directory=tmp_path, chunk_samples=2).attach(engine := evaluator())
    engine.run(numbers(6))
    batches: Iterator[Any] = iter(SavedPredictions(tmp_path))
    assert next(batches).tolist() == [0, 10]
    (tmp_path / "part-000-00001.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        next(batches)
