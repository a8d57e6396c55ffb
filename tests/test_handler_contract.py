"""The contract of handlers: all of ours keep it, and each way of breaking it is caught by the check meant for it."""

from __future__ import annotations

import io
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pellucid.handlers.testing
from pellucid.engine import Engine, Events
from pellucid.handlers import (
    EMA,
    Attachable,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    GradientClip,
    History,
    JSONLinesLogger,
    LivePlot,
    LRSchedule,
    MLflowLogger,
    ModelSummary,
    Predictions,
    Preemption,
    Profile,
    ProgressBar,
    SamplePredictions,
    StatefulHandler,
    TensorBoardLogger,
    TerminateOnNan,
    Throughput,
    TimeLimit,
    Timing,
    Validate,
    WandbLogger,
)
from pellucid.handlers.testing import (
    ContractError,
    check_comes_off,
    check_copes_with_errors,
    check_handler,
    check_inner_runs,
    check_keeps_nothing_alive,
    check_looking_changes_nothing,
    check_resumes,
    check_state_is_plain,
)

Make = Callable[[Engine, Path], Any]


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)


def evaluator_of(trainer: Engine) -> Engine:
    return Engine(lambda engine, batch: engine.model(batch[0]), trainer.model, mode="eval")


BATCHES = [(torch.ones(2, 4), torch.zeros(2))]
OURS: dict[type, tuple[Make, dict[str, Any]]] = {
    Checkpoint: (lambda engine, folder: Checkpoint(folder), {"ignore": ["run"]}),
    CSVLogger: (lambda engine, folder: CSVLogger(folder / "log.csv", output="loss", every=1), {"ignore": ["position"]}),
    EarlyStopping: (lambda engine, folder: EarlyStopping("score", mode="min", patience=5), {}),
    EMA: (lambda engine, folder: EMA(decay=0.9), {}),
    GradientClip: (lambda engine, folder: GradientClip(max_norm=0.1), {"changes_training": True}),
    History: (lambda engine, folder: History(), {}),
    JSONLinesLogger: (
        lambda engine, folder: JSONLinesLogger(folder / "log.jsonl", output="loss", every=2),
        {"ignore": ["position"]},
    ),
    LivePlot: (lambda engine, folder: LivePlot(), {}),
    LRSchedule: (lambda engine, folder: LRSchedule(schedule, every="update"), {"changes_training": True}),
    MLflowLogger: (lambda engine, folder: MLflowLogger((folder.parent / "store").as_uri()), {"ignore": ["run_id"]}),
    ModelSummary: (lambda engine, folder: ModelSummary(example=torch.ones(2, 4)), {}),
    Preemption: (lambda engine, folder: Preemption(), {}),
    Profile: (lambda engine, folder: Profile(folder, wait=1, warmup=1, active=1), {}),
    ProgressBar: (lambda engine, folder: ProgressBar(), {}),
    TensorBoardLogger: (lambda engine, folder: TensorBoardLogger(folder, output="loss", every=1), {}),
    TerminateOnNan: (lambda engine, folder: TerminateOnNan(), {}),
    Throughput: (lambda engine, folder: Throughput(every=2), {"ignore": ["throughput/*"]}),
    TimeLimit: (lambda engine, folder: TimeLimit(1000), {"ignore": ["elapsed_sec"]}),
    Timing: (lambda engine, folder: Timing(), {}),
    Validate: (lambda engine, folder: Validate(evaluator_of(engine), BATCHES, prefix="val/"), {}),
}
# the same in other ways of use
VARIANTS: dict[str, tuple[Make, dict[str, Any]]] = {
    "the best are kept": (lambda engine, folder: Checkpoint(folder, monitor="score", mode="min"), {"ignore": ["run"]}),
    "saved in the background": (
        lambda engine, folder: Checkpoint(folder, Events.ITERATION_COMPLETED(every=2), async_save=True),
        {"ignore": ["run"]},
    ),
    "it stops the run": (
        lambda engine, folder: EarlyStopping("loss", mode="min", patience=2),
        {"changes_training": True},
    ),
    "the time is up": (
        lambda engine, folder: TimeLimit(1e-9),
        {"changes_training": True, "ignore": ["elapsed_sec"]},
    ),
    "rates by epochs": (lambda engine, folder: LRSchedule(schedule, every="epoch"), {"changes_training": True}),
    "rates by a score": (lambda engine, folder: LRSchedule(plateau, monitor="score"), {"changes_training": True}),
    "validation in each iteration": (
        lambda engine, folder: Validate(evaluator_of(engine), BATCHES, every=Events.ITERATION_COMPLETED),
        {},
    ),
}
# Predictions is for evaluations, which are never taken up again; SamplePredictions is held to it in its own tests
ELSEWHERE = {Predictions, SamplePredictions}


def test_every_handler_of_ours_is_held_to_the_contract():
    public = [getattr(pellucid.handlers, name) for name in pellucid.handlers.__all__]
    handlers = {one for one in public if isinstance(one, type) and issubclass(one, Attachable)} - {Attachable}
    assert handlers == {*OURS, WandbLogger, *ELSEWHERE}


@pytest.mark.filterwarnings("ignore:Profiler")
@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_our_handlers_keep_the_contract(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    make, options = OURS[kind]
    check_handler(lambda engine: make(engine, Path(tempfile.mkdtemp(dir=tmp_path))), **options)


@pytest.mark.parametrize("use", VARIANTS)
def test_they_keep_it_in_other_ways_of_use_too(use, tmp_path):
    make, options = VARIANTS[use]
    check_handler(lambda engine: make(engine, Path(tempfile.mkdtemp(dir=tmp_path))), **options)


def test_one_that_starts_a_service_for_each_run_keeps_what_takes_few_runs(tmp_path):
    def make(engine: Engine) -> Any:
        return WandbLogger("contract", mode="offline", directory=tempfile.mkdtemp(dir=tmp_path))

    check_comes_off(make)
    check_state_is_plain(make, ignore=["run_id"])
    check_keeps_nothing_alive(make)
    check_inner_runs(make, ignore=["run_id"])
    check_looking_changes_nothing(make)


# ---------------------------------------------------------------- handlers that break it


class Counter(Attachable):
    """Counts iterations; keeps the contract."""

    def __init__(self) -> None:
        self.count = 0

    def subscriptions(self) -> Any:
        return ((Events.ITERATION_COMPLETED, self.add),)

    def add(self, engine: Engine, batch: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class KeepsTheEngine(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        self.engine = engine


class KeepsTheBatch(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        self.batch = batch


class MakesACycleWithTheModel(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        engine.model.handler, self.model = self, engine.model


class Forgets(Counter):
    def load_state_dict(self, state: Any) -> None:
        pass


class BeginsAfresh(Counter):
    def subscriptions(self) -> Any:
        return (*super().subscriptions(), (Events.STARTED, self.begin))

    def begin(self, engine: Engine, batch: Any) -> None:
        self.count = 0


class SavesAnObject(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "self": Path("anything")}


class Draws(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        torch.rand(())


class TouchesWeights(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        with torch.no_grad():
            engine.model[0].weight.mul_(1.0001)


class Stays(Counter):
    def detach(self, engine: Engine) -> None:
        pass


class AttachesToNothing(Counter):
    def attach(self, engine: Engine) -> Any:
        return self


class ReturnsNothing(Counter):
    def attach(self, engine: Engine) -> Any:
        super().attach(engine)


class IsClosedOnlyAtTheEnd(Counter):
    is_open = False

    def subscriptions(self) -> Any:
        return ((Events.STARTED, self.open), (Events.COMPLETED, self.close))

    def open(self, engine: Engine, batch: Any) -> None:
        if self.is_open:
            raise RuntimeError("it is open already")
        self.is_open = True

    def close(self, engine: Engine, batch: Any) -> None:
        self.is_open = False


class ClosesWhatIsNotOpen(Counter):
    def subscriptions(self) -> Any:
        return ((Events.STARTED, self.open), (Events.COMPLETED | Events.EXCEPTION_RAISED, self.close))

    def open(self, engine: Engine, batch: Any) -> None:
        self.file = io.StringIO()

    def close(self, engine: Engine, batch: Any) -> None:
        self.file.close()


class Exits(Counter):
    def subscriptions(self) -> Any:
        return ((Events.EXCEPTION_RAISED, self.exit),)

    def exit(self, engine: Engine, batch: Any) -> None:
        raise SystemExit(1)


class Swallows(Counter):
    def attach(self, engine: Engine) -> Any:
        engine.ignite._handle_exception = lambda error: None
        return super().attach(engine)


class LeavesAHook(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        if not self.count:
            engine.model.register_forward_hook(lambda *_: None)
        super().add(engine, batch)


class CannotBeLoaded(Attachable):
    def subscriptions(self) -> Any:
        return ((Events.STARTED, self.begin),)

    def begin(self, engine: Engine, batch: Any) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}


class RecordsAfresh(Attachable):
    """Records how many iterations this run has had; keeps no state."""

    def __init__(self) -> None:
        self.count = 0

    def subscriptions(self) -> Any:
        return ((Events.ITERATION_COMPLETED, self.add),)

    def add(self, engine: Engine, batch: Any) -> None:
        self.count += 1
        engine.record({"count": self.count})


class LeavesTheModelInEvalMode(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        engine.model.eval()


class DrawsInPython(Counter):
    def add(self, engine: Engine, batch: Any) -> None:
        random.random()


class StopsWhatItIsAttachedTo(Counter):
    """Stops the outer run when inner ones have taken too many iterations."""

    def add(self, engine: Engine, batch: Any) -> None:
        super().add(engine, batch)
        if self.count > 10:
            engine.terminate()


class CountsForwards(Counter):
    """Also those of runs inside."""

    def subscriptions(self) -> Any:
        return ((Events.STARTED, self.begin), (Events.COMPLETED, self.end))

    def begin(self, engine: Engine, batch: Any) -> None:
        self.hook = engine.model.register_forward_hook(self.count_one)

    def count_one(self, *_: Any) -> None:
        self.count += 1

    def end(self, engine: Engine, batch: Any) -> None:
        self.hook.remove()


class OpensWhatStaysOpen(Counter):
    """Closes it only where a run ends well, so that an error leaves it open."""

    def subscriptions(self) -> Any:
        return ((Events.STARTED, self.open), (Events.COMPLETED, self.close))

    def open(self, engine: Engine, batch: Any) -> None:
        raise NotImplementedError

    def close(self, engine: Engine, batch: Any) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        self.close(None, None)  # at the end of this test


class LeavesAFileOpen(OpensWhatStaysOpen):
    def open(self, engine: Engine, batch: Any) -> None:
        self.close(engine, batch)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def close(self, engine: Any, batch: Any) -> None:
        if hasattr(self, "file"):
            self.file.close()


class LeavesAThread(OpensWhatStaysOpen):
    def open(self, engine: Engine, batch: Any) -> None:
        self.close(engine, batch)
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.is_over.wait, name="watcher")
        self.thread.start()

    def close(self, engine: Any, batch: Any) -> None:
        if hasattr(self, "thread"):
            self.is_over.set()
            self.thread.join()


class LeavesASignalHandler(OpensWhatStaysOpen):
    def open(self, engine: Engine, batch: Any) -> None:
        signal.signal(signal.SIGUSR2, print)

    def close(self, engine: Any, batch: Any) -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


class LeavesAHookAfterAnError(CountsForwards):
    """It removes the last one it has made, at the end of a run that ends well."""


class LeavesALayerInEvalMode(Counter):
    """Between two iterations a layer is in eval mode, and after an error there it stays so."""

    def subscriptions(self) -> Any:
        return (
            (Events.ITERATION_COMPLETED, self.freeze),
            (Events.ITERATION_STARTED | Events.COMPLETED, self.thaw),
        )

    def freeze(self, engine: Engine, batch: Any) -> None:
        engine.model[2].eval()

    def thaw(self, engine: Engine, batch: Any) -> None:
        engine.model[2].train()


BROKEN = [
    (check_keeps_nothing_alive, KeepsTheEngine, "keeps the engine alive"),
    (check_keeps_nothing_alive, KeepsTheBatch, "keeps a batch alive"),
    (check_keeps_nothing_alive, MakesACycleWithTheModel, "keeps the (engine|model) alive"),
    (check_state_is_plain, Forgets, r"takes up another state: \['count'\] is 0 and not 6"),
    (check_state_is_plain, SavesAnObject, "a weights-only loader does not read"),
    (check_resumes, Forgets, "taken up again in new objects ends with another state_dict"),
    (check_resumes, BeginsAfresh, "taken up again in the same objects ends with another state_dict"),
    (check_looking_changes_nothing, Draws, "does not end as one without it"),
    (check_looking_changes_nothing, TouchesWeights, "does not end as one without it"),
    (check_comes_off, Stays, r"detach\(\) leaves handlers behind"),
    (check_comes_off, AttachesToNothing, r"attach\(\) has attached nothing"),
    (check_comes_off, ReturnsNothing, r"attach\(\) must return the handler itself"),
    (check_comes_off, LeavesAHook, r"detach\(\) leaves hooks of the model behind"),
    (check_copes_with_errors, IsClosedOnlyAtTheEnd, "the run after a .* fails: RuntimeError"),
    (check_copes_with_errors, ClosesWhatIsNotOpen, "STARTED attached before it it raises an error itself: Attribute"),
    (check_copes_with_errors, Exits, "raises an error itself: SystemExit"),
    (check_copes_with_errors, Swallows, "does not leave the run"),
    (check_state_is_plain, CannotBeLoaded, r"load_state_dict\(\) is missing"),
    (check_resumes, RecordsAfresh, "in new objects ends with another series of records"),
    (check_looking_changes_nothing, LeavesTheModelInEvalMode, "does not end as one without it"),
    (check_looking_changes_nothing, DrawsInPython, r"\['random state'\]\['Python'\]"),
    (
        check_copes_with_errors,
        LeavesAFileOpen,
        "in the step leaves behind the file /.*: close on every way out of a run",
    ),
    (check_copes_with_errors, LeavesAThread, "in the step leaves behind the thread 'watcher'"),
    (check_copes_with_errors, LeavesASignalHandler, r"leaves behind <built-in function print> for signal \d+"),
    (check_copes_with_errors, LeavesAHookAfterAnError, "in the step leaves hooks of the model behind"),
    (check_copes_with_errors, LeavesALayerInEvalMode, r"ends the run with another outcome .*: \['modes'\]"),
    (check_inner_runs, StopsWhatItIsAttachedTo, "attached to the engine of inner runs too"),
    (check_inner_runs, CountsForwards, r"ends with another state_dict\(\)"),
]


@pytest.mark.parametrize(("check", "broken", "message"), BROKEN, ids=lambda one: getattr(one, "__name__", None))
def test_a_handler_that_breaks_it_is_caught(check, broken, message):
    with pytest.raises(ContractError, match=message):
        check(lambda engine: broken())
    with pytest.raises(ContractError):
        check_handler(lambda engine: broken())


class OfNoBase:
    """Has what a ``StatefulHandler`` has, and derives from nothing."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, engine: Engine) -> Any:
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.add)
        return self

    def detach(self, engine: Engine) -> None:
        engine.remove_event_handler(self.add, Events.ITERATION_COMPLETED)

    def add(self, engine: Engine, batch: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.count = state_dict["count"]


def test_one_that_derives_from_nothing_is_held_to_the_same():
    assert isinstance(OfNoBase(), StatefulHandler)
    check_handler(lambda engine: OfNoBase())


def test_what_differs_from_run_to_run_may_be_left_out():
    with pytest.raises(ContractError, match="another series of records"):
        check_handler(lambda engine: RecordsAfresh())
    check_handler(lambda engine: RecordsAfresh(), ignore=["cou*"])


def test_the_checks_need_no_test_framework():
    source = Path(pellucid.handlers.testing.__file__).parent
    names = {word for file in ("testing.py", "_contract.py") for word in (source / file).read_text("utf-8").split()}
    assert not {"pytest", "unittest", "hypothesis"} & names


def test_one_that_keeps_it_passes():
    check_handler(lambda engine: Counter())


def test_one_that_changes_the_training_may_say_so():
    check_handler(lambda engine: TouchesWeights(), changes_training=True)
