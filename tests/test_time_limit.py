"""The handler ``TimeLimit``."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ranks import run_on_ranks

from pellucid.engine import CheckpointError, Engine, Events, resume
from pellucid.handlers import Checkpoint, TimeLimit


def slow(sec: float = 0.02) -> Engine:
    return Engine(lambda engine, batch: time.sleep(sec))


def test_a_run_ends_after_the_iteration_in_which_its_time_is_up(caplog):
    limit = TimeLimit(0.1).attach(engine := slow())
    began = time.monotonic()
    result = engine.run(range(1000), max_epochs=1)
    assert 0.1 <= time.monotonic() - began < 5
    assert result.stop_reason == "terminated"
    assert 1 <= result.iteration <= 5
    assert limit.elapsed_sec >= 0.1
    assert "TimeLimit(0.1) stops the run after 0 s" in caplog.text


def test_a_run_that_is_done_in_time_is_left_alone():
    limit = TimeLimit(60).attach(engine := slow(0.001))
    assert engine.run(range(3), max_epochs=1).stop_reason == "completed"
    assert 0.003 <= limit.elapsed_sec < 60


def test_every_run_has_the_whole_limit_unless_all_count_together():
    for total, iterations in ((False, 6), (True, 3)):
        TimeLimit(0.5, total=total).attach(engine := slow(0.2))
        engine.run(range(3), max_epochs=1)  # 0.6 s: up at the third
        assert engine.state.iteration == 3
        engine.run(range(3), max_epochs=2)
        assert engine.state.iteration == iterations


def test_the_time_before_a_checkpoint_counts_where_it_is_to(tmp_path):
    def make(total: bool) -> tuple[Engine, TimeLimit]:
        engine = slow(0.05)
        Checkpoint(tmp_path, every=Events.ITERATION_COMPLETED).attach(engine)
        return engine, TimeLimit(30, total=total).attach(engine)

    engine, first = make(total=True)
    engine.run(range(4), max_epochs=1)
    resumed, limit = make(total=True)
    resume(resumed, tmp_path)
    assert first.elapsed_sec >= limit.elapsed_sec >= 0.2
    resumed.run(range(4), max_epochs=2)
    assert limit.elapsed_sec >= 0.4
    limit.reset()
    assert limit.elapsed_sec == 0.0


@pytest.mark.parametrize("ending", [KeyError, KeyboardInterrupt])
def test_the_clock_stands_still_between_runs_however_they_end(ending):
    limit = TimeLimit(60, total=True).attach(engine := slow())

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def fail(engine: Engine, batch: Any) -> None:
        raise ending

    with pytest.raises(ending):
        engine.run(range(5), max_epochs=1)
    spent = limit.elapsed_sec
    assert spent >= 0.04
    time.sleep(0.01)
    assert limit.elapsed_sec == spent


def _on_a_rank() -> Any:
    engine = Engine(lambda engine, batch: time.sleep(0.01))
    if engine.state.rank == 1:
        TimeLimit(0.05).attach(engine)
    result = engine.run(range(2000), max_epochs=1)
    return result.stop_reason, result.iteration


def test_the_rank_whose_time_is_up_first_stops_all():
    (one, other) = run_on_ranks(_on_a_rank, 2)
    assert one == other and one[0] == "terminated" and one[1] < 1000


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (-1, ValueError), ("1", TypeError), (None, TypeError)])
def test_a_limit_that_is_none_is_refused(limit, error):
    with pytest.raises(error, match=f"limit_sec={limit!r}: a number above 0 was wanted"):
        TimeLimit(limit)


def test_a_state_of_something_else_is_refused():
    with pytest.raises(CheckpointError, match="one key 'elapsed_sec' was wanted"):
        TimeLimit(1).load_state_dict({"elapsed": 1})
