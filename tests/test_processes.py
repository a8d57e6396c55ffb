"""Who a process is among those of a job, and how a job ends: torchrun's environment, and torchrun itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from pellucid.engine import StrategyError
from pellucid.engine.strategies.processes import Processes, are_several, check_backend, join, local_device

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT_SEC = 60  # of a job that takes 4 s on a machine with nothing else to do


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def as_rank(monkeypatch):
    def set_variables(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def one_gpu(monkeypatch):
    """Make torch see one GPU, as far as it is asked for the number."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


# ---- places


def test_without_an_environment_there_is_one_process():
    assert join() == Processes(0, 0, 1, 1)
    assert not are_several()
    assert not dist.is_initialized()


def test_a_job_of_one_process_needs_no_group(as_rank):
    as_rank(RANK=0, WORLD_SIZE=1)
    assert join() == Processes(0, 0, 1, 1)
    assert not dist.is_initialized()


def place_in_a_group() -> tuple[Processes, Processes, bool]:
    with_variables = join("gloo")
    for name in VARIABLES:
        os.environ.pop(name, None)
    return with_variables, join(), are_several()


def test_a_group_that_exists_is_used_with_and_without_an_environment():
    for rank, places in enumerate(run_on_ranks(place_in_a_group, 2)):
        assert places == (Processes(rank, rank, 2, 2), Processes(rank, rank, 2, 2), True)


# ---- environments that make no sense


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 1}, "the environment has RANK=1 but no WORLD_SIZE: start the ranks with torchrun, which sets both"),
        ({"WORLD_SIZE": 2}, "the environment has WORLD_SIZE=2 but no RANK"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 does not fit WORLD_SIZE=2 in the environment: ranks count from 0"),
        ({"RANK": -1, "WORLD_SIZE": 2}, "RANK=-1 does not fit WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK='one' is no whole number: torchrun sets it"),
        (
            {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
            "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2 and WORLD_SIZE=4 do not fit",
        ),
        (
            {"RANK": 1, "WORLD_SIZE": 2},
            r"this is rank 1 of 2 \(RANK, WORLD_SIZE\), but the environment has no MASTER_ADDR and no MASTER_PORT",
        ),
        (
            {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "here"},
            "the environment has no MASTER_PORT, where the ranks meet",
        ),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(as_rank, variables, message):
    as_rank(**variables)
    with pytest.raises(StrategyError, match=message):
        join()
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["nccl", "smoke", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_this_torch_lacks_is_refused(as_rank, backend):
    as_rank(RANK=0, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=1)
    with pytest.raises(StrategyError, match=f"backend={backend!r}: this torch has no backend '[a-z]+'; it has 'gloo'"):
        join(backend)
    with pytest.raises(StrategyError, match="backend=3 is no name of a backend"):
        check_backend(3)  # type: ignore[arg-type]


def test_a_backend_that_is_for_another_device_is_refused(as_rank, monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    as_rank(RANK=0, WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=1)
    with pytest.raises(StrategyError, match="backend='nccl' is for cuda, but rank 0 works on 'cpu': leave backend out"):
        join("nccl")


# ---- devices


def test_more_ranks_than_devices_are_refused(as_rank, one_gpu):
    as_rank(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2, MASTER_ADDR="localhost", MASTER_PORT=1)
    with pytest.raises(
        StrategyError, match=r"2 ranks were started on this machine, which has 1 cuda device\(s\): start 1"
    ):
        join()
    assert not dist.is_initialized()


def test_a_rank_has_the_device_of_its_number_on_this_machine(one_gpu, monkeypatch):
    assert local_device(Processes(3, 0, 4, 1)) == torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_device(Processes(6, 2, 8, 4)) == torch.device("cuda:2")


def test_where_nobody_says_how_many_ranks_are_here_there_is_one_for_each_device(as_rank, one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    as_rank(RANK=6, WORLD_SIZE=8)
    with pytest.raises(StrategyError, match="this is rank 6 of 8"):
        join()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 6)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert join() == Processes(6, 2, 8, 4)


def test_ranks_work_on_the_cpu_if_their_group_is_for_it_alone(one_gpu, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    assert local_device(Processes(1, 1, 2, 2)) == torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert local_device(Processes(0, 0, 1, 1)) == torch.device("cuda:0")


# ---- jobs


SCRIPT = r"""
import atexit, os, sys, time
import torch, torch.distributed as dist

def report():
    sys.stdout.write(f"at the end {dist.is_initialized()}\n")

what = sys.argv[1]
atexit.register(report)
if what == "by script":
    dist.init_process_group("gloo")

from pellucid.engine.strategies.peers import Peers
from pellucid.engine.strategies.processes import join

place = join(timeout_sec=1000)
peers = Peers()
sys.stdout.write(f"{place} pid {os.getpid()}\n")
sys.stdout.flush()
if place.rank == 0 and what == "stop":
    dist.all_reduce(torch.ones(1))
elif place.rank == 1 and what == "error":
    peers.start("a round", [1])
    raise ValueError("rank 1 is tired")
elif what == "error":
    peers.barrier()
elif place.rank == 1 and what == "exit":
    work = dist.all_reduce(torch.ones(1), async_op=True)
    sys.exit(3)
elif what in ("exit", "stop"):
    time.sleep(1000)
"""


class Job:
    """A torchrun with the script, which must end."""

    def __init__(self, folder: Path, what: str, *options: str) -> None:
        script = folder / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), what]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait(self, printed: str = "") -> tuple[int, list[str], str]:
        """Return the exit code, what was printed, and the errors."""
        try:
            rest, errors = self.process.communicate(timeout=TIMEOUT_SEC)
        finally:
            self.process.terminate()  # which ends the ranks too
        return self.process.returncode, sorted((printed + rest).splitlines()), errors


HERE = ("--standalone", "--nproc-per-node", "2")


def rank_lines(lines: list[str]) -> list[str]:
    return [line.partition(" pid ")[0] for line in lines if line.startswith("Processes")]


def assert_ended(lines: list[str]) -> None:
    pids = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("Processes")]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_on_two_nodes_ranks_know_their_places_and_only_a_group_made_by_join_is_ended_with_the_program(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "1", "--rdzv-endpoint", f"localhost:{port}")
    nodes = [
        Job(tmp_path, what, "--nnodes", "2", "--local-addr", "localhost", *meeting) for what in ("by join", "by script")
    ]
    answers = [node.wait() for node in nodes]
    assert [code for code, _, _ in answers] == [0, 0], [errors for _, _, errors in answers]
    lines = sorted(line for _, printed, _ in answers for line in printed)
    assert rank_lines(lines) == [str(Processes(rank, 0, 2, 1)) for rank in range(2)]
    assert lines[2:] == ["at the end False", "at the end True"]


@pytest.mark.parametrize(("what", "shown"), [("error", "ValueError: rank 1 is tired"), ("exit", "exitcode  : 3")])
def test_a_rank_that_ends_while_others_would_have_to_answer_it_ends_the_job(tmp_path, what, shown):
    code, lines, errors = Job(tmp_path, what, *HERE).wait()
    assert code != 0
    assert shown in errors
    cause = errors.partition("Root Cause (first observed failure)")[2]
    assert "rank      : 1" in cause, "also where the other has failed in turn"
    assert_ended(lines)


def test_ctrl_c_ends_the_job(tmp_path):
    job = Job(tmp_path, "stop", *HERE)
    assert job.process.stdout is not None
    printed = job.process.stdout.readline() + job.process.stdout.readline()
    job.process.send_signal(signal.SIGINT)
    code, lines, _ = job.wait(printed)
    assert code != 0
    assert_ended(lines)
