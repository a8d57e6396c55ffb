"""``Preemption``: a signal ends the run in good order, and a second one ends the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pellucid.engine import Engine, Events, HandlerError, list_checkpoints, resume
from pellucid.handlers import Checkpoint, Preemption

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
NEVER = Events.ITERATION_COMPLETED(once=10**6)


def make_engine(directory: Path, **options: Any) -> Engine:
    engine = Engine(lambda engine, batch: None, nn.Linear(1, 1))
    Checkpoint(directory, NEVER, **options).attach(engine)
    return engine


def send(engine: Engine, batch: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(one) for one in SIGNALS]
    yield
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.GET_BATCH_STARTED])
@pytest.mark.parametrize("attach_first", [False, True])
def test_a_signal_ends_the_run_after_its_iteration_with_a_checkpoint(tmp_path, event, attach_first):
    engine = make_engine(tmp_path)
    preemption = Preemption()
    if attach_first:
        preemption.attach(engine)
    engine.add_event_handler(event(once=3), send)
    if not attach_first:
        preemption.attach(engine)
    result = engine.run(range(10))
    late = event is Events.GET_BATCH_STARTED  # of the fourth, as Ignite counts
    assert result.iteration == (4 if late else 3) and result.stop_reason == "terminated"
    assert (preemption.received, preemption.exit_code) == (signal.SIGTERM, 143)
    assert [one.iteration for one in list_checkpoints(tmp_path)] == [result.iteration]
    again = make_engine(tmp_path)
    resume(again, tmp_path)
    assert again.run(range(10)).iteration == 10


def test_where_only_the_best_are_kept_a_signal_saves_all_the_same(tmp_path):
    engine = make_engine(tmp_path, monitor="score", mode="max", keep_last=False, first_epoch=9)
    Preemption((signal.SIGTERM,)).attach(engine)
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), send)
    engine.run(range(10))
    assert [one.iteration for one in list_checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize("how", ["completes", "terminates", "fails", "is interrupted", "pauses"])
def test_however_a_run_ends_the_handlers_are_put_back(tmp_path, how):
    engine = make_engine(tmp_path)
    preemption = Preemption().attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def end(engine: Engine, batch: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        if how == "terminates":
            engine.terminate()
        elif how == "pauses":
            engine.interrupt()
        elif how != "completes":
            raise KeyError if how == "fails" else KeyboardInterrupt

    if how in ("fails", "is interrupted"):
        with pytest.raises((KeyError, KeyboardInterrupt)):
            engine.run(range(3))
    else:
        engine.run(range(3))
    assert preemption.exit_code == 0


def test_the_users_own_handler_is_there_again_for_a_second_signal(tmp_path):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        engine = make_engine(tmp_path)
        Preemption().attach(engine)
        engine.add_event_handler(Events.ITERATION_STARTED(once=2), send)
        engine.add_event_handler(Events.ITERATION_STARTED(once=2), send)
        assert engine.run(range(5)).iteration == 2
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("is_inner", [False, True])
def test_an_outer_and_an_inner_run_both_stop(tmp_path, is_inner):
    inner, outer = make_engine(tmp_path / "inner"), make_engine(tmp_path / "outer")
    inside, outside = Preemption().attach(inner), Preemption().attach(outer)
    inner.add_event_handler(Events.ITERATION_STARTED(once=5), send if is_inner else lambda engine, batch: None)
    if not is_inner:
        outer.add_event_handler(Events.ITERATION_COMPLETED(once=2), send)
    outer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: inner.run(range(3), max_epochs=9))
    outer.run(range(10))
    assert outer.state.iteration == (1 if is_inner else 2) and outer.state.stop_reason == "terminated"
    assert outside.received == signal.SIGTERM and list_checkpoints(tmp_path / "outer")
    assert (inside.received, inner.state.iteration) == ((signal.SIGTERM, 5) if is_inner else (None, 27))


def test_two_on_one_engine_both_hear(tmp_path):
    engine = make_engine(tmp_path)
    both = Preemption().attach(engine), Preemption((signal.SIGTERM,)).attach(engine)
    engine.add_event_handler(Events.ITERATION_STARTED(once=2), send)
    engine.run(range(5))
    assert [one.exit_code for one in both] == [143, 143]
    engine.run(range(5), max_epochs=2)
    assert [one.exit_code for one in both] == [0, 0]


def test_a_handler_that_was_installed_during_the_run_stays(tmp_path):
    engine = make_engine(tmp_path)
    Preemption((signal.SIGTERM,)).attach(engine)
    before = signal.getsignal(signal.SIGTERM)

    def own(number: int, frame: Any) -> None:
        pass

    try:
        engine.add_event_handler(
            Events.ITERATION_STARTED(once=2), lambda engine, batch: signal.signal(signal.SIGTERM, own)
        )
        engine.run(range(5))
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_in_another_thread_is_refused(tmp_path):
    engine = make_engine(tmp_path)
    Preemption().attach(engine)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            engine.run([0])
        except HandlerError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "only a program's main thread" in str(errors[0])


def test_without_a_checkpoint_it_says_so(caplog):
    engine = Engine(lambda engine, batch: None)
    Preemption().attach(engine)
    engine.run([0])
    assert "attached without a Checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("signals", "says"), [((), "would hear nothing"), ((999,), "999, which is no signal"), ((9,), "SIGKILL cannot be")]
)
def test_signals_that_make_no_sense_are_refused(signals, says):
    with pytest.raises(ValueError, match=says):
        Preemption(signals)


SCRIPT = """
import sys, time
from torch import nn
from pellucid.engine import Engine, Events, resume
from pellucid.handlers import Checkpoint, Preemption

def step(engine, batch):
    print(engine.state.iteration, flush=True)
    time.sleep(0.3)

engine = Engine(step, nn.Linear(1, 1))
Checkpoint(sys.argv[1], Events.COMPLETED).attach(engine)
preemption = Preemption().attach(engine)
resume(engine, sys.argv[1])
engine.run(range(100))
sys.exit(preemption.exit_code)
"""


class Program:
    """The script as a program, at work on its first step."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", SCRIPT, str(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first = int(self.process.stdout.readline())

    def end_by(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)
        self.process.communicate(timeout=30)
        return self.process.returncode


def test_a_program_ends_with_its_exit_code_and_goes_on_when_it_is_started_again(tmp_path):
    assert Program(tmp_path).end_by(signal.SIGTERM) == 143
    done = list_checkpoints(tmp_path)[0].iteration
    program = Program(tmp_path)
    assert program.first == done + 1
    assert program.end_by(signal.SIGTERM, signal.SIGTERM) == -signal.SIGTERM, "a second one ends at once"
    assert list_checkpoints(tmp_path)[0].iteration == done
