from __future__ import annotations

import copy
import keyword
import pickle
import threading

import pytest
import torch

from pellucid.engine import Engine, Events, PellucidError, RunError, StateError, StateSnapshot, StateView

READ_ONLY = [
    "epoch", "iteration", "epoch_iteration", "updates", "updates_by_optimizer", "max_epochs", "max_iters",
    "epoch_length", "output", "metrics", "last_record", "times", "exception", "stop_reason", "is_running",
    "update_due", "updating", "mode", "depth", "parent", "rank", "local_rank", "world_size", "device",
    "strategy", "precision",
]  # fmt: skip


def echo(engine, batch):
    return batch


def at_rest(engine):
    return engine.state


def in_the_step(act, **options):
    """Run one iteration of an engine that does ``act(engine)`` in its step; return the engine."""
    engine = Engine(lambda engine, batch: act(engine), **options)
    engine.run([0])
    return engine


def in_a_handler(act, event=Events.EPOCH_STARTED, **options):
    engine = Engine(echo, **options)
    engine.add_event_handler(event, lambda engine, batch: act(engine))
    engine.run([0])
    return engine


PLACES = [in_the_step, in_a_handler]


# ---------------------------------------------------------------- what may be read and written


def test_the_fields_are_those_that_the_design_promises():
    assert dir(Engine(echo).state) == sorted([*READ_ONLY, "snapshot"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*READ_ONLY, "snapshot"])
def test_no_built_in_field_can_be_written(name, place):
    def write(engine):
        before = repr(engine.state)
        with pytest.raises(StateError, match=rf"engine\.state\.{name} is read-only: "):
            setattr(engine.state, name, 7)
        assert repr(engine.state) == before

    engine = place(write)
    assert (engine.state.epoch, engine.state.iteration, engine.state.stop_reason) == (1, 1, "completed")


@pytest.mark.parametrize("name", [*READ_ONLY, "best", "unknown"])
def test_no_field_can_be_deleted(name):
    engine = Engine(echo, state={"best": 0.0})
    with pytest.raises(StateError, match=f"{name} cannot be deleted"):
        delattr(engine.state, name)


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_state_that_nobody_catches_leaves_the_run(place):
    with pytest.raises(StateError, match="epoch is read-only"):
        place(lambda engine: setattr(engine.state, "epoch", 7))


def test_counters_cannot_be_reached_through_a_read_only_mapping():
    state = Engine(echo, torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).state
    for mapping in (state.metrics, state.times, state.updates_by_optimizer):
        with pytest.raises(TypeError):
            mapping["optimizer"] = 7
        with pytest.raises(TypeError):
            del mapping["optimizer"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("epcoh", "epoch"),
        ("Iteration", "iteration"),
        ("ouput", "output"),
        ("bset", "best"),
        ("max_epoch", "max_epochs"),
    ],
)
def test_a_misspelt_field_is_an_error_that_names_the_nearest(misspelt, meant, place):
    def misspell(engine):
        message = rf"engine\.state has no field '{misspelt}': did you mean '{meant}'\?.*Declared here: best"
        with pytest.raises(StateError, match=message):
            getattr(engine.state, misspelt)
        with pytest.raises(StateError, match=message):
            setattr(engine.state, misspelt, 1)

    place(misspell, state={"best": 0.0})


@pytest.mark.parametrize("place", PLACES)
def test_an_undeclared_field_is_an_error_that_says_how_to_declare_it(place):
    def write(engine):
        with pytest.raises(StateError, match=r"no field 'zz'\. Fields you .*state=\{'zz': <.*Declared here: none"):
            engine.state.zz = 1

    place(write)


def test_a_state_error_is_an_attribute_error_so_hasattr_and_getattr_work():
    state = Engine(echo).state
    assert issubclass(StateError, PellucidError)
    assert not hasattr(state, "best")
    assert getattr(state, "best", 3) == 3


@pytest.mark.parametrize("name", ["_loop", "_status", "_declared", "__dict__"])
def test_the_parts_behind_the_state_cannot_be_replaced(name):
    with pytest.raises(StateError, match="has no field"):
        setattr(Engine(echo).state, name, {})


# ---------------------------------------------------------------- declared fields


@pytest.mark.parametrize("place", PLACES)
def test_a_declared_field_can_be_read_and_written(place):
    def keep_best(engine):
        engine.state.best = max(engine.state.best, 0.5)

    engine = place(keep_best, state={"best": 0.25, "seen": []})
    assert (engine.state.best, engine.state.seen) == (0.5, [])


@pytest.mark.parametrize("name", [*READ_ONLY, "snapshot"])
def test_a_name_that_is_taken_cannot_be_declared(name):
    with pytest.raises(StateError, match=f"'{name}' cannot be declared"):
        Engine(echo, state={name: 0})


@pytest.mark.parametrize("name", ["", "_best", "__class__", "two words", "val/loss", "class", 3, None])
def test_a_declared_name_must_be_one_that_can_be_written_after_a_dot(name):
    with pytest.raises(StateError, match="needs a plain name"):
        Engine(echo, state={name: 0})
    assert keyword.iskeyword("class")


@pytest.mark.parametrize("state", [["best"], "best", 3, {"best"}])
def test_declared_fields_come_as_a_mapping_with_first_values(state):
    with pytest.raises(StateError, match="state= takes the fields you declare and their first values"):
        Engine(echo, state=state)


def test_a_declared_field_that_cannot_be_copied_is_refused_at_once():
    with pytest.raises(StateError, match=r"the declared field 'lock' must be copyable data.*lock"):
        Engine(echo, state={"lock": threading.Lock()})


def test_first_values_are_the_engines_own():
    first = {"seen": []}
    one, other = Engine(echo, state=first), Engine(echo, state=first)
    one.state.seen.append(1)
    assert (one.state.seen, other.state.seen, first["seen"]) == ([1], [], [])


def test_a_declared_field_keeps_no_graph_but_is_otherwise_what_was_written():
    weight, plain = torch.nn.Parameter(torch.ones(())), ["a"]

    def write(engine):
        engine.state.loss = {"now": weight * 2}
        engine.state.seen.append(weight * 3)
        engine.state.weight, engine.state.plain = weight, plain

    engine = in_the_step(write, state={"loss": None, "seen": [], "weight": None, "plain": None})
    assert engine.state.loss["now"].grad_fn is None
    assert engine.state.weight is weight
    assert engine.state.plain is plain
    assert engine.state.snapshot().seen[0].grad_fn is None


def test_declared_fields_are_saved_and_restored():
    engine = Engine(echo, state={"best": 0.0, "seen": []})
    engine.state.best = 0.5
    engine.state.seen.append(1)
    saved = engine.state_dict()
    engine.state.seen.append(2)
    other = Engine(echo, state={"best": 0.0, "seen": []})
    other.load_state_dict(saved)
    other.state.seen.append(3)
    assert (other.state.best, other.state.seen, saved["fields"]["seen"]) == (0.5, [1, 3], [1])


def test_declared_fields_of_another_name_do_not_load():
    saved = Engine(echo, state={"best": 0.0}).state_dict()
    other = Engine(echo, state={"bestt": 1.0})
    with pytest.raises(PellucidError, match=r"declared fields.*'bestt'.*missing.*'best'.*unknown"):
        other.load_state_dict(saved)
    assert other.state.bestt == 1.0


def test_reset_puts_back_the_first_values():
    engine = Engine(echo, state={"best": 0.0, "seen": []})
    engine.state.best, engine.state.seen = 0.5, [1]
    engine.reset()
    engine.state.seen.append(2)
    engine.reset()
    assert (engine.state.best, engine.state.seen) == (0.0, [])


def test_a_fork_has_the_same_fields_with_first_values_of_its_own():
    engine = Engine(echo, state={"best": 0.0, "seen": []})
    engine.state.best = 0.5
    engine.state.seen.append(1)
    fork = engine.fork(echo)
    assert (fork.state.best, fork.state.seen) == (0.0, [])
    fork.state.best = 1.0
    fork.state.seen.append(2)
    assert (engine.state.best, engine.state.seen) == (0.5, [1])


# ---------------------------------------------------------------- snapshots


def test_run_returns_a_frozen_snapshot_with_every_field():
    result = Engine(echo, state={"best": 0.5}).run([1, 2], max_epochs=3)
    assert isinstance(result, StateSnapshot)
    assert dir(result) == sorted([*READ_ONLY, "best"])
    assert (result.epoch, result.iteration, result.best, result.stop_reason) == (3, 6, 0.5, "completed")


@pytest.mark.parametrize("name", [*READ_ONLY, "best", "unknown", "_values"])
def test_a_snapshot_is_frozen(name):
    result = Engine(echo, state={"best": 0.5}).run([1])
    with pytest.raises(StateError, match=f"a snapshot is frozen: {name} cannot be set to 7"):
        setattr(result, name, 7)
    with pytest.raises(StateError, match=f"a snapshot is frozen: {name} cannot be deleted"):
        delattr(result, name)


def test_a_misspelt_field_of_a_snapshot_is_an_error_too():
    with pytest.raises(StateError, match=r"the snapshot has no field 'epcoh': did you mean 'epoch'\?"):
        Engine(echo).run([1]).epcoh  # noqa: B018


def test_later_iterations_do_not_change_a_snapshot():
    stats = {"n": 0}  # a step may return the very same object each time

    def count(engine, batch):
        stats["n"] += 1
        engine.state.seen.append(batch)
        engine.record({"n": stats["n"]})
        return stats

    engine, taken = Engine(count, state={"seen": []}), []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda e, batch: taken.append(e.state.snapshot()))
    engine.run([1, 2, 3])
    (snapshot,) = taken
    assert (snapshot.iteration, snapshot.output, snapshot.seen) == (2, {"n": 2}, [1, 2])
    assert (snapshot.metrics["n"], snapshot.last_record.iteration, snapshot.is_running) == (2, 2, True)


def test_a_snapshot_copies_the_tensors_of_the_output_and_keeps_what_cannot_be_copied():
    lock, buffer = threading.Lock(), torch.zeros(())
    engine, taken = Engine(lambda engine, batch: {"lock": lock, "buffer": buffer}), []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e, batch: taken.append(e.state.snapshot()))
    engine.run([0])
    buffer.add_(1)
    assert (taken[0].output["lock"], taken[0].output["buffer"].item()) == (lock, 0.0)


def nested_run(act):
    """Call ``act(engine)`` in an evaluation inside a training, both with tensors in the output."""
    weight = torch.nn.Parameter(torch.ones(2))

    def inner_step(engine, batch):
        act(engine)
        return weight * batch

    def outer_step(engine, batch):
        loss = (weight * batch).sum()
        engine.record({"loss": loss})
        engine.fork(inner_step).run([3.0])
        act(engine)
        return {"loss": loss}

    trainer = Engine(outer_step, state={"best": torch.ones(1)}, name="outer")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: act(engine))
    return trainer.run([1.0, 2.0])


@pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy, copy.copy])
def test_a_state_or_snapshot_in_mid_run_can_be_copied_and_pickled(copied):
    def act(engine):
        for state in (engine.state, engine.state.snapshot()):
            again = copied(state)
            assert isinstance(again, StateSnapshot)
            assert repr(again) == repr(engine.state.snapshot())
            if engine.state.depth == 1:
                assert (again.parent.iteration, again.parent.depth) == (engine.state.parent.iteration, 0)

    result = nested_run(act)
    assert repr(copied(result)) == repr(result)
    assert copied(result).last_record.values == {"loss": 4.0}


def test_a_snapshot_holds_the_text_of_an_error():
    def fail(engine, batch):
        raise ValueError("of the user")

    engine, taken = Engine(fail), []
    engine.add_event_handler(Events.EXCEPTION_RAISED, lambda e, batch: taken.append(e.state.snapshot()))
    with pytest.raises(ValueError, match="of the user"):
        engine.run([1])
    assert pickle.loads(pickle.dumps(taken[0])).exception == "ValueError: of the user"


# ---------------------------------------------------------------- looking at it


def test_an_inner_run_knows_its_parent_and_depth():
    seen = []

    def act(engine):
        state = engine.state
        seen.append((state.depth, state.parent and (type(state.parent), state.parent.iteration)))

    result = nested_run(act)
    assert seen == [(1, (StateView, 1)), (0, None), (0, None), (1, (StateView, 2)), (0, None), (0, None)]
    assert (result.depth, result.parent) == (0, None)


def test_the_parents_state_is_read_only_too():
    def act(engine):
        if engine.state.depth:
            with pytest.raises(StateError, match="iteration is read-only"):
                engine.state.parent.iteration = 0

    assert nested_run(act).iteration == 2


@pytest.mark.parametrize("show", [repr, lambda state: state._repr_html_()])
def test_every_field_is_shown_in_mid_run(show):
    def act(engine):
        for state in (engine.state, engine.state.snapshot()):
            text = show(state)
            assert [name for name in [*READ_ONLY, "best"] if name not in text] == []
            assert "snapshot:" not in text
            if engine.state.depth:
                assert f"epoch 1, iteration {engine.state.parent.iteration}" in text

    nested_run(act)


def test_html_escapes_what_users_wrote():
    engine = Engine(echo, state={"best": "<b>&"}, name="<i>")
    for shown in (engine.state, engine.run([1]), engine, engine.describe()):
        html = shown._repr_html_()
        assert "<b>&" not in html.replace(f"<b>{html.split('<b>')[1].split('</b>')[0]}</b>", "")
        assert "<i>" not in html


def test_long_values_are_shortened():
    engine = Engine(echo, state={"text": "x" * 10_000})
    assert len(repr(engine.state)) < 2_000


# ---------------------------------------------------------------- the engine around it


@pytest.mark.parametrize(
    "name", ["model", "optimizer", "strategy", "device", "state", "name", "ignite", "modules", "run", "foo", "modle"]
)
def test_an_attribute_of_an_engine_cannot_be_misspelt_or_overwritten(name):
    engine = Engine(echo, torch.nn.Linear(1, 1))
    before = getattr(engine, name, None)
    with pytest.raises(AttributeError, match=name):
        setattr(engine, name, 1)
    assert getattr(engine, name, None) == before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_an_engine_is_refused_with_the_remedy(copied):
    with pytest.raises(RunError, match=r"cannot be copied or pickled: use engine\.fork\(step\).*state_dict"):
        copied(Engine(echo))
