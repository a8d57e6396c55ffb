"""The order of events: whole traces, each in one comparison. An entry is written ``EVENT:epoch/iteration=batch``."""

from __future__ import annotations

import pytest
import torch
from ignite.metrics import Average
from torch import nn
from traces import Stated, entry, make_engine, make_trainer, names_of, trace_of

from pellucid.engine import Engine, EventEnum, Events

TWO_EPOCHS = """
STARTED:0/0
  EPOCH_STARTED:1/0
    GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a step:1/1=a ITERATION_COMPLETED:1/1=a
    GET_BATCH_STARTED:1/1 GET_BATCH_COMPLETED:1/1=b ITERATION_STARTED:1/2=b step:1/2=b ITERATION_COMPLETED:1/2=b
    DATALOADER_STOP_ITERATION:1/2
  EPOCH_COMPLETED:1/2
  EPOCH_STARTED:2/2
    GET_BATCH_STARTED:2/2 GET_BATCH_COMPLETED:2/2=a ITERATION_STARTED:2/3=a step:2/3=a ITERATION_COMPLETED:2/3=a
    GET_BATCH_STARTED:2/3 GET_BATCH_COMPLETED:2/3=b ITERATION_STARTED:2/4=b step:2/4=b ITERATION_COMPLETED:2/4=b
    DATALOADER_STOP_ITERATION:2/4
  EPOCH_COMPLETED:2/4
COMPLETED:2/4
"""


# Whoever waits for a batch is told before: in the first epoch nobody knows that nothing follows b.
END_UNKNOWN = TWO_EPOCHS.replace("DATALOADER_STOP_ITERATION:1/2", "GET_BATCH_STARTED:1/2 DATALOADER_STOP_ITERATION:1/2")


def traced(*args, mode="train", **kwargs):
    """The trace of one run of an engine that does nothing but write its step down."""
    trace = []
    engine = Engine(lambda engine, batch: trace.append(entry("step", engine, batch)), mode=mode)
    trace_of(engine, into=trace)
    engine.run(*args, **kwargs)
    return trace


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_of_two_epochs(mode):
    assert traced(list("ab"), max_epochs=2, mode=mode) == TWO_EPOCHS.split()


def test_a_callable_is_asked_for_data_after_epoch_started_and_before_the_first_batch():
    trace = []
    engine = make_engine()
    trace_of(engine, into=trace)
    engine.run(lambda state: trace.append(f"asked:{state.epoch}/{state.iteration}") or ["a"], max_epochs=2)
    asked = [(trace[i - 1], one, trace[i + 1]) for i, one in enumerate(trace) if one.startswith("asked")]
    assert asked == [
        ("EPOCH_STARTED:1/0", "asked:1/0", "GET_BATCH_STARTED:1/0"),
        ("EPOCH_STARTED:2/1", "asked:2/1", "GET_BATCH_STARTED:2/1"),
    ]


def test_a_step_that_records_and_updates():
    engine, _ = make_trainer()
    trace = trace_of(engine)
    engine.run(list("ab"), max_epochs=1)
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a
          METRICS_RECORDED:1/1=a BACKWARD_COMPLETED:1/1=a UPDATE_STARTED:1/1=a UPDATE_COMPLETED:1/1=a
        ITERATION_COMPLETED:1/1=a
        GET_BATCH_STARTED:1/1 GET_BATCH_COMPLETED:1/1=b ITERATION_STARTED:1/2=b
          METRICS_RECORDED:1/2=b BACKWARD_COMPLETED:1/2=b UPDATE_STARTED:1/2=b UPDATE_COMPLETED:1/2=b
        ITERATION_COMPLETED:1/2=b
        DATALOADER_STOP_ITERATION:1/2
      EPOCH_COMPLETED:1/2
    COMPLETED:1/2
    """
    assert trace == expected.split()


def test_a_step_in_plain_pytorch_fires_the_events_of_the_update_too():
    model = nn.Linear(1, 1)

    def step(engine, batch):
        engine.optimizer.zero_grad()
        engine.model(torch.ones(1, 1)).sum().backward()
        engine.optimizer.step()

    engine = Engine(step, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    trace = trace_of(engine)
    engine.run(["a"])
    inside = trace[trace.index("ITERATION_STARTED:1/1=a") : trace.index("ITERATION_COMPLETED:1/1=a")]
    assert inside == ["ITERATION_STARTED:1/1=a", "UPDATE_STARTED:1/1=a", "UPDATE_COMPLETED:1/1=a"]


def test_a_run_with_an_inner_run():
    trainer = make_engine()
    evaluator = Engine(lambda engine, batch: batch, mode="eval", metrics={"mean": Average()})
    trace = trace_of(evaluator, prefix="inner.")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: evaluator.run([1.0, 2.0]))
    trace_of(trainer, into=trace)
    trainer.run(list("a"), max_epochs=1)
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a ITERATION_COMPLETED:1/1=a
        DATALOADER_STOP_ITERATION:1/1
          inner.STARTED:0/0
            inner.EPOCH_STARTED:1/0
              inner.GET_BATCH_STARTED:1/0 inner.GET_BATCH_COMPLETED:1/0=1.0
              inner.ITERATION_STARTED:1/1=1.0 inner.ITERATION_COMPLETED:1/1=1.0
              inner.GET_BATCH_STARTED:1/1 inner.GET_BATCH_COMPLETED:1/1=2.0
              inner.ITERATION_STARTED:1/2=2.0 inner.ITERATION_COMPLETED:1/2=2.0
              inner.DATALOADER_STOP_ITERATION:1/2
              inner.METRICS_RECORDED:1/2
            inner.EPOCH_COMPLETED:1/2
          inner.COMPLETED:1/2
      EPOCH_COMPLETED:1/1
    COMPLETED:1/1
    """
    assert trace == expected.split()


@pytest.mark.parametrize("place", list(Events)[:5])
def test_the_outer_trace_is_the_same_with_an_inner_run_in_any_event(place):
    trainer, evaluator = make_engine(), make_engine(mode="eval")
    trainer.add_event_handler(place, lambda engine, batch: evaluator.run(list("xyz")))
    trace = trace_of(trainer)
    trainer.run(list("ab"), max_epochs=2)
    assert trace == [one for one in TWO_EPOCHS.split() if not one.startswith("step")]


def test_data_that_states_no_length():
    assert traced(lambda state: (batch for batch in "ab"), max_epochs=2) == END_UNKNOWN.split()


@pytest.mark.parametrize("stated", [1, 10])
def test_a_stated_length_that_is_wrong_changes_no_event_but_the_announcement_at_the_end(stated):
    expected = END_UNKNOWN.replace("=a", "=0").replace("=b", "=1")
    assert traced(Stated(stated, 2), max_epochs=2) == expected.split()


def test_a_batch_beyond_the_stated_length_is_announced_before_its_handlers_see_it():
    trace = traced(Stated(1, 2))
    start = trace.index("ITERATION_COMPLETED:1/1=0") + 1
    assert trace[start : start + 2] == ["GET_BATCH_STARTED:1/1", "GET_BATCH_COMPLETED:1/1=1"]


def test_an_epoch_length_shorter_than_the_data_makes_one_stream_of_it():
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a step:1/1=a ITERATION_COMPLETED:1/1=a
        GET_BATCH_STARTED:1/1 GET_BATCH_COMPLETED:1/1=b ITERATION_STARTED:1/2=b step:1/2=b ITERATION_COMPLETED:1/2=b
      EPOCH_COMPLETED:1/2
      EPOCH_STARTED:2/2
        GET_BATCH_STARTED:2/2 GET_BATCH_COMPLETED:2/2=c ITERATION_STARTED:2/3=c step:2/3=c ITERATION_COMPLETED:2/3=c
        GET_BATCH_STARTED:2/3 DATALOADER_STOP_ITERATION:2/3
                              GET_BATCH_COMPLETED:2/3=a ITERATION_STARTED:2/4=a step:2/4=a ITERATION_COMPLETED:2/4=a
      EPOCH_COMPLETED:2/4
    COMPLETED:2/4
    """
    assert traced(list("abc"), max_epochs=2, epoch_length=2) == expected.split()


def test_an_epoch_length_longer_than_the_data_begins_it_again_inside_the_epoch():
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a step:1/1=a ITERATION_COMPLETED:1/1=a
        GET_BATCH_STARTED:1/1 GET_BATCH_COMPLETED:1/1=b ITERATION_STARTED:1/2=b step:1/2=b ITERATION_COMPLETED:1/2=b
        GET_BATCH_STARTED:1/2 DATALOADER_STOP_ITERATION:1/2
                              GET_BATCH_COMPLETED:1/2=a ITERATION_STARTED:1/3=a step:1/3=a ITERATION_COMPLETED:1/3=a
      EPOCH_COMPLETED:1/3
      EPOCH_STARTED:2/3
        GET_BATCH_STARTED:2/3 GET_BATCH_COMPLETED:2/3=b ITERATION_STARTED:2/4=b step:2/4=b ITERATION_COMPLETED:2/4=b
        GET_BATCH_STARTED:2/4 DATALOADER_STOP_ITERATION:2/4
                              GET_BATCH_COMPLETED:2/4=a ITERATION_STARTED:2/5=a step:2/5=a ITERATION_COMPLETED:2/5=a
        GET_BATCH_STARTED:2/5 GET_BATCH_COMPLETED:2/5=b ITERATION_STARTED:2/6=b step:2/6=b ITERATION_COMPLETED:2/6=b
      EPOCH_COMPLETED:2/6
    COMPLETED:2/6
    """
    assert traced(list("ab"), max_epochs=2, epoch_length=3) == expected.split()


def test_no_data_but_an_epoch_length():
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        ITERATION_STARTED:1/1 step:1/1 ITERATION_COMPLETED:1/1
        ITERATION_STARTED:1/2 step:1/2 ITERATION_COMPLETED:1/2
      EPOCH_COMPLETED:1/2
      EPOCH_STARTED:2/2
        ITERATION_STARTED:2/3 step:2/3 ITERATION_COMPLETED:2/3
        ITERATION_STARTED:2/4 step:2/4 ITERATION_COMPLETED:2/4
      EPOCH_COMPLETED:2/4
    COMPLETED:2/4
    """
    assert traced(max_epochs=2, epoch_length=2) == expected.split()


def test_max_iters_inside_an_epoch_leaves_it_open():
    expected = """
    STARTED:0/0
      EPOCH_STARTED:1/0
        GET_BATCH_STARTED:1/0 GET_BATCH_COMPLETED:1/0=a ITERATION_STARTED:1/1=a step:1/1=a ITERATION_COMPLETED:1/1=a
    COMPLETED:1/1
    """
    assert traced(list("ab"), max_iters=1) == expected.split()


def test_max_iters_at_an_epochs_end_completes_it():
    assert traced(list("ab"), max_iters=4) == TWO_EPOCHS.split()


def test_going_on_to_a_larger_limit_is_the_same_but_for_a_second_start():
    engine = make_engine(lambda engine, batch: trace.append(entry("step", engine, batch)))
    trace = trace_of(engine)
    engine.run(list("ab"), max_iters=3)
    engine.run(list("ab"), max_iters=4)
    expected = TWO_EPOCHS.replace("ITERATION_COMPLETED:2/3=a", "ITERATION_COMPLETED:2/3=a COMPLETED:2/3 STARTED:2/3")
    assert trace == expected.split()


class Probe(EventEnum):
    LOOKED = "looked"


@pytest.mark.parametrize(
    ("filters", "at"),
    [
        ({"every": 1}, [1, 2, 3, 4, 5, 6]),
        ({"every": 2}, [2, 4, 6]),
        ({"once": 3}, [3]),
        ({"once": [1, 5]}, [1, 5]),
        ({"after": 2}, [3, 4, 5, 6]),
        ({"before": 3}, [1, 2]),
        ({"after": 1, "before": 6, "every": 2}, [2, 4]),
        ({"event_filter": lambda engine, count: count % 4 == 1}, [1, 5]),
    ],
)
def test_a_filter_on_an_event_of_ones_own_counts_its_firings_over_runs_and_until_reset(filters, at):
    def looked_at(engine):
        seen.clear()
        engine.run(range(2), max_epochs=1)
        engine.run(range(2), max_epochs=3)
        return list(seen)

    seen = []
    engine = make_engine(lambda engine, batch: engine.fire_event(Probe.LOOKED))
    engine.register_events(Probe.LOOKED)
    engine.add_event_handler(Probe.LOOKED(**filters), lambda engine, batch: seen.append(engine.state.iteration))
    assert looked_at(engine) == at
    engine.reset()
    assert looked_at(engine) == at


def test_events_of_ones_own_fire_where_they_are_fired_and_count_for_their_engine_alone():
    trace = []

    def step(engine, batch):
        engine.fire_event("looked")

    for name in ("first", "second"):
        engine = make_engine(step)
        engine.register_events("looked")
        engine.on(Events.ITERATION_STARTED)(lambda engine, batch, n=name: trace.append(entry(n, engine, batch)))
        engine.add_event_handler("looked", lambda engine, batch: trace.append(entry("looked", engine, batch)))
        engine.on(Events.ITERATION_COMPLETED(every=2))(lambda e, b: trace.append(entry("second", e, b)))
        engine.run(list("ab"))
    expected = "{0}:1/1=a looked:1/1=a {0}:1/2=b looked:1/2=b second:1/2=b"
    assert trace == expected.format("first").split() + expected.format("second").split()


def test_a_handler_added_while_its_event_fires_runs_from_the_next_firing():
    trace = []
    engine = make_engine()

    @engine.on(Events.ITERATION_STARTED(once=1))
    def add(engine, batch):
        engine.add_event_handler(
            Events.ITERATION_STARTED, lambda engine, batch: trace.append(entry("new", engine, batch))
        )

    engine.on(Events.ITERATION_STARTED)(lambda engine, batch: trace.append(entry("old", engine, batch)))
    engine.run(list("abc"))
    assert trace == ["old:1/1=a", "old:1/2=b", "new:1/2=b", "old:1/3=c", "new:1/3=c"]


def test_a_handler_taken_off_while_its_event_fires_still_runs_in_this_firing():
    trace = []
    engine = make_engine()

    @engine.on(Events.ITERATION_STARTED(once=2))
    def take_off(engine, batch):
        handle.remove()

    @engine.on(Events.ITERATION_STARTED)
    def take_itself_off(engine, batch):
        trace.append(entry("itself", engine, batch))
        engine.remove_event_handler(take_itself_off, Events.ITERATION_STARTED)

    handle = engine.add_event_handler(Events.ITERATION_STARTED, lambda e, b: trace.append(entry("other", e, b)))
    engine.run(list("abc"))
    assert trace == ["itself:1/1=a", "other:1/1=a", "other:1/2=b"]


def test_handlers_run_in_the_order_in_which_they_were_attached_ignites_among_them():
    trace = []
    engine = make_engine()
    engine.add_event_handler(Events.COMPLETED, lambda engine, batch: trace.append(1))
    engine.ignite.add_event_handler(Events.COMPLETED, lambda engine: trace.append(2))
    engine.add_event_handler(Events.COMPLETED(every=1) | Events.STARTED, lambda engine, batch: trace.append(3))
    engine.ignite.add_event_handler(Events.COMPLETED, lambda: trace.append(4))
    engine.run(["a"])
    assert trace == [3, 1, 2, 3, 4]


def test_the_events_class_lists_them_in_the_order_in_which_they_first_fire():
    engine, _ = make_trainer()
    trace = trace_of(engine)
    engine.run(["a"])
    order = [event.name for event in Events if event is not Events.METRICS_RECORDED]
    assert [name for name in order if name in names_of(trace)] == [
        name for name in dict.fromkeys(names_of(trace)) if name in order
    ]
