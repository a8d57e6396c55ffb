"""The handler ``Throughput``."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from pellucid.engine import Engine, Events, HandlerError
from pellucid.handlers import History, Throughput

BATCHES = [{"x": torch.zeros(4, 2)}] * 6


def sleepy(**options: Any) -> Engine:
    return Engine(lambda engine, batch: time.sleep(0.02), **options)


def test_it_records_what_was_done_in_the_time_since_its_last_record():
    Throughput(every=2).attach(engine := sleepy())
    history = History().attach(engine)
    began = time.perf_counter()
    engine.run(BATCHES, max_epochs=1)
    took = time.perf_counter() - began
    rows = [row for row in history.rows if row.name == "throughput/samples_per_sec"]
    assert [row.iteration for row in rows] == [2, 4, 6]
    for row in rows:
        assert 8 / took <= row.value <= 8 / 0.04
    speed = {row.name: row.value for row in history.rows[-5:]}
    assert speed["throughput/samples_per_sec"] == pytest.approx(4 * speed["throughput/iterations_per_sec"])
    assert speed["throughput/host_peak_mib"] > 10


def test_updates_are_counted_apart_from_iterations_and_only_in_training():
    model = nn.Linear(2, 1)

    def step(engine: Engine, batch: Any) -> None:
        engine.backward(engine.model(batch["x"]).sum())
        engine.update()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Throughput(every=6).attach(engine := Engine(step, model, optimizer=optimizer, gradient_accumulation_steps=3))
    metrics = engine.run(BATCHES, max_epochs=1).metrics
    assert metrics["throughput/iterations_per_sec"] == pytest.approx(3 * metrics["throughput/updates_per_sec"])
    Throughput(every=6).attach(evaluator := sleepy(mode="eval"))
    assert "throughput/updates_per_sec" not in evaluator.run(BATCHES).metrics


def test_the_time_between_two_runs_does_not_count():
    Throughput(every=6).attach(engine := sleepy())

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def stop(engine: Engine, batch: Any) -> None:
        engine.terminate()

    engine.run(BATCHES, max_epochs=1)
    time.sleep(0.5)
    engine.run(BATCHES, max_epochs=2)
    assert engine.state.metrics["throughput/iterations_per_sec"] > 6 / 0.5


def test_samples_are_counted_as_asked_for():
    Throughput(every=1, samples=len, prefix="speed/").attach(engine := sleepy())
    metrics = engine.run([["a", "b", "c"]], max_epochs=1).metrics
    assert metrics["speed/samples_per_sec"] == pytest.approx(3 * metrics["speed/iterations_per_sec"])


def test_a_batch_whose_samples_it_cannot_count_is_an_error_that_says_what_to_do():
    Throughput(every=1).attach(engine := sleepy())
    with pytest.raises(HandlerError, match=r"no tensor with samples in the batch, a list: .*samples=lambda batch"):
        engine.run([["a"]], max_epochs=1)


@pytest.mark.parametrize(("options", "error"), [({"every": 0}, ValueError), ({"every": 1.5}, TypeError),
                                                ({"samples": 3}, TypeError)])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(options, error):
    with pytest.raises(error, match="was wanted"):
        Throughput(**options)


def test_what_it_will_record_may_be_monitored_before_it_comes():
    from pellucid.handlers import EarlyStopping

    Throughput(every=100).attach(engine := sleepy())
    EarlyStopping("throughput/samples_per_sec", mode="max", patience=1).attach(engine)
    engine.run(BATCHES, max_epochs=1)  # nothing is recorded yet, and nothing is missed
