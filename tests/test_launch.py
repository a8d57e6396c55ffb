"""Ranks started from a script or a notebook: what comes back from them, and that nothing else stays.

Functions inside of tests cannot be imported, so their ranks are copies of this process, which are there in half a
second; those of tests/launching.py go to new interpreters.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import OwnError, describe, fail_with_work_left_undone
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from torch import Tensor, nn

from pellucid.engine import Engine, StrategyError
from pellucid.engine.strategies.launch import launch

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class StubbornError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.fixture(autouse=True)
def everything_as_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # not in the folder of one test
    # a folder with a short name, as sockets need, and without other tests' files
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as around:
        around.setenv("TMPDIR", folder)
        around.setattr(tempfile, "tempdir", folder)
        before, others = state(), set(children())
        yield
        gc.collect()
        assert state() == before
        assert set(children()) - others == set()


def state() -> tuple[Any, ...]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith(("pellucid-launch", "pytorch-error"))]
    threads = sorted(thread.name for thread in threading.enumerate())
    return variables, [signal.getsignal(number) for number in SIGNALS], sorted(left), threads


def children() -> list[str]:
    """Return the children of this process, running or not waited for, but for the helper that Python itself keeps."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(f"{folder.name} {(folder / 'cmdline').read_text()}")
    return [child for child in found if "multiprocessing.resource_tracker" not in child]


# ---- in new interpreters


def test_a_function_that_can_be_imported_is_called_in_new_interpreters_and_rank_0s_value_comes_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    batch, net = torch.zeros(3), nn.Linear(2, 2)
    value = launch(describe, batch, net, nprocs=2)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    assert value["process"] == "SpawnProcess"
    assert value["environment"] == dict(zip(names, "00221", strict=True))
    assert value["start method"] == multiprocessing.get_start_method()
    assert (value["threads"], value["total"].item(), value["batch"].tolist()) == (1, 2.0, [1.0, 1.0, 1.0])
    assert batch.tolist() == [0.0, 0.0, 0.0]  # ranks have copies, and share no memory
    assert torch.equal(value["net"].weight, net.weight)


def test_an_error_on_one_rank_ends_the_others_which_wait_for_it():
    begin = time.monotonic()
    with pytest.raises(OwnError, match="rank 1 is tired") as caught:
        launch(fail_with_work_left_undone, nprocs=2)
    assert time.monotonic() - begin < 30
    assert caught.value.args == ("rank 1 is tired", 7)
    shown = str(caught.value.__cause__)
    assert shown.startswith("on rank 1 of 2:\n\nTraceback")
    assert 'raise OwnError("rank 1 is tired", 7)' in shown
    assert "launched.py" not in shown


def test_a_script_from_standard_input_can_call_what_is_imported():
    script = "from os import getpid\nfrom pellucid.engine import launch\nprint(launch(getpid, nprocs=1) > 0)\n"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from pellucid.engine.strategies.launch import launch\ndef f():\n    return 1\nlaunch(f, nprocs=1)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "launch was called while a rank was starting" in done.stderr
    assert "rank 0 of 1 ended with exit code 1 before it could call the function" in done.stderr.splitlines()[-1]


# ---- in copies of this process


def test_what_cannot_be_imported_or_pickled_goes_to_copies_of_this_process():
    lock, big = threading.Lock(), torch.randn(1000, 1000)
    nn.functional.linear(big, big).relu().sum()  # with threads, which the copies must not wait for

    def total() -> tuple[str, Tensor, bool]:
        number = nn.functional.linear(big, big).sum() * 0 + dist.get_rank() + 1
        dist.all_reduce(number)
        return type(multiprocessing.current_process()).__name__, number, lock.locked()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert launch(total, nprocs=2) == ("ForkProcess", torch.tensor(3.0), False)
    finally:
        torch.set_num_threads(threads)


def test_what_ranks_print_appears_here_in_whole_lines(capsys):
    def speak() -> None:
        for line in range(50):
            print("rank", dist.get_rank(), "says", line)
        print("so ends rank", dist.get_rank(), "äöü", file=sys.stderr)
        os.system("echo a shell says so")

    launch(speak, nprocs=2)
    printed, errors = capsys.readouterr()
    expected = [f"rank {rank} says {line}" for rank in range(2) for line in range(50)]
    assert sorted(printed.splitlines()) == sorted([*expected, "a shell says so", "a shell says so"])
    assert sorted(errors.splitlines()) == ["so ends rank 0 äöü", "so ends rank 1 äöü"]


def wait_for_the_others() -> None:
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def complain() -> None:
    raise StubbornError(1, 2)


def run_away() -> None:
    os._exit(3)


def leave() -> None:
    sys.exit(4)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (die, StrategyError, "^rank 1 of 2 was ended by SIGKILL; often that is the system, out of memory$"),
        (complain, StrategyError, "^rank 1 raised StubbornError: 1 and 2 .an error that cannot be pickled"),
        (run_away, StrategyError, "^rank 1 of 2 ended with exit code 3, without an error$"),
        (leave, SystemExit, "^4$"),
    ],
)
def test_however_a_rank_ends_early_the_error_is_its_own(act, error, message):
    def body() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            act()
        wait_for_the_others()

    with pytest.raises(error, match=message):
        launch(body, nprocs=2)


def test_a_rank_that_leaves_in_peace_returns_none():
    assert launch(lambda: sys.exit(), nprocs=1) is None


KEPT: list[Engine] = []


@pytest.mark.parametrize("how", ["returns", "exits"])
def test_a_rank_that_leaves_early_is_missed_by_those_that_go_on_with_it(how):
    def train() -> None:
        model = nn.Linear(3, 1)

        def step(engine: Engine, batch: Tensor) -> None:
            if how == "exits" and (engine.state.rank, engine.state.iteration) == (1, 2):
                sys.exit()
            engine.backward(engine.model(batch).mean())
            engine.update()

        engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        engine.run([torch.ones(2, 3)] * 8)
        KEPT.append(engine)  # and with it the connections
        if engine.state.rank == 0:
            engine.run([torch.ones(2, 3)] * 8, max_epochs=2)

    begin = time.monotonic()
    with pytest.raises(StrategyError, match=r"rank 0 was at .* has lost another rank, which has ended") as caught:
        launch(train, nprocs=2)
    assert time.monotonic() - begin < 30
    assert str(caught.value.__cause__).startswith("on rank 0 of 2, when it had returned on 1:")


def test_a_rank_that_has_nothing_more_to_do_leaves_the_others_to_their_own_work():
    def work() -> int:
        model = nn.Linear(3, 1)
        engine = Engine(lambda engine, batch: engine.model(batch), model, mode="eval")
        engine.run([torch.ones(2, 3)] * 2)
        KEPT.append(engine)
        if engine.state.rank == 1:
            return 0
        time.sleep(0.5)
        alone = Engine(lambda engine, batch: engine.model(batch), model, mode="eval", strategy="single")
        return alone.run([torch.ones(2, 3)] * 3).iteration

    assert launch(work, nprocs=2) == 3


def test_a_value_that_cannot_be_pickled_is_refused():
    with pytest.raises(StrategyError, match="returned a lock on rank 0, which cannot be pickled to be brought back"):
        launch(lambda: threading.Lock(), nprocs=1)


def test_on_a_rank_launch_is_refused():
    with pytest.raises(
        StrategyError, match=r"launch was called on rank 0 of 1 \(RANK, WORLD_SIZE\): this process is a"
    ):
        launch(lambda: launch(die, nprocs=2), nprocs=1)


def test_a_thread_can_launch_too_but_not_two_at_once(monkeypatch):
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(launch(lambda: dist.get_world_size(), nprocs=2)))
    thread.start()
    thread.join(60)
    assert answers == [2]
    monkeypatch.setenv("PELLUCID_LAUNCHED_BY", str(os.getpid()))  # as while that thread was at it
    with pytest.raises(StrategyError, match="launch is at work in this process already, in another thread"):
        launch(die, nprocs=2)


# ---- stopped from outside


def work_until_stopped(stop: signal.Signals, again: bool) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getppid(), stop)
    elif again:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    finally:
        if again:
            os.kill(os.getppid(), stop)


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_reaches_the_ranks_and_is_a_keyboard_interrupt_here_at_once_when_it_comes_twice(again):
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch(lambda: work_until_stopped(signal.SIGINT, again), nprocs=2)
    assert time.monotonic() - begin < 20


def test_another_signal_goes_to_the_handler_that_was_there_before(monkeypatch):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(StrategyError, match="the ranks were stopped, as this process got SIGTERM"):
            launch(lambda: work_until_stopped(signal.SIGTERM, False), nprocs=2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


# ---- refused at once


@pytest.mark.parametrize("nprocs", [0, -1, True, 1.0, "2", None])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(nprocs):
    with pytest.raises(StrategyError, match=f"nprocs={nprocs!r} must be a whole number of ranks, 1 or more"):
        launch(die, nprocs=nprocs)


def test_what_is_no_function_or_no_backend_is_refused():
    with pytest.raises(StrategyError, match="launch calls a function on every rank, got 3"):
        launch(3, nprocs=2)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="backend='smoke': this torch has no backend 'smoke'; it has 'gloo'"):
        launch(die, nprocs=2, backend="smoke")


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        StrategyError, match=r"on rank 1 of 4 .*started by torchrun or by launch. Call the function its"
    ):
        launch(die, nprocs=2)


def test_a_copy_of_a_process_that_has_used_its_accelerator_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(
        StrategyError, match=r"copies of this process, as it cannot be pickled .*cuda has been used in it"
    ):
        launch(lambda: None, nprocs=2)


# ---- in a notebook


CELLS = [
    """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    from IPython.display import display
    from pellucid.engine.strategies.launch import launch

    class Net(torch.nn.Linear):
        pass

    torch.nn.Linear(500, 500)(torch.randn(500, 500)).sum().backward()

    def train(net):
        print("rank", dist.get_rank(), "trains")
        net(torch.randn(500, 2)).sum().backward()
        if dist.get_rank() == 0:
            display("shown")
        return net

    assert type(launch(train, Net(2, 2), nprocs=2)) is Net
    """,
    """
    class Tired(Exception):
        pass

    def fail():
        if dist.get_rank() == 1:
            raise Tired("of this")
        dist.barrier()

    try:
        launch(fail, nprocs=2)
    except Tired as error:
        print(error, "|", error.__cause__)
    """,
    """
    def stop():
        dist.barrier()
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGINT)
        while True:
            dist.all_reduce(torch.ones(1))

    try:
        launch(stop, nprocs=2)
    except KeyboardInterrupt:
        print("stopped")
    """,
]


def test_a_function_of_a_cell_trains_prints_fails_and_is_stopped():
    notebook = new_notebook(cells=[new_code_cell("\n".join(line[4:] for line in cell.split("\n"))) for cell in CELLS])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    outputs = [[output.text for output in cell.outputs] for cell in notebook.cells]
    lines = ["".join(texts).splitlines() for texts in outputs]
    assert sorted(lines[0]) == ["rank 0 trains", "rank 1 trains", "shown"]
    assert lines[1][0] == "of this | on rank 1 of 2:"
    assert 'raise Tired("of this")' in "".join(lines[1])
    assert lines[2] == ["stopped"]
