from __future__ import annotations

import functools
import io
import logging

import ignite.engine
import ignite.handlers
import ignite.metrics
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.engine import Engine, EventEnum, EventError, Events, HandlerError

IgniteEvents = ignite.engine.Events


class Backprop(EventEnum):
    NORM_MEASURED = "norm_measured"
    CLIPPED = "clipped"


class IgniteBackprop(ignite.engine.EventEnum):
    NORM_MEASURED = "norm_measured"
    CLIPPED = "clipped"


def nothing(engine, batch):
    pass


def recorder(engine, seen, label="fired"):
    """A handler for either kind of engine, that notes where it was called."""
    return lambda engine, *batch: seen.append((label, engine.state.epoch, engine.state.iteration))


def firings(make_engine, attach, batches=4, epochs=(3,)):
    """Where the handlers that ``attach(engine, seen)`` attaches are called."""
    engine, seen = make_engine(nothing), []
    attach(engine, seen)
    for limit in epochs:
        engine.run(range(batches), max_epochs=limit)
    return seen


# ---------------------------------------------------------------- filters are Ignite's

COUNTED = [
    "STARTED", "EPOCH_STARTED", "GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED",
    "EPOCH_COMPLETED", "COMPLETED",
]  # fmt: skip
FILTERS = [
    {"every": 1}, {"every": 2}, {"every": 5}, {"every": 100}, {"once": 1}, {"once": 3}, {"once": [2, 7, 9]},
    {"once": (3,)}, {"before": 3}, {"before": 0}, {"after": 2}, {"after": 0}, {"before": 9, "after": 3},
    {"every": 2, "before": 8}, {"every": 3, "after": 1}, {"every": 3, "before": 11, "after": 2},
    {"event_filter": lambda engine, count: count in (1, 2, 5)},
]  # fmt: skip


def attach_filtered(events, name, filters):
    def attach(engine, seen):
        event = events[name](**filters)
        engine.add_event_handler(event, recorder(engine, seen))

    return attach


@pytest.mark.parametrize("events", [Events, IgniteEvents])
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("filters", FILTERS, ids=lambda filters: "-".join(filters))
def test_a_filter_lets_through_what_ignites_does(name, filters, events):
    theirs = firings(ignite.engine.Engine, attach_filtered(IgniteEvents, name, filters))
    assert firings(Engine, attach_filtered(events, name, filters)) == theirs


counts = st.integers(min_value=0, max_value=14)
positive = st.integers(min_value=1, max_value=14)
filters = st.one_of(
    st.none(),
    st.fixed_dictionaries({"once": positive | st.lists(positive, min_size=1, unique=True)}),
    st.fixed_dictionaries({}, optional={"every": positive, "before": counts, "after": counts}).filter(bool),
    st.builds(lambda due: {"event_filter": lambda engine, count: count in due}, st.sets(counts)),
)


@given(attached=st.lists(st.tuples(st.sampled_from(COUNTED), filters), max_size=6))
def test_any_handlers_side_by_side_are_called_where_ignite_calls_them(attached):
    def attach_all(events):
        def attach(engine, seen):
            for label, (name, chosen) in enumerate(attached):
                event = events[name] if chosen is None else events[name](**chosen)
                engine.add_event_handler(event, recorder(engine, seen, label))

        return attach

    theirs = firings(ignite.engine.Engine, attach_all(IgniteEvents))
    assert firings(Engine, attach_all(Events)) == theirs
    assert firings(Engine, attach_all(Events), batches=5, epochs=(1, 2)) == firings(
        ignite.engine.Engine, attach_all(IgniteEvents), batches=5, epochs=(1, 2)
    )


def test_a_filter_is_asked_with_our_engine_and_the_count():
    engine, asked = Engine(nothing), []
    engine.add_event_handler(Events.ITERATION_STARTED(event_filter=lambda *given: asked.append(given)), nothing)
    engine.run(range(2), max_epochs=1)
    assert asked == [(engine, 1), (engine, 2)]


def test_the_filters_of_an_evaluation_count_afresh_in_each_run():
    engine, seen = Engine(nothing, mode="eval"), []
    for event in (Events.ITERATION_STARTED(every=2), Events.ITERATION_STARTED(once=3), Events.EPOCH_COMPLETED(once=1)):
        engine.add_event_handler(event, recorder(engine, seen))
    engine.run(range(3))
    first = seen.copy()
    engine.run(range(3))
    assert first == [("fired", 1, 2), ("fired", 1, 3), ("fired", 1, 3)]
    assert seen == first * 2


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED(once=2), Events.ITERATION_STARTED(once=[2, 4])])
def test_once_is_once_though_the_iteration_is_taken_up_again(event):
    engine, seen = Engine(nothing), []
    engine.add_event_handler(event, recorder(engine, seen))
    stop = engine.add_event_handler(
        Events.ITERATION_STARTED(event_filter=lambda e, n: n == 2), lambda e, b: e.terminate()
    )
    engine.run(range(3), max_epochs=1)
    stop.remove()
    assert engine.run(range(3), max_epochs=1).iteration == 3
    assert seen == [("fired", 1, 2)]
    engine.reset()
    engine.run(range(3))
    assert seen == [("fired", 1, 2)] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Only one of the input arguments"),
        ({"every": 2, "once": 3}, "Only one of the input arguments"),
        ({"every": 0}, r"ITERATION_STARTED\(every=0\).*greater than zero"),
        ({"every": 1.5}, "every should be integer"),
        ({"once": 0}, "positive integer"),
        ({"once": []}, "positive integer"),
        ({"once": [1.5]}, "positive integer"),
        ({"before": -1}, "greater or equal to zero"),
        ({"after": 1.5}, "integer"),
        ({"event_filter": 3}, "should be a callable"),
        ({"event_filter": lambda engine: True}, "takes parameters"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused_where_it_is_written(given, message):
    with pytest.raises(EventError, match=message):
        Events.ITERATION_STARTED(**given)


def test_a_second_filter_is_refused_since_it_would_take_the_place_of_the_first():
    with pytest.raises(EventError, match=r"ITERATION_STARTED\(every=2\) has its filter already"):
        Events.ITERATION_STARTED(every=2)(once=3)


# ---------------------------------------------------------------- lists of events


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Events.STARTED | Events.COMPLETED, Events.EPOCH_STARTED),
        (Events.STARTED | Events.COMPLETED, Events.EPOCH_STARTED(every=2)),
        (Events.STARTED, Events.EPOCH_STARTED | Events.COMPLETED),
        (Events.STARTED(every=2), Events.EPOCH_STARTED | Events.COMPLETED),
        (Events.STARTED | Events.COMPLETED, Events.EPOCH_STARTED | Events.EPOCH_COMPLETED),
        (Events.STARTED | Events.COMPLETED, IgniteEvents.EPOCH_STARTED),
        (Events.STARTED | Events.COMPLETED, IgniteEvents.EPOCH_STARTED | IgniteEvents.EPOCH_COMPLETED),
        (Events.STARTED, IgniteEvents.EPOCH_STARTED | IgniteEvents.EPOCH_COMPLETED),
        (IgniteEvents.STARTED | IgniteEvents.COMPLETED, Events.EPOCH_STARTED | Events.EPOCH_COMPLETED),
        (IgniteEvents.STARTED, Events.EPOCH_STARTED | Events.EPOCH_COMPLETED),
        (IgniteEvents.STARTED, Events.EPOCH_STARTED),
        (Backprop.CLIPPED, Events.EPOCH_STARTED(every=2)),
    ],
)
def test_or_makes_a_new_list_and_changes_neither_side(left, right):
    def listed(events):
        return [events] if hasattr(events, "name") else list(events)

    before = listed(left), listed(right)
    both = left | right
    again = both | Events.INTERRUPT if isinstance(left, type(Events.STARTED | Events.COMPLETED)) else both
    assert (listed(left), listed(right)) == before
    assert both is not left
    assert list(both)[: len(before[0])] == before[0]
    assert len(both) == len(before[0]) + len(before[1])
    assert again is both or len(again) == len(both) + 1


def test_a_list_that_grows_by_or_assignment_leaves_the_earlier_one_alone():
    first = events = Events.STARTED | Events.EPOCH_STARTED(every=2)
    events |= Events.COMPLETED
    assert (len(first), len(events)) == (2, 3)
    assert repr(events) == "Events.STARTED | Events.EPOCH_STARTED(every=2) | Events.COMPLETED"


@pytest.mark.parametrize("other", ["started", 3, None, [Events.STARTED]])
def test_only_events_go_into_a_list(other):
    for events in (Events.STARTED, Events.STARTED(every=2), Events.STARTED | Events.COMPLETED):
        with pytest.raises(TypeError):
            events | other


def test_a_handler_of_a_list_is_called_for_each_of_its_events():
    engine, seen = Engine(nothing), []
    mixed = (
        Events.STARTED | Events.ITERATION_COMPLETED(every=2) | (IgniteEvents.EPOCH_COMPLETED | IgniteEvents.COMPLETED)
    )
    engine.add_event_handler(mixed, recorder(engine, seen))
    engine.run(range(3), max_epochs=1)
    assert seen == [("fired", 0, 0), ("fired", 1, 2), ("fired", 1, 3), ("fired", 1, 3)]


def test_an_event_is_equal_to_ignites_of_the_same_name():
    for event in IgniteEvents:
        assert Events[event.name] == event
        assert hash(Events[event.name]) == hash(event)


# ---------------------------------------------------------------- custom events


@pytest.mark.parametrize("events", [Backprop, IgniteBackprop])
def test_custom_events_count_their_own_firings_in_each_engine(events):
    def step(engine, batch):
        for _ in range(batch):
            engine.fire_event(events.NORM_MEASURED)

    def make():
        engine, seen = Engine(step), []
        engine.register_events(*events)
        for filters in ({"every": 3}, {"once": 2}, {"after": 5}):
            engine.add_event_handler(events.NORM_MEASURED(**filters), recorder(engine, seen, str(filters)))
        engine.add_event_handler(events.CLIPPED, recorder(engine, seen, "never"))
        return engine, seen

    (one, seen_by_one), (other, seen_by_other) = make(), make()
    one.run([1, 4, 2])
    other.run([1])
    assert [(label, iteration) for label, _, iteration in seen_by_one] == [
        ("{'once': 2}", 2), ("{'every': 3}", 2), ("{'every': 3}", 3), ("{'after': 5}", 3), ("{'after': 5}", 3),
    ]  # fmt: skip
    assert seen_by_other == []


def test_an_event_may_be_a_text():
    engine, seen = Engine(lambda engine, batch: engine.fire_event("measured")), []
    engine.register_events("measured")
    engine.add_event_handler("measured", lambda engine, batch: seen.append(batch))
    engine.run([5, 6])
    engine.fire_event("measured")
    assert seen == [5, 6, None]


def test_built_in_events_may_be_named_by_text_too():
    engine, seen = Engine(nothing), []
    engine.add_event_handler("EPOCH_COMPLETED", recorder(engine, seen))
    engine.run([1])
    assert seen == [("fired", 1, 1)]


def test_reset_and_each_run_of_an_evaluation_count_custom_events_afresh():
    def make(mode):
        engine, seen = Engine(lambda engine, batch: engine.fire_event(Backprop.CLIPPED), mode=mode), []
        engine.register_events(*Backprop)
        engine.add_event_handler(Backprop.CLIPPED(once=2), recorder(engine, seen))
        engine.run(range(3))
        return engine, seen

    for mode in ("train", "eval"):
        engine, seen = make(mode)
        engine.reset()
        engine.run(range(3))
        assert seen == [("fired", 1, 2)] * 2


def test_the_events_of_an_update_and_of_a_record_count_too():
    def step(engine, batch):
        engine.backward(engine.model(torch.ones(1, 1)).sum())
        engine.update()
        engine.record({"loss": 1.0})

    engine, seen = Engine(step, torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), []
    for name in ("BACKWARD_COMPLETED", "UPDATE_STARTED", "UPDATE_COMPLETED", "METRICS_RECORDED"):
        engine.add_event_handler(Events[name](every=2), recorder(engine, seen, name))
    engine.run(range(3))
    assert [label for label, epoch, iteration in seen if iteration == 2] == [
        "BACKWARD_COMPLETED", "UPDATE_STARTED", "UPDATE_COMPLETED", "METRICS_RECORDED",
    ]  # fmt: skip
    assert len(seen) == 4


def test_the_events_that_bring_arguments_to_ignites_handlers_count_and_call_ours_like_all_others():
    def step(engine, batch):
        if batch == "bad":
            raise RuntimeError("of the user")
        engine.terminate_epoch()

    engine, seen = Engine(step), []
    for event in (Events.TERMINATE_SINGLE_EPOCH, Events.EXCEPTION_RAISED):
        engine.add_event_handler(event(every=2), lambda engine, batch: seen.append((engine.state.iteration, batch)))
        engine.ignite.add_event_handler(event, lambda engine, *given, **named: seen.append((*given, *named.values())))
    error = RuntimeError
    engine.run(["a"], max_epochs=3)
    for _ in range(2):
        with pytest.raises(error, match="of the user"):
            engine.run(["bad"], max_epochs=4)
    names = [tuple(type(one).__name__ for one in firing) for firing in seen]
    assert names == [("int",), ("int", "str"), ("int",), ("int",), ("RuntimeError",), ("int", "str"), ("RuntimeError",)]


# ---------------------------------------------------------------- attaching and taking off


def test_a_handler_added_while_its_event_fires_runs_from_the_next_firing():
    engine, seen = Engine(nothing), []

    @engine.on(Events.ITERATION_COMPLETED)
    def add(engine, batch):
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, later: seen.append((batch, later)))

    engine.run(range(3))
    assert seen == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=1, after=0)])
def test_a_handler_taken_off_while_its_event_fires_is_off_from_the_next_firing(event):
    engine, seen = Engine(nothing), []
    engine.add_event_handler(event, lambda engine, batch: handle.remove())
    handle = engine.add_event_handler(event, lambda engine, batch: seen.append(batch))
    engine.run(range(3))
    assert seen == [0]


class Counter:
    def __init__(self):
        self.calls = 0

    def count(self, engine, batch):
        self.calls += 1


def test_a_handle_takes_a_bound_method_off_and_may_be_used_as_a_context():
    engine, counter, other = Engine(nothing), Counter(), Counter()
    kept = engine.add_event_handler(Events.STARTED, other.count)
    with engine.add_event_handler(Events.STARTED | Events.EPOCH_STARTED(every=2), counter.count) as handle:
        engine.run([0], max_epochs=1)
        engine.run([0], max_epochs=2)
    engine.run([0], max_epochs=4)
    handle.remove()
    assert (counter.calls, other.calls) == (3, 3)
    kept.remove()
    assert not engine.has_event_handler(other.count)


def test_a_handle_takes_off_its_own_registration_only():
    engine, counter = Engine(nothing), Counter()
    engine.add_event_handler(Events.STARTED, counter.count)
    engine.add_event_handler(Events.STARTED, counter.count).remove()
    engine.run([0])
    assert counter.calls == 1


def test_a_handle_leaves_an_error_alone_and_outlives_its_engine():
    engine = Engine(nothing)
    with pytest.raises(KeyError), engine.add_event_handler(Events.STARTED, nothing) as handle:
        raise KeyError
    assert not engine.has_event_handler(nothing)
    del engine
    handle.remove()


def test_has_and_remove_know_handlers_by_event():
    engine, counter = Engine(nothing), Counter()
    engine.add_event_handler(Events.STARTED | Events.COMPLETED(every=2), counter.count)
    assert engine.has_event_handler(counter.count, Events.STARTED)
    assert engine.has_event_handler(counter.count, "COMPLETED")
    assert engine.has_event_handler(counter.count, Events.COMPLETED | Events.EPOCH_STARTED)
    assert not engine.has_event_handler(counter.count, Events.EPOCH_STARTED)
    engine.remove_event_handler(counter.count, Events.STARTED)
    assert not engine.has_event_handler(counter.count, Events.STARTED)
    assert engine.has_event_handler(counter.count)
    with pytest.raises(HandlerError, match="is not attached to STARTED"):
        engine.remove_event_handler(counter.count, Events.STARTED)


def test_removing_from_a_list_checks_everything_first():
    engine = Engine(nothing)
    engine.add_event_handler(Events.STARTED, nothing)
    with pytest.raises(HandlerError, match="is not attached to COMPLETED"):
        engine.remove_event_handler(nothing, Events.STARTED | Events.COMPLETED)
    assert engine.has_event_handler(nothing, Events.STARTED)


# ---------------------------------------------------------------- the signature is looked at, never tried


def passed_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_a_logger(function):
    @functools.wraps(function)
    def wrapper(engine, batch):
        return function(engine, batch, "logger")

    return wrapper


class Callable:
    def __init__(self, function=None):
        pass

    def __call__(self, engine, batch):
        pass

    def method(self, engine, batch):
        pass

    @classmethod
    def of_the_class(cls, engine, batch):
        pass

    @staticmethod
    def static(engine, batch):
        pass

    def one(self, engine):
        pass

    async def later(self, engine, batch):
        pass


class OneArgument:
    def __call__(self, engine):
        pass


class Later:
    async def __call__(self, engine, batch):
        pass


async def coroutine(engine, batch):
    pass


async def asynchronous_generator(engine, batch):
    yield


def generator(engine, batch):
    yield


GOOD = {
    "lambda": lambda engine, batch: None,
    "other names": lambda trainer, x: None,
    "defaults": lambda engine, batch, every=3, *, log=None: None,
    "anything": lambda *args, **kwargs: None,
    "rest": lambda engine, *rest: None,
    "partial": functools.partial(lambda extra, engine, batch: None, 1),
    "partial by name": functools.partial(lambda engine, batch, extra: None, extra=1),
    "object": Callable(),
    "bound method": Callable().method,
    "class method": Callable.of_the_class,
    "static method": Callable.static,
    "decorated": passed_on(nothing),
    "decorated by torch": torch.no_grad()(nothing),
    "decorated method": passed_on(Callable.method).__get__(Callable()),
    "adapted": with_a_logger(lambda engine, batch, logger: None),
    "builtin": print,
    "builtin without signature": max,
}
BAD = {
    "none": (lambda: None, r"<lambda>\(\) cannot be called as \(engine, batch\): too many positional"),
    "one": (lambda engine: None, "too many positional arguments"),
    "three": (lambda engine, batch, extra: None, "missing a required argument: 'extra'"),
    "keyword": (lambda engine, batch, *, extra: None, "missing a required.* argument: 'extra'"),
    "only keywords": (lambda *, engine, batch: None, "too many positional arguments"),
    "partial": (functools.partial(lambda engine, batch: None, 1), "too many positional arguments"),
    "object": (OneArgument(), "too many positional arguments"),
    "bound method": (Callable().one, r"one\(engine\) cannot be called"),
    "unbound method": (Callable.method, "missing a required argument: 'batch'"),
    "decorated": (passed_on(lambda engine: None), "too many positional arguments"),
    "decorated by torch": (torch.no_grad()(lambda engine: None), "too many positional arguments"),
    "builtin": ([].append, "too many positional arguments"),
    "class": (Callable, "Callable is a class: pass an instance"),
    "builtin class": (dict, "dict is a class"),
    "coroutine": (coroutine, "coroutine or generator function: calling it runs nothing"),
    "coroutine method": (Callable().later, "calling it runs nothing"),
    "partial coroutine": (functools.partial(coroutine), "calling it runs nothing"),
    "asynchronous object": (Later(), "calling it runs nothing"),
    "generator": (generator, "calling it runs nothing"),
    "asynchronous generator": (asynchronous_generator, "calling it runs nothing"),
    "text": ("print", "must be callable as"),
    "nothing": (None, "must be callable as"),
}


@pytest.mark.parametrize("handler", GOOD.values(), ids=GOOD.keys())
def test_whatever_can_take_engine_and_batch_is_accepted(handler):
    assert Engine(handler).add_event_handler(Events.STARTED, handler)


@pytest.mark.parametrize(("handler", "message"), BAD.values(), ids=BAD.keys())
def test_whatever_cannot_take_engine_and_batch_is_refused_when_it_is_attached(handler, message):
    engine = Engine(nothing)
    with pytest.raises(HandlerError, match=message):
        engine.add_event_handler(Events.STARTED, handler)
    with pytest.raises(HandlerError, match=message):
        engine.on(Events.STARTED)(handler)
    with pytest.raises(HandlerError, match=message):
        Engine(handler)
    assert "STARTED -" in str(engine.describe())


def test_attaching_calls_nothing():
    called = []
    Engine(nothing).add_event_handler(Events.STARTED, lambda *args: called.append(args))
    assert called == []


def test_a_type_error_inside_a_handler_is_the_users_and_is_not_taken_for_a_wrong_signature():
    calls = []

    def handler(engine, batch):
        calls.append(batch)
        len(3)

    engine = Engine(nothing)
    engine.add_event_handler(Events.ITERATION_STARTED, handler)
    with pytest.raises(TypeError, match=r"object of type 'int' has no len\(\)"):
        engine.run([7])
    assert calls == [7]


# ---------------------------------------------------------------- unknown events


@pytest.mark.parametrize("verb", ["add", "on", "remove", "has", "fire"])
@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("EPOCH_COMPLETD", "no event 'EPOCH_COMPLETD': did you mean 'EPOCH_COMPLETED'"),
        ("epoch_completed", "did you mean 'EPOCH_COMPLETED'"),
        ("zzz", r"no event 'zzz'\. Events of your own are registered first: engine.register_events\('zzz'\)"),
        (Backprop.CLIPPED, "no event 'CLIPPED'"),
        (Backprop.CLIPPED(every=2), "no event 'CLIPPED'"),
        (3, "an event was wanted, such as Events.EPOCH_COMPLETED, got 3"),
        (None, "an event was wanted"),
        (Events, "an event was wanted"),
    ],
)
def test_an_unknown_event_is_an_error_that_names_the_nearest(event, message, verb):
    engine = Engine(nothing)
    if verb == "has" and event is None:
        return  # asks for any event
    verbs = {
        "add": lambda: engine.add_event_handler(event, nothing),
        "on": lambda: engine.on(event)(nothing),
        "remove": lambda: engine.remove_event_handler(nothing, event),
        "has": lambda: engine.has_event_handler(nothing, event),
        "fire": lambda: engine.fire_event(event),
    }
    with pytest.raises(EventError, match=message):
        verbs[verb]()


def test_one_unknown_event_in_a_list_attaches_nothing():
    engine = Engine(nothing)
    with pytest.raises(EventError, match="no event 'CLIPPED'"):
        engine.add_event_handler(Events.STARTED | Backprop.CLIPPED, nothing)
    assert not engine.has_event_handler(nothing)


@pytest.mark.parametrize("event", [3, None, Backprop])
def test_only_texts_and_members_of_an_event_enum_can_be_registered(event):
    with pytest.raises(EventError, match="register_events takes"):
        Engine(nothing).register_events(event)


# ---------------------------------------------------------------- Ignite's components


def ignite_trainer():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        loss = (engine.model(torch.full((1, 1), float(batch))) ** 2).mean()
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    return Engine(step, model, optimizer=optimizer)


def test_an_ignite_handler_keeps_ignites_calling_convention():
    engine, seen = Engine(nothing), []
    engine.ignite.add_event_handler(
        IgniteEvents.ITERATION_COMPLETED(every=2), lambda e, x, y=0: seen.append((e, x, y)), 1, y=2
    )
    engine.ignite.add_event_handler(Events.COMPLETED, lambda: seen.append("done"))
    with engine.ignite.add_event_handler(Events.STARTED, lambda e: seen.append("started")):
        engine.run(range(4), max_epochs=1)
    engine.run(range(4), max_epochs=2)
    assert seen == [
        "started",
        (engine.ignite, 1, 2),
        (engine.ignite, 1, 2),
        "done",
        (engine.ignite, 1, 2),
        (engine.ignite, 1, 2),
        "done",
    ]


def test_handlers_of_both_kinds_are_called_in_the_order_of_attaching():
    engine, seen = Engine(nothing), []
    engine.add_event_handler(Events.STARTED, lambda engine, batch: seen.append("ours"))
    engine.ignite.add_event_handler(IgniteEvents.STARTED, lambda: seen.append("ignite's"))
    engine.add_event_handler(IgniteEvents.STARTED, lambda engine, batch: seen.append("ours again"))
    engine.run([0])
    assert seen == ["ours", "ignite's", "ours again"]


def test_taking_an_ignite_handler_off_leaves_ours_as_they_were():
    engine, seen, counter = Engine(lambda engine, batch: batch), [], Counter()
    event = Events.ITERATION_COMPLETED
    for filtered in (event(every=2), event, event(once=1)):
        engine.add_event_handler(filtered, counter.count)
    handle = engine.add_event_handler(event(every=3), lambda engine, batch: seen.append(batch))
    average = ignite.metrics.Average()
    average.attach(engine.ignite, "average")
    with engine.ignite.add_event_handler(event, lambda: None):
        pass
    average.detach(engine.ignite)
    engine.run(range(4))
    assert (counter.calls, seen) == (2 + 4 + 1, [2])
    handle.remove()
    engine.run(range(4), max_epochs=2)
    assert seen == [2]
    assert engine.has_event_handler(counter.count, event)


def test_running_averages_are_readable_as_metrics():
    engine = Engine(lambda engine, batch: {"loss": batch})
    ignite.metrics.RunningAverage(output_transform=lambda out: out["loss"], alpha=0.5).attach(engine.ignite, "loss")
    assert engine.run([1.0, 3.0]).metrics["loss"] == 2.0


def test_an_ignite_timer_measures():
    engine, timer = Engine(nothing), ignite.handlers.Timer(average=True)
    timer.attach(engine.ignite, start=IgniteEvents.STARTED, step=IgniteEvents.ITERATION_COMPLETED)
    engine.run(range(3))
    assert timer.step_count == 3
    assert timer.value() > 0


def test_ignites_early_stopping_stops():
    trainer, evaluator = Engine(nothing), Engine(lambda engine, batch: batch, mode="eval")
    stopping = ignite.handlers.EarlyStopping(2, lambda engine: -engine.state.epoch, trainer.ignite)
    evaluator.ignite.add_event_handler(IgniteEvents.COMPLETED, stopping)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: evaluator.run([1]))
    result = trainer.run([0], max_epochs=10)
    assert (result.epoch, result.stop_reason) == (3, "terminated")


def test_ignites_bar_draws():
    engine, file = Engine(lambda engine, batch: {"loss": 0.5}), io.StringIO()
    bar = ignite.handlers.ProgressBar(file=file, ncols=80)
    bar.attach(engine.ignite, output_transform=lambda out: out)
    engine.run(range(4), max_epochs=2)
    assert "Epoch [2/2]" in file.getvalue()
    assert "loss=0.5" in file.getvalue()


@pytest.mark.parametrize("profiler", [ignite.handlers.BasicTimeProfiler, ignite.handlers.HandlersTimeProfiler])
def test_ignites_profilers_measure_handlers_of_both_kinds_and_leave_them_as_they_were(profiler, capsys):
    engine, seen, profiler = Engine(nothing), [], profiler()
    handles = [
        engine.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda e, batch: seen.append(batch)),
        engine.add_event_handler(Events.EPOCH_COMPLETED, lambda e, batch: seen.append("epoch")),
    ]
    engine.ignite.add_event_handler(IgniteEvents.ITERATION_STARTED(once=1), lambda: seen.append("ignite's"))
    described = [line for line in str(engine.describe()).splitlines() if "lambda" in line]
    profiler.attach(engine.ignite)
    engine.run(range(5))
    assert seen == ["ignite's", 1, 3, "epoch"]
    profiler.print_results(profiler.get_results())
    assert capsys.readouterr().out
    assert [line for line in str(engine.describe()).splitlines() if "lambda" in line] == described
    for handle in handles:
        handle.remove()
    engine.run(range(5), max_epochs=2)
    assert len(seen) == 4


def test_ignites_checkpoint_takes_the_step_from_the_trainer(tmp_path):
    trainer, evaluator = ignite_trainer(), Engine(lambda engine, batch: batch, mode="eval")
    checkpoint = ignite.handlers.Checkpoint(
        {"model": trainer.model},
        ignite.handlers.DiskSaver(str(tmp_path), require_empty=False),
        global_step_transform=ignite.handlers.global_step_from_engine(trainer.ignite),
        n_saved=None,
    )
    evaluator.ignite.add_event_handler(IgniteEvents.COMPLETED, checkpoint)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2), lambda engine, batch: evaluator.run([1]))
    trainer.run([1], max_epochs=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model_2.pt", "model_4.pt"]
    assert torch.load(tmp_path / "model_4.pt").keys() == trainer.model.state_dict().keys()


def test_ignites_schedulers_set_the_rate():
    trainer, rates = ignite_trainer(), []
    scheduler = ignite.handlers.LinearCyclicalScheduler(trainer.optimizer, "lr", 1e-3, 2e-3, cycle_size=4)
    trainer.ignite.add_event_handler(IgniteEvents.ITERATION_STARTED, scheduler)
    trainer.add_event_handler(Events.UPDATE_COMPLETED, lambda e, batch: rates.append(e.optimizer.param_groups[0]["lr"]))
    trainer.run(range(4))
    assert rates == pytest.approx([1e-3, 1.5e-3, 2e-3, 1.5e-3])


def test_ignites_guard_against_nan_stops():
    trainer = Engine(lambda engine, batch: batch)
    trainer.ignite.add_event_handler(IgniteEvents.ITERATION_COMPLETED, ignite.handlers.TerminateOnNan())
    assert trainer.run([1.0, float("nan"), 2.0]).iteration == 2


# ---------------------------------------------------------------- describe


def described():
    engine = Engine(nothing, name="train")
    engine.register_events("measured")
    engine.add_event_handler(Events.STARTED, nothing)
    engine.add_event_handler(Events.ITERATION_COMPLETED(every=100), Counter().count)
    engine.add_event_handler(Events.ITERATION_COMPLETED, print)
    engine.add_event_handler(Events.ITERATION_COMPLETED, Callable.of_the_class)
    engine.add_event_handler("measured", Callable.static)
    engine.ignite.add_event_handler(IgniteEvents.COMPLETED(once=1), ignite.handlers.Timer().reset)
    engine.ignite.add_event_handler(IgniteEvents.COMPLETED, nothing, None)
    return engine.describe()


def line_of(function):
    return f"(test_events.py:{function.__code__.co_firstlineno})"


def test_describe_lists_every_event_in_firing_order_with_its_handlers():
    assert (
        str(described())
        == f"""\
Engine train
  STARTED
    nothing  {line_of(nothing)}
  EPOCH_STARTED -
  GET_BATCH_STARTED -
  GET_BATCH_COMPLETED -
  ITERATION_STARTED -
  BACKWARD_COMPLETED -
  UPDATE_STARTED -
  UPDATE_COMPLETED -
  ITERATION_COMPLETED
    Counter.count  Events.ITERATION_COMPLETED(every=100)  {line_of(Counter.count)}
    print
    Callable.of_the_class  {line_of(Callable.of_the_class)}
  METRICS_RECORDED -
  DATALOADER_STOP_ITERATION -
  TERMINATE_SINGLE_EPOCH -
  EPOCH_COMPLETED -
  TERMINATE -
  INTERRUPT -
  EXCEPTION_RAISED -
  COMPLETED
    Timer.reset  (Ignite)  (timing.py:{ignite.handlers.Timer.reset.__code__.co_firstlineno})
    nothing  (Ignite)  {line_of(nothing)}
  measured
    Callable.static  {line_of(Callable.static)}"""
    )


def test_describe_shows_itself_as_a_table_in_a_notebook():
    html = described()._repr_html_()
    assert "<b>Engine train</b>" in html
    names = [event.name for event in Events] + ["measured"]
    assert [name for name in names if f">{name}</td>" not in html] == []
    assert f"Counter.count  Events.ITERATION_COMPLETED(every=100)  {line_of(Counter.count)}\nprint" in html


def test_describe_takes_an_attribute_of_a_users_object_for_what_it_is():
    class Child(Callable):
        _parent = "of the user"

        def __repr__(self):
            return "child"

    engine = Engine(nothing)
    engine.add_event_handler(Events.STARTED, Child())
    assert "  STARTED\n    child\n" in str(engine.describe())


# ---------------------------------------------------------------- a cell that is run again


def run_cell(source, namespace, filename=None):
    """Run source code as a notebook does: in ``__main__``, from a file name made of its content."""
    filename = filename or f"<cell {hash(source)}>"
    exec(compile(source, filename, "exec"), namespace)


@pytest.fixture
def notebook():
    seen = []
    return {"__name__": "__main__", "engine": Engine(nothing), "Events": Events, "seen": seen, "torch": torch}


HANDLER = """
@engine.on(Events.STARTED)
def look(engine, batch):
    seen.append({0!r})
"""


def seen_in_a_run(notebook):
    notebook["seen"].clear()
    notebook["engine"].reset()
    notebook["engine"].run([0])
    return notebook["seen"]


@pytest.mark.parametrize("again", [HANDLER.format("a"), HANDLER.format("b"), "\n\n" + HANDLER.format("b")])
def test_a_cell_run_again_replaces_its_handler_and_says_so(again, notebook, caplog):
    run_cell(HANDLER.format("a"), notebook)
    with caplog.at_level(logging.WARNING, logger="pellucid.engine"):
        run_cell(again, notebook)
    assert len(seen_in_a_run(notebook)) == 1
    assert "replaced what this cell, or a function of the same name, attached before: look" in caplog.text


def test_a_cell_run_again_replaces_a_handler_with_another_filter(notebook):
    run_cell(HANDLER.format("a"), notebook)
    run_cell(HANDLER.format("b").replace("STARTED", "STARTED(every=1)"), notebook)
    assert seen_in_a_run(notebook) == ["b"]


def test_a_cell_run_again_replaces_a_decorated_handler(notebook):
    source = HANDLER.format("a").replace("def", "@torch.no_grad()\ndef")
    for _ in range(3):
        run_cell(source, notebook)
    assert seen_in_a_run(notebook) == ["a"]


def test_a_handler_on_two_events_is_replaced_on_both(notebook):
    source = HANDLER.format("a").replace("STARTED", "STARTED | Events.COMPLETED")
    for _ in range(2):
        run_cell(source, notebook)
    assert seen_in_a_run(notebook) == ["a", "a"]


@pytest.mark.parametrize("filename", [None, "<string>"])
def test_closures_made_in_one_loop_are_all_kept(notebook, filename):
    source = """
def make(label):
    def look(engine, batch):
        seen.append(label)
    return look

for label in "abc":
    engine.add_event_handler(Events.STARTED, make(label))
"""
    for _ in range(2):
        run_cell(source, notebook, filename)
        assert seen_in_a_run(notebook) == ["a", "b", "c"]


def test_two_functions_of_one_name_in_one_cell_are_both_kept(notebook):
    source = HANDLER.format("a") + HANDLER.format("b")
    for _ in range(2):
        run_cell(source, notebook)
        assert seen_in_a_run(notebook) == ["a", "b"]


def test_two_lambdas_on_one_line_are_both_kept_and_replaced_when_the_cell_is_run_again(notebook):
    attach = "engine.add_event_handler(Events.STARTED, lambda engine, batch: seen.append({!r}));"
    for _ in range(2):
        run_cell(attach.format("a") + attach.format("b"), notebook)
        assert seen_in_a_run(notebook) == ["a", "b"]
    run_cell(attach.format("c"), notebook)
    assert seen_in_a_run(notebook) == ["a", "b", "c"]


def test_methods_of_two_objects_are_both_kept(notebook):
    source = """
class Counter:
    def count(self, engine, batch):
        seen.append("count")

one, other = Counter(), Counter()
engine.add_event_handler(Events.STARTED, one.count)
engine.add_event_handler(Events.STARTED, other.count)
"""
    for _ in range(2):
        run_cell(source, notebook)
        assert seen_in_a_run(notebook) == ["count", "count"]


def test_outside_a_notebook_nothing_is_replaced(notebook):
    notebook["__name__"] = "my_training"
    for _ in range(2):
        run_cell(HANDLER.format("a"), notebook)
    assert seen_in_a_run(notebook) == ["a", "a"]


def test_on_without_an_event_is_refused_at_once():
    engine = Engine(lambda engine, batch: batch)
    with pytest.raises(EventError, match="an event was wanted"):

        @engine.on
        def look(engine, batch): ...

    with pytest.raises(EventError, match=r"join several with \|"):
        engine.on(Events.STARTED, Events.COMPLETED)


def test_an_ignite_component_attached_to_the_engine_itself_is_told_where_it_belongs():
    engine = Engine(lambda engine, batch: batch)
    with pytest.raises(HandlerError, match=r"Average is a component of Ignite: attach it to engine\.ignite"):
        ignite.metrics.Average().attach(engine, "average")


@pytest.mark.parametrize("name", ["STARTED", "epoch_completed"])
def test_the_loops_own_events_cannot_be_registered_again(name):
    with pytest.raises(EventError, match="has the name of an event of the loop"):
        Engine(lambda engine, batch: batch).register_events(name)
