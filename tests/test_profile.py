"""The handler ``Profile``."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch.profiler import ProfilerActivity
from training import Training, assert_equal_to_the_bit

from pellucid.engine import Engine, Events, HandlerError
from pellucid.handlers import Profile


def engine() -> Engine:
    return Engine(lambda engine, batch: torch.ones(20, 20).matmul(torch.ones(20, 20)))


def operators(path: Any) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_the_iterations_asked_for_are_kept_each_time(tmp_path):
    profile = Profile(tmp_path / "new", wait=1, warmup=1, active=2, repeat=2).attach(trainer := engine())
    trainer.run(range(20), max_epochs=1)
    assert [path.name for path in profile.traces] == ["rank0_iteration4.json", "rank0_iteration8.json"]
    for path in profile.traces:
        assert operators(path).count("aten::matmul") == 2
    assert "aten::mm" in profile.table() and "aten::mm" not in profile.table(row_limit=0)


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_what_was_kept_before_the_run_ended_is_written_and_the_profiler_is_off(tmp_path, error):
    profile = Profile(tmp_path, wait=0, warmup=1, active=100).attach(trainer := engine())

    @trainer.on(Events.ITERATION_COMPLETED(once=4))
    def stop(engine: Engine, batch: Any) -> None:
        if error is not None:
            raise error
        engine.terminate()

    if error is None:
        trainer.run(range(20), max_epochs=1)
    else:
        with pytest.raises(error):
            trainer.run(range(20), max_epochs=1)
    assert len(profile.traces) == 1
    assert operators(profile.traces[0]).count("aten::matmul") >= 2
    assert not torch.autograd.profiler._is_profiler_enabled
    trainer.run(range(20), max_epochs=2)  # and it can be used again
    assert len(profile.traces) == 1


def test_a_run_that_is_too_short_leaves_nothing(tmp_path):
    profile = Profile(tmp_path).attach(trainer := engine())
    trainer.run(range(3), max_epochs=1)
    assert profile.traces == () and list(tmp_path.iterdir()) == []
    with pytest.raises(HandlerError, match=r"has kept nothing yet: run more than wait \+ warmup iterations"):
        profile.table()


def test_profiling_changes_nothing(tmp_path):
    watched = Training()
    Profile(tmp_path, wait=0, warmup=1, active=3, record_shapes=True, profile_memory=True).attach(watched.engine)
    assert_equal_to_the_bit(Training().run(epochs=2).outcome(), watched.run(epochs=2).outcome())


def _profile_on_a_rank(directory: Any) -> list[str]:
    profile = Profile(directory, wait=0, warmup=1, active=1).attach(trainer := engine())
    trainer.run(range(8), max_epochs=1)
    return [path.name for path in profile.traces]


def test_each_rank_has_files_of_its_own(tmp_path):
    expected = [["rank0_iteration2.json"], ["rank1_iteration2.json"]]
    assert run_on_ranks(_profile_on_a_rank, 2, tmp_path) == expected


@pytest.mark.parametrize(("options", "error"), [({"active": 0}, ValueError), ({"warmup": 0}, ValueError),
                                                ({"activities": ["cpu"]}, TypeError)])  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(tmp_path, options, error):
    with pytest.raises(error, match="wanted"):
        Profile(tmp_path, **options)
    Profile(tmp_path, activities=[ProfilerActivity.CPU])
