"""Stopping and going on: every row of the table in ``docs/stopping.md``, whole traces compared."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader
from traces import make_engine, names_of, seen_by, trace_of
from training import Boom, Training, assert_equal_to_the_bit

from pellucid.engine import Engine, Events, RunError

PAGE = Path(__file__).parents[1] / "docs" / "stopping.md"
DATA = ["a", "b", "c"]
STEP_PLACES = ("the step before its update", "the step after its update")
PLACES = (*(event.name for event in Events), *STEP_PLACES)
OUTSIDE_OF_PLAIN_RUNS = {
    "BACKWARD_COMPLETED", "UPDATE_STARTED", "UPDATE_COMPLETED", "METRICS_RECORDED",
    "TERMINATE_SINGLE_EPOCH", "TERMINATE", "INTERRUPT", "EXCEPTION_RAISED",
}  # fmt: skip
LEADS_TO = {  # a stop in ITERATION_COMPLETED leads to the stopping event of its own
    "TERMINATE_SINGLE_EPOCH": "terminate_epoch",
    "TERMINATE": "terminate",
    "INTERRUPT": "interrupt",
    "EXCEPTION_RAISED": "an error",
}


class Failure(Exception):
    """An error of the user's."""


def fail(error):
    raise error


VERBS = {
    "terminate": lambda engine: engine.terminate(),
    "terminate, skipping": lambda engine: engine.terminate(skip_completed=True),
    "terminate_epoch": lambda engine: engine.terminate_epoch(),
    "terminate_epoch, skipping": lambda engine: engine.terminate_epoch(skip_epoch_completed=True),
    "interrupt": lambda engine: engine.interrupt(),
    "an error": lambda engine: fail(Failure("asked for")),
    "Ctrl-C": lambda engine: fail(KeyboardInterrupt("asked for")),
}


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    verb: str
    place: str
    events: tuple[str, ...]
    counters: str
    ending: str
    after: str
    going_on: str

    @property
    def id(self):
        return f"{self.verb} in {self.place}"


def cells_of(line):
    return [cell.strip() for cell in line.replace("`", "").strip().strip("|").split("|")]


def rows_of(page):
    """The rows of the table, one for each verb and place."""
    table = page[page.index("| asked for | in |") :]
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            return
        verbs, places, events, *rest = cells_of(line)
        places = ", ".join(STEP_PLACES).join(re.split(r"the step(?=,|$)", places))
        for verb in verbs.split(", "):
            for place in places.split(", "):
                yield from variants(Row(verb, place, tuple(events.split(", ")), *rest))


def variants(row):
    """The row as it is without brackets and, for a verb that can skip, without what is in them."""
    yield replace(row, events=tuple(name.strip("()") for name in row.events))
    if row.verb in ("terminate", "terminate_epoch"):
        shorter = tuple(name for name in row.events if not name.startswith("("))
        yield replace(row, verb=f"{row.verb}, skipping", events=shorter or ("none",))


ROWS = list(rows_of(PAGE.read_text(encoding="utf-8")))
ERRORS = {row.place: row for row in ROWS if row.verb == "an error"}


def test_the_table_has_every_verb_in_every_event_and_in_the_step_once():
    assert sorted(row.id for row in ROWS) == sorted(f"{verb} in {place}" for verb in VERBS for place in PLACES)


# ---------------------------------------------------------------------- the run that is stopped


class Stopped:
    """The run of the table, asked to stop at one place, and the traces and batches of it."""

    def __init__(self, verb=None, place=None):
        self.verb = verb
        self.place = place
        self.left = [LEADS_TO[place], verb] if place in LEADS_TO else [verb]
        self.trained = []  # the batches that updates were made with
        model = nn.Linear(1, 1)
        self.engine = Engine(self.step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        self.engine.optimizer.register_step_post_hook(lambda *_: self.trained.append(self.batch))
        self.trace = trace_of(self.engine)
        for event in Events:
            self.engine.add_event_handler(event, lambda engine, batch, event=event: self.ask(event.name))

    def step(self, engine, batch):
        self.batch = batch
        engine.record({"half": 0.5})
        self.ask("the step before its update")
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        self.ask("the step after its update")

    def ask(self, place):
        """Ask for the verb where the table says so, once."""
        leading = len(self.left) == 2
        here = "ITERATION_COMPLETED" if leading else self.place
        state = self.engine.state
        in_iteration = here not in (
            "STARTED",
            "EPOCH_STARTED",
            "DATALOADER_STOP_ITERATION",
            "EPOCH_COMPLETED",
            "COMPLETED",
        )
        asked_at = 1 if here in ("GET_BATCH_STARTED", "GET_BATCH_COMPLETED") else 2
        if place == here and self.left and (not in_iteration or state.iteration == asked_at):
            VERBS[self.left.pop(0)](self.engine)

    def run(self):
        """Run; return the error that left, and the part of the trace that is new."""
        start = len(self.trace)
        try:
            self.engine.run(DATA, max_epochs=2)
        except (Failure, KeyboardInterrupt, RunError) as error:
            return error, self.trace[start:]
        return None, self.trace[start:]


# ---------------------------------------------------------------------- what the table says


def undisturbed():
    return Stopped().run()[1]


def until(place, whole):
    """The trace up to the place where the stop is asked for, that event included."""
    if place in LEADS_TO:
        return [*until("ITERATION_COMPLETED", whole), f"{place}:1/2=b"]
    after = {STEP_PLACES[0]: "METRICS_RECORDED", STEP_PLACES[1]: "UPDATE_COMPLETED"}.get(place, place)
    of_b = [i for i, one in enumerate(whole) if names_of([one]) == [after] and one.endswith("=b")]
    if after == "GET_BATCH_STARTED":
        of_b = [whole.index("GET_BATCH_STARTED:1/1")]
    return whole[: (of_b or [names_of(whole).index(after)])[0] + 1]


def following(row, before, whole):
    """The entries of the events that the row names."""
    batch = "=b" if before[-1].endswith("=b") else ""
    entries = []
    for name in row.events:
        if name == "the step's":
            entries += whole[len(before) : whole.index("ITERATION_COMPLETED:1/2=b")]
        elif name != "none":
            batch = "" if name in ("EPOCH_COMPLETED", "COMPLETED") else batch
            entries.append(f"{name}:{row.counters}{batch}")
    return entries


def rest(goes_on_with, whole, iteration):
    """The undisturbed trace from the named place on, counted from the iteration that is done."""
    first = {
        "epoch 1": "EPOCH_STARTED:1/0",
        "iteration 1": "GET_BATCH_STARTED:1/0",
        "iteration 2": "GET_BATCH_STARTED:1/1",
        "iteration 3": "GET_BATCH_STARTED:1/2",
        "end of epoch 1": "DATALOADER_STOP_ITERATION:1/3",
        "epoch 2": "EPOCH_STARTED:2/3",
    }
    if goes_on_with == "nothing":
        return []
    part = whole[whole.index(first[goes_on_with]) :]
    shift = iteration - int(re.split("[/=]", part[0])[1])
    return [re.sub(r"/(\d+)", lambda found: f"/{int(found[1]) + shift}", one) for one in part]


def counters(state):
    return f"{state.epoch}/{state.iteration}"


# ---------------------------------------------------------------------- every row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_row_of_the_table_is_what_happens(row):
    whole = undisturbed()
    asked = row
    if row.events == ("as for an error",):
        row = replace(ERRORS[row.place], verb=row.verb)
    stopped = Stopped(row.verb, row.place)
    error, trace = stopped.run()
    state = stopped.engine.state

    before = until(row.place, whole)
    expected = before + following(row, before, whole)
    if row.going_on.startswith("this run"):
        done = int(row.counters.partition("/")[2])
        expected += rest("epoch 2", whole, done)
    assert trace == expected
    assert counters(state) == row.after
    assert (type(error), state.stop_reason) == ending(asked, row)
    assert (stopped.engine.state.is_running, state.exception, state.output) == (False, None, None)

    again_error, again = stopped.run()
    if row.going_on == "next run: nothing" or row.going_on.startswith("this run"):
        assert again == []
    else:
        where = row.going_on.removeprefix("next run: ")
        assert again == [f"STARTED:{row.after}", *rest(where, whole, state_after(row))]
    assert (again_error, state.stop_reason, state.epoch) == (None, "completed", 2)


def ending(asked, row):
    """The error that leaves ``run``, and the stop reason."""
    if row.ending.startswith("returns"):
        return type(None), row.ending.removeprefix("returns, ")
    if row.ending == "raises the first error":
        return Failure, "failed"
    if asked.ending == "a RunError":
        return RunError, "failed"
    return (KeyboardInterrupt, "interrupted") if row.verb == "Ctrl-C" else (Failure, "failed")


def state_after(row):
    return int(row.after.partition("/")[2])


@pytest.mark.parametrize("row", [row for row in ROWS if "terminate_epoch" not in row.verb], ids=lambda row: row.id)
def test_every_batch_is_trained_on_once_over_both_runs(row):
    stopped = Stopped(row.verb, row.place)
    stopped.run()
    stopped.run()
    expected = DATA[:2] + DATA if row.place == "TERMINATE_SINGLE_EPOCH" else DATA + DATA
    assert stopped.trained == expected


@pytest.mark.parametrize("verb", ["terminate", "interrupt", "an error", "Ctrl-C"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make_data", [lambda: iter(DATA * 2), lambda: (batch for batch in DATA * 2)])
def test_an_iterator_goes_on_without_losing_a_batch(make_data, place, verb):
    stopped = Stopped(verb, place)
    data = make_data()
    for _ in range(2):
        try:
            stopped.engine.run(data, max_epochs=2, epoch_length=3)
        except (Failure, KeyboardInterrupt):
            assert verb in ("an error", "Ctrl-C") or place == "EXCEPTION_RAISED"
    if place == "TERMINATE_SINGLE_EPOCH":  # ended early, so the iterator has batches left
        assert stopped.trained == ["a", "b", "c", "a", "b"]
    else:
        assert stopped.trained == DATA * 2


# ---------------------------------------------------------------------- the rules around the table


def test_the_example_of_the_page_runs():
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), {})


def stop_after(event, *asks):
    """The names of the events after ``event``, in the handlers of which the verbs are called, in one run."""
    engine = make_engine()
    for ask in asks:
        engine.add_event_handler(event, lambda engine, batch, ask=ask: ask(engine))
    trace = trace_of(engine)
    engine.run(DATA, max_epochs=1)
    names = names_of(trace)
    return names[names.index(event.name) + 1 :], engine.state.stop_reason


def end_epoch(engine):
    engine.terminate_epoch()


def terminate(engine):
    engine.terminate()


def terminate_silently(engine):
    engine.terminate(skip_completed=True)


def interrupt(engine):
    engine.interrupt()


@pytest.mark.parametrize(
    ("asks", "events", "reason"),
    [
        ([interrupt, end_epoch, terminate], ["TERMINATE", "COMPLETED"], "terminated"),
        ([interrupt, terminate], ["TERMINATE", "COMPLETED"], "terminated"),
        ([interrupt, end_epoch], ["TERMINATE_SINGLE_EPOCH", "EPOCH_COMPLETED", "INTERRUPT"], "interrupted"),
        ([terminate, terminate_silently], ["TERMINATE"], "terminated"),
        ([terminate_silently, terminate], ["TERMINATE", "COMPLETED"], "terminated"),
    ],
)
def test_of_several_verbs_in_one_event(asks, events, reason):
    assert stop_after(Events.ITERATION_COMPLETED, *asks) == (events, reason)


def test_what_is_asked_for_in_an_event_inside_another_waits_for_the_outer_one():
    engine = make_engine()
    engine.register_events("looked")
    engine.on(Events.EPOCH_COMPLETED)(lambda engine, batch: engine.fire_event("looked"))
    engine.on(Events.EPOCH_COMPLETED)(lambda engine, batch: engine.record({"half": 0.5}))
    engine.on("looked")(lambda engine, batch: engine.interrupt())
    engine.on(Events.METRICS_RECORDED)(lambda engine, batch: engine.terminate())
    trace = trace_of(engine)
    engine.run(DATA, max_epochs=2)
    assert names_of(trace)[-4:] == ["METRICS_RECORDED", "EPOCH_COMPLETED", "TERMINATE", "COMPLETED"]


def test_the_outer_run_stops_after_the_event_whose_inner_run_asked_for_it():
    trainer, evaluator = make_engine(), make_engine(lambda engine, batch: trainer.terminate(), mode="eval")
    inner = trace_of(evaluator)
    trainer.on(Events.ITERATION_COMPLETED)(lambda engine, batch: evaluator.run(DATA))
    outer = trace_of(trainer)
    trainer.run(DATA)
    assert names_of(inner)[-2:] == ["EPOCH_COMPLETED", "COMPLETED"]
    assert names_of(outer)[-3:] == ["ITERATION_COMPLETED", "TERMINATE", "COMPLETED"]


def test_terminate_epoch_gives_the_next_epoch_fresh_data_with_an_epoch_length_too():
    engine, seen = seen_by()
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch: engine.terminate_epoch())
    result = engine.run(range(10), max_epochs=2, epoch_length=4)
    assert (seen, result.iteration) == ([0, 1, 0, 1, 2, 3], 6)


def test_an_evaluation_that_was_stopped_starts_afresh():
    engine, seen = seen_by(mode="eval")
    engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch: engine.interrupt())
    trace = trace_of(engine)
    assert engine.run(DATA).stop_reason == "interrupted"
    stop, seen[:] = len(trace), []
    engine.run(DATA)
    assert trace[:stop] == trace[stop:]
    assert seen == ["a", "b"]


@pytest.mark.parametrize("verb", ["terminate", "interrupt", "terminate_epoch"])
def test_a_verb_on_an_engine_that_is_not_running_is_an_error(verb):
    engine = make_engine(name="mine")
    for _ in range(2):
        with pytest.raises(RunError, match=f"{verb}.. was called on engine 'mine', which is not running"):
            getattr(engine, verb)()
        engine.run(DATA, max_epochs=3)


def test_the_other_handlers_of_the_event_run_after_a_verb_and_not_after_an_error():
    for verb, others in (("terminate", 1), ("interrupt", 1), ("terminate_epoch", 1), ("an error", 0), ("Ctrl-C", 0)):
        stopped = Stopped(verb, "ITERATION_COMPLETED")
        ran = []
        stopped.engine.on(Events.ITERATION_COMPLETED(once=2))(lambda engine, batch, ran=ran: ran.append(batch))
        stopped.run()
        assert ran == ["b"] * others, verb


@pytest.mark.parametrize("place", ["GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"])
@pytest.mark.parametrize("verb", ["terminate", "terminate_epoch", "interrupt", "an error"])
def test_the_stopping_event_is_given_the_batch_in_work_and_what_comes_after_is_not(verb, place):
    stopped = Stopped(verb, place)
    _, trace = stopped.run()
    position = len(until(place, undisturbed()))
    assert trace[position].endswith("=b")
    assert not [one for one in trace[position + 1 : position + 3] if one.endswith("=b")]


@pytest.mark.parametrize("place", ["the step", *(event for event in Events if event.name not in OUTSIDE_OF_PLAIN_RUNS)])
def test_a_state_taken_anywhere_goes_on_in_a_new_engine_as_the_run_itself_does(place):
    def build():
        def step(engine, batch):
            if place == "the step":
                look(engine, batch)
            seen.append(batch)

        return Engine(step)

    def look(engine, batch):
        if not taken and (engine.state.iteration == 2 or place in (Events.STARTED, Events.COMPLETED)):
            taken.append((engine.state_dict(), seen[: engine.state_dict()["iteration"]]))

    seen, taken = [], []
    engine = build()
    if place != "the step":
        engine.add_event_handler(place, look)
    engine.run(["a", "b"], max_epochs=2)
    ((state, before),) = taken
    whole = list(seen)
    seen[:] = before
    fresh = build()
    fresh.load_state_dict(state)
    fresh.run(["a", "b"])
    assert seen == whole == ["a", "b", "a", "b"]


STOPS = ["terminate", "terminate, skipping", "interrupt", "an error", "Ctrl-C"]


@given(
    stops=st.dictionaries(st.integers(1, 100), st.sampled_from(STOPS), max_size=20),
    held=st.integers(1, 4),
    epochs=st.integers(1, 4),
    epoch_length=st.none() | st.integers(1, 5),
    kind=st.sampled_from(["a list", "an iterator", "a callable"]),
)
def test_however_often_a_training_is_stopped_each_batch_is_done_once_and_each_epoch_begins_once(
    stops, held, epochs, epoch_length, kind
):
    """``stops``: which call of the step or a handler, counted over all runs, asks for which verb."""

    def stop_perhaps(engine, batch):
        calls.append(batch)
        if len(calls) in stops:
            VERBS[stops[len(calls)]](engine)

    if kind == "an iterator":
        epoch_length = epoch_length or held
    stream = [number % held for number in range(epochs * (epoch_length or held))]
    data = {"a list": list(range(held)), "an iterator": iter(stream), "a callable": lambda state: iter(range(held))}
    calls = []
    engine, seen = seen_by(stop_perhaps)
    for event in Events:
        engine.add_event_handler(event, stop_perhaps)
    trace = trace_of(engine)
    for _ in range(len(stops) + 1):
        with contextlib.suppress(Failure, KeyboardInterrupt):
            engine.run(data[kind], max_epochs=epochs, epoch_length=epoch_length)
    assert (seen, engine.state.epoch, engine.state.iteration) == (stream, epochs, len(stream))
    borders = [one for one in trace if one.startswith("EPOCH_")]
    assert len(borders) == len(set(borders)) <= 2 * epochs


# ---------------------------------------------------------------------- to the bit


def make_training():
    """A net with dropout, shuffled data with a generator of its own, and handlers that draw random numbers."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def step(engine, batch):
        engine.backward((engine.model(batch) * engine.state.scale).pow(2).mean())
        engine.update()

    engine = Engine(step, model, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), state={"scale": 1.0})

    @engine.on(Events.EPOCH_STARTED | Events.ITERATION_COMPLETED)
    def rescale(engine, batch):
        engine.state.scale = torch.rand(()).item()

    samples = torch.arange(12.0).reshape(6, 2) / 12
    data = DataLoader(samples, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4))
    return engine, data


def weights_of(engine):
    return [parameter.tolist() for parameter in engine.model.parameters()]


@pytest.fixture(scope="module")
def never_stopped():
    engine, data = make_training()
    engine.run(data, max_epochs=3)
    return weights_of(engine)


@pytest.mark.parametrize("place", [event for event in Events if event.name not in OUTSIDE_OF_PLAIN_RUNS])
@pytest.mark.parametrize("objects", ["the same", "new"])
def test_a_training_that_was_stopped_is_equal_to_the_bit_to_one_that_was_not(place, objects, never_stopped):
    engine, data = make_training()

    @engine.on(place)
    def stop(engine, batch):
        if place in (Events.STARTED, Events.COMPLETED) or engine.state.iteration == 3:
            engine.terminate()

    engine.run(data, max_epochs=3)
    engine.remove_event_handler(stop, place)
    if objects == "new":
        state, weights = engine.state_dict(), engine.model.state_dict()
        engine, data = make_training()
        engine.model.load_state_dict(weights)
        engine.load_state_dict(state)
    torch.manual_seed(99)
    engine.on(Events.STARTED)(lambda engine, batch: torch.rand(5))
    engine.run(data, max_epochs=3)
    assert weights_of(engine) == never_stopped


@pytest.mark.parametrize("place", [Events.BACKWARD_COMPLETED, Events.UPDATE_STARTED])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_iteration_that_failed_before_its_update_leaves_no_gradient_behind(place, error):
    def train(fails):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)

        def step(engine, batch):
            engine.backward(engine.model(batch).sum())
            engine.update()

        engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        data = list(torch.arange(8.0).reshape(4, 1, 2))
        if fails:
            with engine.add_event_handler(place(once=2), lambda engine, batch: fail(error)), pytest.raises(error):
                engine.run(data)
        engine.run(data)
        return weights_of(engine), engine.state.updates

    assert train(fails=True) == train(fails=False)


def test_a_second_optimizers_gradient_is_dropped_too_and_the_iteration_with_an_update_is_not_repeated():
    nets = {"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)}

    def step(engine, batch):
        for name, net in engine.model.items():
            engine.backward(net(torch.ones(1, 1)).sum())
            if batch == "b" and name == "two":
                raise Failure
            engine.update(name)

    engine, seen = seen_by(
        step, model=nets, optimizer={n: torch.optim.SGD(net.parameters(), lr=0.1) for n, net in nets.items()}
    )
    with pytest.raises(Failure):
        engine.run(DATA)
    assert [parameter.grad for net in nets.values() for parameter in net.parameters()] == [None] * 4
    engine.run(DATA)
    assert (seen, engine.state.updates_by_optimizer) == (["a", "c"], {"one": 3, "two": 2})


def test_gradients_that_a_step_leaves_pending_on_purpose_are_kept():
    model = nn.Linear(1, 1)
    engine = Engine(
        lambda engine, batch: engine.backward(engine.model(torch.ones(1, 1)).sum()),
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with (
        engine.add_event_handler(Events.ITERATION_STARTED(once=3), lambda engine, batch: fail(Failure)),
        pytest.raises(Failure),
    ):
        engine.run(DATA)
    assert model.weight.grad.item() == 2.0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("how", "objects"),
    [("terminate", "new"), ("terminate", "the same"), ("error", "new"), ("error", "the same"), ("saved", "new")],
)
@pytest.mark.parametrize("loader", ["shuffled", "own generator", "noisy data set", "numpy sampler"])
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.GET_BATCH_COMPLETED], ids=str)
def test_an_end_of_an_epoch_that_was_asked_for_comes_when_the_run_goes_on(skip, how, loader, objects, event):
    at = event(event_filter=lambda engine, count: (engine.state.iteration, engine.state.epoch_iteration) == (7, 2))
    saved: list[Any] = []

    def make() -> tuple[Training, list[Any]]:
        training = Training(loader)
        ends: list[Any] = []
        training.at(at, lambda training, engine: engine.terminate_epoch(skip_epoch_completed=skip))
        for event in (Events.TERMINATE_SINGLE_EPOCH, Events.EPOCH_COMPLETED):
            training.at(event, lambda training, engine, event=event: ends.append((event, engine.state.iteration)))
        return training, ends

    never, wanted = make()
    never.run(3)
    stopped, ends = make()
    if how == "saved":
        stopped.at(at, lambda training, engine: saved.append(training.saved()))
    elif how == "error":
        stopped.at(at, lambda training, engine: fail(Boom()))
    else:
        stopped.at(at, lambda training, engine: engine.terminate())
    with contextlib.suppress(Boom):
        stopped.run(3)
    if objects == "new":
        done = [end for end in ends if end[1] < 7]
        again, ends = make()
        again.load(saved[0] if saved else stopped.saved()).run(3)
        ends[:0] = done
    else:
        again = stopped.run(3)
    assert ends == wanted
    assert_equal_to_the_bit(never.outcome(since=7), again.outcome(since=7))


def test_an_iteration_that_comes_again_asks_again():
    engine = Engine(lambda engine, batch: None)
    seen: list[int] = []

    @engine.on(Events.ITERATION_STARTED(once=2))
    def ask(engine: Engine, batch: Any) -> None:
        seen.append(batch)
        if len(seen) == 1:
            engine.terminate_epoch()
            raise Boom

    with contextlib.suppress(Boom):
        engine.run([1, 2, 3])
    engine.run([1, 2, 3])
    assert engine.state.iteration == 3 and seen == [2]
