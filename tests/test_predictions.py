from __future__ import annotations

import gc
import itertools
import json
import weakref
from contextlib import suppress

import pytest
import torch
from parallel import make_data, make_net
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from training import Training, assert_equal_to_the_bit

from pellucid.engine import DataError, Engine, Events, HandlerError, RunError, supervised_evaluation_step
from pellucid.handlers import Predictions, SavedPredictions, Validate


def doubled(engine, batch):
    return 2 * batch


def predict(predictions, numbers=10, batch_size=4, step=doubled):
    engine = Engine(step, mode="eval")
    predictions.attach(engine)
    engine.run(DataLoader(torch.arange(float(numbers)), batch_size=batch_size))
    return predictions.result


def files(directory):
    return sorted(path.name for path in directory.iterdir())


# ---------------------------------------------------------------------- what is kept


def test_the_result_is_what_the_step_returned_for_each_sample_in_order():
    assert predict(Predictions()).tolist() == [2.0 * number for number in range(10)]


def test_a_tuple_stays_a_tuple_and_a_mapping_a_dict():
    def as_tuple(engine, batch):
        return batch, batch[:, None] > 4

    numbers, large = predict(Predictions(), step=as_tuple)
    assert (numbers.tolist(), large.shape, large.dtype) == (list(range(10)), (10, 1), torch.bool)
    result = predict(Predictions(), step=lambda engine, batch: {"a": batch, "b": -batch})
    assert {name: value[-1].item() for name, value in result.items()} == {"a": 9, "b": -9}


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_dtypes_are_kept(where, tmp_path):
    kept = {"half": torch.bfloat16, "double": torch.float64, "large": torch.bool, "count": torch.int32}
    predictions = Predictions(
        lambda output: {name: output.to(dtype) for name, dtype in kept.items()},
        directory=tmp_path if where == "directory" else None,
    )
    result = predict(predictions)
    result = result if where == "memory" else result.load()
    assert {name: value.dtype for name, value in result.items()} == kept


def test_a_transform_chooses_what_is_kept():
    step = supervised_evaluation_step
    engine = Engine(step, make_net(), mode="eval")
    predictions = Predictions(lambda output: {"class": output[0].argmax(1)}).attach(engine)
    engine.run(DataLoader(make_data(7), batch_size=3))
    assert list(predictions.result) == ["class"]
    assert predictions.result["class"].shape == (7,)


def test_what_the_step_writes_into_its_output_later_changes_nothing():
    buffer = torch.zeros(2)
    assert predict(Predictions(), 6, 2, lambda engine, batch: buffer.copy_(batch)).tolist() == list(range(6))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda batch: {"loss": batch.mean()}, r"output\['loss'\] is a single number.*transform="),
        (lambda batch: (batch, "text"), r"output\[1\] is a str: a tensor was wanted"),
        (lambda batch: None, "the step's output is a NoneType"),
        (lambda batch: (batch, batch[1:]), "{'0': 4, '1': 3} samples"),
        (lambda batch: batch[None].expand(2, -1), r"\(4,\) of torch.float32 in one batch and \(2,\) of"),
        (lambda batch: batch if batch[0] < 4 else (batch,), "outputs of the step differ"),
    ],
)
def test_an_output_that_is_no_samples_is_an_error_that_names_the_remedy(output, message):
    with pytest.raises(DataError, match=message) as error:
        predict(Predictions(), step=lambda engine, batch: output(batch))
    assert "transform=" in str(error.value)


# ---------------------------------------------------------------------- which runs have a result


SECOND = Events.ITERATION_COMPLETED(once=2)


def stopped(verb, predictions, event=SECOND):
    def stop(engine, batch):
        if stops:
            return
        stops.append(verb)
        if verb == "raise":
            raise ValueError("of the user")
        getattr(engine, verb)()

    stops = []
    engine = Engine(doubled, mode="eval")
    predictions.attach(engine)
    engine.add_event_handler(event, stop)
    return engine


@pytest.mark.parametrize("where", ["memory", "directory"])
@pytest.mark.parametrize("verb", ["terminate", "terminate_epoch", "interrupt", "raise"])
def test_a_run_that_was_stopped_has_no_result_and_the_next_one_begins_afresh(verb, where, tmp_path, caplog):
    predictions = Predictions() if where == "memory" else Predictions(directory=tmp_path, chunk_samples=3)
    engine = stopped(verb, predictions)
    data = DataLoader(torch.arange(10.0), batch_size=4)
    with suppress(ValueError):
        engine.run(data)
    with pytest.raises(RunError, match="in iteration 2, before the end of its data"):
        predictions.result  # noqa: B018
    assert files(tmp_path) == []
    assert ("nothing is kept" in caplog.text) == (verb != "raise")
    engine.run(data)
    assert predictions.result[:].tolist() == [2.0 * number for number in range(10)]


def test_a_failed_run_takes_the_result_of_the_run_before_it():
    predictions = Predictions()
    engine = stopped("raise", predictions, Events.ITERATION_COMPLETED(after=3))
    engine.run([torch.ones(1)] * 3)
    assert len(predictions.result) == 3
    with pytest.raises(ValueError, match="of the user"):
        engine.run([torch.ones(1)] * 4)
    with pytest.raises(RunError, match=r"has failed \(ValueError\)"):
        predictions.result  # noqa: B018


def test_before_any_run_there_is_no_result():
    with pytest.raises(RunError, match="no run has begun"):
        Predictions().result  # noqa: B018


def test_a_stop_after_the_end_of_the_data_leaves_the_result_whole(caplog):
    predictions = Predictions()
    stopped("terminate", predictions, Events.EPOCH_COMPLETED).run([torch.ones(2)])
    assert len(predictions.result) == 2
    assert caplog.text == ""


def test_the_last_of_several_epochs_is_the_result():
    engine = Engine(lambda engine, batch: batch + engine.state.epoch, mode="eval")
    predictions = Predictions().attach(engine)
    engine.run([torch.zeros(2)] * 2, max_epochs=3)
    assert predictions.result.tolist() == [3] * 4


def test_a_training_engine_is_refused():
    with pytest.raises(HandlerError, match="mode='eval'"):
        Predictions().attach(Engine(doubled))


def test_it_leaves_the_training_around_it_bit_identical():
    def evaluate(engine, batch):
        return engine.model(batch[0]), batch[2]

    watched = Training("shuffled")
    evaluator = watched.engine.fork(evaluate)
    predictions = Predictions().attach(evaluator)
    Validate(evaluator, watched.loader).attach(watched.engine)
    outcome = watched.run(2).outcome()
    assert_equal_to_the_bit(outcome, Training("shuffled").run(2).outcome())
    assert sorted(predictions.result[1].tolist()) == list(range(14))


def test_it_keeps_no_engine_alive_and_no_output_that_was_transformed():
    outputs, predictions = [], Predictions(lambda output: output[:, 0])

    def step(engine, batch):
        outputs.append(weakref.ref(result := torch.ones(len(batch), 3)))
        return result

    engine = Engine(step, mode="eval")
    predictions.attach(engine)
    engine.run([torch.ones(2)] * 3)
    alive = weakref.ref(engine)
    gc.collect()
    assert [reference() for reference in outputs] == [None] * 3
    gc.disable()
    try:
        del engine
        assert alive() is None
    finally:
        gc.enable()
    assert predictions.result.tolist() == [1] * 6


# ---------------------------------------------------------------------- on disk


def test_files_of_so_many_samples_are_written_with_an_index(tmp_path):
    saved = predict(Predictions(directory=tmp_path, chunk_samples=3))
    parts = [f"part-{number:05d}.safetensors" for number in range(4)]
    assert files(tmp_path) == ["index.json", *parts]
    assert [load_file(tmp_path / part)["output"].tolist() for part in parts] == [
        [0, 2, 4],
        [6, 8, 10],
        [12, 14, 16],
        [18],
    ]
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["samples"], index["parts"][-1]) == (10, {"file": parts[-1], "samples": 1})
    assert repr(saved) == f"SavedPredictions({str(tmp_path)!r}: 10 samples of output)"


@pytest.mark.parametrize("chunk_samples", [1, 3, 4, 10, 99])
def test_the_reader_slices_as_the_whole_tensor_does(chunk_samples, tmp_path):
    step = lambda engine, batch: {"a": batch, "b": batch[:, None] + 0.5}  # noqa: E731
    predict(Predictions(directory=tmp_path, chunk_samples=chunk_samples), step=step)
    saved, whole = SavedPredictions(tmp_path), torch.arange(10.0)
    for index in [0, 5, -1, slice(None), slice(2, 7), slice(9, None), slice(3, 3), slice(-4, None), slice(1, 9, 3)]:
        assert torch.equal(saved[index]["a"], whole[index])
    assert saved[::-3]["b"].flatten().tolist() == [9.5, 6.5, 3.5, 0.5]
    assert torch.equal(torch.cat([part["a"] for part in saved.parts()]), whole)
    with pytest.raises(IndexError):
        saved[10]


def test_the_reader_is_a_data_set(tmp_path):
    predict(Predictions(directory=tmp_path, chunk_samples=3), step=lambda engine, batch: (batch, -batch))
    batches = list(DataLoader(SavedPredictions(tmp_path), batch_size=5))
    assert [batch[1].tolist() for batch in batches] == [[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]]


def test_a_new_run_leaves_no_file_of_a_longer_one(tmp_path):
    predict(Predictions(directory=tmp_path, chunk_samples=1))
    predict(Predictions(directory=tmp_path, chunk_samples=1), numbers=2)
    assert files(tmp_path) == ["index.json", "part-00000.safetensors", "part-00001.safetensors"]


def test_what_a_killed_run_has_left_is_not_read_and_is_replaced_by_the_next(tmp_path):
    predict(Predictions(directory=tmp_path, chunk_samples=1))
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(DataError, match="no whole predictions"):
        SavedPredictions(tmp_path)
    assert len(predict(Predictions(directory=tmp_path), numbers=2)) == 2


@pytest.mark.parametrize(
    ("name", "message"), [("index.json", "no index of pred"), ("part-1.safetensors", "another dir")]
)
def test_files_of_others_are_not_touched(name, message, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=message):
        Predictions(directory=tmp_path)
    with pytest.raises(DataError, match=r"no predictions|no index"):
        SavedPredictions(tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_memory_holds_no_more_than_a_file_and_a_batch(tmp_path):
    alive = []

    def step(engine, batch):
        alive.append(len(files(tmp_path)))
        return batch

    predict(Predictions(directory=tmp_path, chunk_samples=4), numbers=40, step=step)
    assert alive == [1, *range(2, 11)]


# ---------------------------------------------------------------------- on ranks


CASES = [*itertools.product([1, 2, 3, 7, 8], [1, 2]), (8, 3), (3, 8)]  # samples, and how many make a batch


def evaluate_cases(directory):
    found = {}
    for size, batch_size in CASES:
        where = None if directory is None else f"{directory}/{size} by {batch_size}"
        engine = Engine(lambda engine, batch: (engine.model(batch[0]), batch[1]), make_net(), mode="eval")
        predictions = Predictions(directory=where, chunk_samples=3).attach(engine)
        engine.run(DataLoader(make_data(size), batch_size=batch_size))
        result = predictions.result if where is None else predictions.result.load()
        found[size, batch_size] = tuple(tensor.clone() for tensor in result)
    return found


@pytest.mark.parametrize("where", ["memory", "directory"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_ranks_each_sample_is_there_once_in_the_order_of_the_data(world_size, where, tmp_path):
    alone = evaluate_cases(None)
    assert [len(classes) for _, classes in alone.values()] == [size for size, _ in CASES]
    for rank in run_on_ranks(evaluate_cases, world_size, None if where == "memory" else str(tmp_path)):
        assert_equal_to_the_bit(rank, alone)


def test_on_ranks_the_files_are_those_of_one_process(tmp_path):
    run_on_ranks(evaluate_cases, 2, str(tmp_path))
    for size, batch_size in CASES:
        parts = [f"part-{number:05d}.safetensors" for number in range(-(-size // 3))]
        assert files(tmp_path / f"{size} by {batch_size}") == ["index.json", *parts]


def stop_on_ranks(directory):
    predictions = Predictions(directory=directory)
    stopped("terminate", predictions).run(DataLoader(torch.arange(12.0), batch_size=2))
    try:
        return predictions.result
    except RunError as error:
        return str(error)


def test_on_ranks_a_stopped_run_has_no_result(tmp_path):
    for told in run_on_ranks(stop_on_ranks, 2, str(tmp_path)):
        assert "was stopped in iteration" in told


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"transform": "loss"}, TypeError, "transform='loss'"),
        ({"directory": 3}, TypeError, "directory=3"),
        ({"directory": ""}, TypeError, "directory=''"),
        ({"chunk_samples": 0}, ValueError, "chunk_samples=0"),
        ({"directory": __file__}, DataError, "this is a file"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        Predictions(**arguments)
