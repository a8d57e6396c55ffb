"""``kill -9`` at random moments, most of them in the middle of a save: what is there can always be resumed, exactly."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import ITERATIONS, Training, differences, go_on

from pellucid.engine import Events, list_checkpoints, resume

KILLS = 30
NEVER = Events.ITERATION_COMPLETED(once=10**6)
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def starter() -> Any:
    context = multiprocessing.get_context("forkserver")
    # what takes seconds to import
    context.set_forkserver_preload(["ignite.metrics", "pellucid.handlers", "safetensors.torch", "torch._dynamo"])
    return context


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    training = Training(tmp_path_factory.mktemp("undisturbed"), NEVER)
    training.run()
    return training.outcome()


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.exists() else set()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_that_is_killed_again_and_again_ends_the_same(tmp_path, starter, undisturbed, in_background):
    chance = random.Random(in_background)
    kills, finished, moments = 0, 0, set()
    while kills < KILLS // 2 or not finished:
        directory, result = tmp_path / str(finished), tmp_path / f"{finished}.pt"
        process = starter.Process(target=go_on, args=(directory, in_background, result))
        before = names(directory)
        process.start()
        begun = time.monotonic()
        while process.is_alive() and time.monotonic() - begun < 60:
            if kills < KILLS // 2 and names(directory) != before:
                time.sleep(chance.uniform(0.0, 0.2))
                process.kill()
                break
            time.sleep(0.001)
        process.join(60)
        if process.exitcode == 0:
            found = list(differences(torch.load(result, weights_only=True), undisturbed))
            # one that was killed after its last save has no step left to make, and draws nothing
            assert [where for where in found if where != "/random"] == []
            finished += 1
            continue
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        moments.add(any(path.name.startswith(".writing-") for path in directory.iterdir()))
        found = resume(Training(tmp_path / "unused", NEVER).engine, directory)
        assert found is None or (found.passed_over == {} and 1 <= found.iteration <= ITERATIONS)
    assert True in moments, "some were killed while they were saving"
    for number in range(finished):
        left = names(tmp_path / str(number))
        assert len(left) <= 2, "what was half-written is gone, but for what the last kill has left"


RANKS = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from test_resume_on_ranks import make_training, outcome
from pellucid.engine import Events, resume
directory, result = sys.argv[2:]
engine, ema, loader = make_training(directory, "ddp", Events.ITERATION_COMPLETED)
resume(engine, directory)
engine.run(loader, max_epochs=6)
found = outcome(engine, ema)
if engine.state.rank == 0:
    torch.save(found, result)
"""


def start_ranks(folder: Path, directory: Path, result: Path) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [str(script), str(TESTS), str(directory), str(result)]
    return subprocess.Popen(
        [*torchrun, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks in /proc")
def test_ranks_that_are_killed_end_the_same(tmp_path):
    wanted = start_ranks(tmp_path, tmp_path / "undisturbed", tmp_path / "undisturbed.pt")
    chance = random.Random(3)
    for victim in (0, 1):
        job = start_ranks(tmp_path, tmp_path / "killed", tmp_path / "killed.pt")
        before = len(list_checkpoints(tmp_path / "killed")) and list_checkpoints(tmp_path / "killed")[0].iteration
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = list_checkpoints(tmp_path / "killed")
            if found and found[0].iteration > before + 3:
                break
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(ranks_of(job)[victim], signal.SIGKILL)
        assert job.wait(60) != 0
    assert start_ranks(tmp_path, tmp_path / "killed", tmp_path / "killed.pt").wait(90) == 0
    assert wanted.wait(90) == 0
    outcomes = [torch.load(tmp_path / name, weights_only=True) for name in ("killed.pt", "undisturbed.pt")]
    assert list(differences(*outcomes)) == []
