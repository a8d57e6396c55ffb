"""The handler ``Timing``, and the seam it stands on."""

from __future__ import annotations

import time
from typing import Any

import pytest
from training import Training, assert_equal_to_the_bit

from pellucid.engine import Engine, Events, HandlerError
from pellucid.handlers import Timing, Validate

MS = 0.001


def slow_data(state: Any) -> Any:
    for number in range(3):
        time.sleep(10 * MS)
        yield number


def slow_step(engine: Engine, batch: Any) -> None:
    time.sleep(20 * MS)
    engine.fire_event("amid the step")


def slow_handler(engine: Engine, batch: Any) -> None:
    time.sleep(30 * MS)


def timed() -> tuple[Engine, Timing]:
    engine = Engine(slow_step, name="train")
    engine.register_events("amid the step")
    engine.add_event_handler("amid the step", slow_handler)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), slow_handler)
    return engine, Timing().attach(engine)


def seconds(timing: Timing) -> dict[tuple[str, str], float]:
    return {(row.what, row.event): row.seconds for row in timing.rows}


def test_each_moment_counts_once_and_where_it_belongs():
    engine, timing = timed()
    engine.run(slow_data, max_epochs=1)
    spent = seconds(timing)
    floors = {("data", ""): 30, ("step", ""): 60, ("slow_handler", "amid the step"): 90,
              ("slow_handler", "ITERATION_COMPLETED"): 30}  # fmt: skip
    assert spent.keys() == {*floors, ("engine", "")}
    for what, floor in floors.items():
        assert spent[what] >= floor * MS
    assert sum(spent.values()) == pytest.approx(timing.total_sec, abs=1 * MS)
    assert spent["step", ""] < timing.total_sec - 150 * MS + 1 * MS  # what is slow in the step is the handler's
    assert [(row.what, row.calls) for row in timing.rows] == [
        ("data", 3), ("step", 3), ("slow_handler", 3), ("slow_handler", 1), ("engine", 3)
    ]  # fmt: skip


def test_an_inner_run_is_its_handlers_time_and_a_handler_inside_a_handler_counts_once():
    evaluator = Engine(lambda engine, batch: time.sleep(10 * MS), mode="eval")
    trainer = Engine(lambda engine, batch: None)
    trainer.add_event_handler(Events.METRICS_RECORDED, slow_handler)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: engine.record({"a": 1}))
    Validate(evaluator, [1, 2, 3], every=Events.EPOCH_COMPLETED).attach(trainer)
    timing = Timing().attach(trainer)
    trainer.run([0, 0], max_epochs=1)
    spent = {what: row for (what, _), row in seconds(timing).items()}
    validation = next(row for what, row in spent.items() if what.startswith("Validate."))
    recording = next(row for what, row in spent.items() if what.endswith("<lambda>"))
    assert validation >= 30 * MS and spent["slow_handler"] >= 60 * MS
    assert recording < timing.total_sec - 90 * MS + 1 * MS


def test_describe_shows_the_time_beside_each_handler():
    engine, timing = timed()
    assert " ms in " not in str(engine.describe())
    engine.run(slow_data, max_epochs=1)
    (line,) = [line for line in str(engine.describe()).splitlines() if "every=2" in line]
    assert line.startswith("    slow_handler  Events.ITERATION_COMPLETED(every=2)  (test_timing.py:")
    assert line.endswith("ms in 1 calls")
    assert "ms in 1 calls" in engine.describe()._repr_html_()
    timing.detach(engine)
    assert " ms in " not in str(engine.describe())
    assert seconds(timing)["step", ""] >= 60 * MS


def test_it_shows_itself_as_a_table():
    engine, timing = timed()
    engine.run(slow_data, max_epochs=1)
    lines = str(timing).splitlines()
    assert lines[0].split() == ["what", "event", "calls", "total", "s", "mean", "ms", "share"]
    assert [line.split()[0] for line in lines[1:]] == ["data", "step", "slow_handler", "slow_handler", "engine"]
    assert "<td>ITERATION_COMPLETED</td>" in timing._repr_html_()
    assert repr(timing).endswith("3 iterations)")


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_leaves_as_it_is_and_the_next_run_begins_afresh(error):
    engine, timing = timed()

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine: Engine, batch: Any) -> None:
        raise error("mine")

    with pytest.raises(error, match="mine"):
        engine.run([1, 2, 3], max_epochs=1)
    total = timing.total_sec
    assert total >= 100 * MS
    time.sleep(5 * MS)
    assert timing.total_sec == total
    engine.run([1, 2, 3], max_epochs=1)
    assert timing.rows[1].calls == 1  # the last of the three


def test_watching_changes_nothing():
    watched = Training()
    Timing().attach(watched.engine)
    assert_equal_to_the_bit(Training().run(epochs=2).outcome(), watched.run(epochs=2).outcome())


def test_handlers_that_come_and_go_are_measured_too():
    engine, timing = timed()

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def attach(engine: Engine, batch: Any) -> None:
        engine.add_event_handler(Events.ITERATION_STARTED, slow_handler)

    engine.run([1, 2], max_epochs=1)
    assert seconds(timing)["slow_handler", "ITERATION_STARTED"] >= 30 * MS
    engine.remove_event_handler(slow_handler, Events.ITERATION_STARTED)
    engine.run([1, 2], max_epochs=2)
    assert ("slow_handler", "ITERATION_STARTED") not in seconds(timing)


def test_only_one_can_watch_an_engine():
    engine, timing = timed()
    with pytest.raises(HandlerError, match="is around the calls of this engine already"):
        Timing().attach(engine)
    with pytest.raises(HandlerError, match="is attached to this engine already"):
        timing.attach(engine)
    timing.detach(engine)
    Timing().attach(engine)
