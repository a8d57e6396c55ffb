"""Nothing outlives its iteration, and nothing its run: asked with the cycle collector off."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import types
import weakref

import pytest
import torch
import torchmetrics
from ignite.metrics import Average
from torch import nn

from pellucid.engine import Engine, Events
from pellucid.handlers import EarlyStopping, History, ProgressBar, Validate


@pytest.fixture(autouse=True, scope="module")
def warm():
    """The first update of a process imports parts of torch, and errors met on the way keep the frames around them."""
    full_engine(Watch())


@pytest.fixture(autouse=True)
def no_collector():
    """Without the cycle collector only what has no reference left is freed, and at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Batch(list):
    """A batch, or an output, that can be referred to weakly."""


def net():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def train_step(engine, batch):
    loss = engine.model(batch[0]).mean()
    engine.backward(loss)
    engine.update()
    return {"loss": loss}


def eval_step(engine, batch):
    return engine.model(batch[0]).mean()


def batches(n=3):
    """A source that makes its batches as they are asked for, and keeps none."""
    return lambda state: (Batch([torch.ones(4, 2)]) for _ in range(n))


def live_tensors():
    """How many tensors there are; those in garbage that only the collector would free count too."""
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


class Watch:
    """Weak references to the model, batches, outputs and engines of a run."""

    def __init__(self):
        self.seen = []

    def look(self, engine, batch):
        output = engine.state.output
        self.seen += map(weakref.ref, [engine, engine.model, engine.optimizer, batch])
        self.seen += map(weakref.ref, output.values() if isinstance(output, dict) else [output])

    def attach(self, engine):
        engine.add_event_handler(Events.ITERATION_COMPLETED, self.look)

    def alive(self):
        return [reference() for reference in self.seen if reference() is not None]


def full_engine(watch, fail_at=None, fail_in=None, error=RuntimeError, **metrics):
    """A trainer that has run, with an evaluator and all handlers attached."""

    def step(engine, batch):
        if engine.state.iteration == fail_at and fail_in in (None, engine.name):
            raise error
        return train_step(engine, batch) if engine.name == "train" else eval_step(engine, batch)

    model = net()
    trainer = Engine(
        step,
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        metrics={"mean": Average(lambda out: out["loss"])},
        state={"best": 0.0},
        name="train",
    )
    evaluator = Engine(step, model, mode="eval", metrics={"ignite": Average(), **metrics}, name="eval")
    for handler in (
        Validate(evaluator, batches(), every=Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED),
        EarlyStopping("val/ignite", mode="min", patience=3),
        History(),
        ProgressBar(file=io.StringIO()),
    ):
        handler.attach(trainer)
    watch.attach(trainer)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: watch.seen.append(weakref.ref(batch)))
    trainer.run(batches(), max_epochs=2)
    return trainer


# ---------------------------------------------------------------- after a run


def test_with_its_names_everything_is_gone():
    watch = Watch()
    trainer = full_engine(watch, torch=torchmetrics.MeanMetric())
    assert trainer.state.iteration == 6
    del trainer
    assert watch.alive() == []


@pytest.mark.parametrize("fail_in", ["train", "eval"])
@pytest.mark.parametrize("error", [RuntimeError("of the user"), KeyboardInterrupt()])
def test_after_an_error_too(error, fail_in):
    watch = Watch()
    with contextlib.suppress(type(error)):
        full_engine(watch, fail_at=2, fail_in=fail_in, error=type(error))
    assert len(watch.seen) > 3
    assert watch.alive() == []


@pytest.mark.parametrize("stop", ["terminate", "interrupt"])
def test_after_a_stop_too(stop):
    watch = Watch()
    model = net()
    engine = Engine(train_step, model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    watch.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, batch: getattr(engine, stop)())
    engine.run(batches())
    del engine, model
    assert watch.alive() == []


@pytest.mark.parametrize("end", ["completed", "terminate", "interrupt", "raise"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_run_keeps_neither_batch_nor_output_though_the_engine_lives(mode, end):
    seen = []

    def step(engine, batch):
        output = Batch([torch.ones(1)])
        seen.extend(map(weakref.ref, [batch, output]))
        if len(seen) == 4 and end == "raise":
            raise RuntimeError("of the user")
        if len(seen) == 4 and end != "completed":
            getattr(engine, end)()
        return output

    engine = Engine(step, mode=mode)
    with contextlib.suppress(RuntimeError):
        engine.run(batches())
    assert len(seen) >= 4
    assert [reference() for reference in seen] == [None] * len(seen)
    assert engine.state.output is None


def test_an_error_that_somebody_keeps_is_the_only_thing_that_keeps_the_run_alive():
    watch = Watch()
    with pytest.raises(RuntimeError) as caught:
        full_engine(watch, fail_at=2, fail_in="train")
    assert watch.alive() != []
    del caught
    assert watch.alive() == []


def test_a_failed_construction_leaves_nothing():
    def build():
        model = net()
        references.append(weakref.ref(model))
        Engine(train_step, model, optimizer=torch.optim.SGD(net().parameters(), lr=0.1))

    references = []
    with contextlib.suppress(RuntimeError):
        build()
    assert references[0]() is None


def test_fifty_runs_leave_no_more_tensors_than_one():
    counts = []
    for run in range(50):
        full_engine(Watch())
        if run in (0, 49):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


def test_fifty_runs_of_one_engine_leave_no_more_tensors_than_one():
    counts, model = [], net()
    trainer = Engine(train_step, model, optimizer=torch.optim.Adam(model.parameters()))
    evaluator = trainer.fork(eval_step, metrics={"mean": Average()})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: evaluator.run(batches()))
    for run in range(50):
        trainer.run(batches(), max_epochs=run + 1)
        if run in (0, 49):
            counts.append(live_tensors())
    assert counts[0] == counts[1]


# ---------------------------------------------------------------- during a run


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("inner", [False, True])
def test_in_the_step_the_batch_and_output_before_are_gone(mode, inner):
    seen, alive = [], []

    def step(engine, batch):
        alive.extend(reference for reference in seen if reference() is not None)
        output = Batch([torch.ones(1)])
        seen.extend(map(weakref.ref, [batch, batch[0], output, output[0]]))
        return output

    engine = Engine(step, mode=mode)
    if inner:
        outer = Engine(lambda outer, batch: engine.run(batches()) and None)
        outer.run([0])
    else:
        engine.run(batches())
    assert (len(seen), alive) == (12, [])


def test_while_the_next_batch_is_made_the_one_before_is_gone():
    seen, alive = [], []

    def source():
        for _ in range(3):
            alive.extend(reference for reference in seen if reference() is not None)
            yield Batch([torch.ones(4, 2)])

    engine = Engine(lambda engine, batch: seen.append(weakref.ref(batch)))
    engine.run(source())
    assert (len(seen), alive) == (3, [])


def test_no_graph_is_kept():
    model, references = net(), []

    def step(engine, batch):
        hidden = engine.model[0](batch[0])
        loss = engine.model[1:](hidden).mean()
        references.append(weakref.ref(hidden))
        engine.record({"loss": loss})
        engine.state.last = loss
        return {"loss": loss, "parts": [hidden, (loss, "text")]}

    engine = Engine(step, model, state={"last": None}, metrics={"mean": Average(lambda output: output["loss"])})
    History().attach(engine)

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine, batch):
        output, values = engine.state.output, engine.state.metrics.raw()
        kept = [output["loss"], output["parts"][0], output["parts"][1][0], values["loss"], engine.state.last]
        assert [tensor.grad_fn for tensor in kept] == [None] * 5

    engine.run(batches(5))
    assert [reference() for reference in references] == [None] * 5


def test_two_hundred_steps_keep_no_more_tensors_than_fifty():
    counts, model = {}, net()
    trainer = Engine(
        train_step,
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        metrics={"loss": Average(lambda out: out["loss"])},
    )
    ProgressBar(file=io.StringIO()).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda e, batch: e.record({"loss": e.state.output["loss"]}))

    @trainer.on(Events.ITERATION_COMPLETED(event_filter=lambda engine, n: n in (50, 200)))
    def count(engine, batch):
        counts[engine.state.iteration] = live_tensors()

    trainer.run(batches(200))
    assert counts[50] == counts[200]


# ---------------------------------------------------------------- the model


def hooks_of(*owners):
    """The number of hooks of every kind on modules, parameters and optimizers."""
    found = {}
    for owner in owners:
        for name in dir(owner):
            if name.endswith("hooks") and isinstance(getattr(owner, name, None), dict):
                found[id(owner), name] = len(getattr(owner, name))
    return found


def attributes_of(model):
    return {(id(module), name) for module in model.modules() for name in vars(module)}


def reachable_from(start):
    """Everything that can be reached, without following what every object reaches: classes, modules and globals."""
    seen, waiting = {}, [start]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(
            one, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
        ):
            seen[id(one)] = one
            waiting.extend(gc.get_referents(one))
    return seen.values()


def run_with_looks(looks):
    """Call ``looks(engine)`` in the step, in events inside an iteration and in an inner run."""
    model = net()

    def step(engine, batch):
        looks(engine)
        return train_step(engine, batch)

    trainer = Engine(step, model, optimizer=torch.optim.Adam(model.parameters()))
    inner = Engine(lambda engine, batch: looks(engine), model, mode="eval")
    for event in (Events.STARTED, Events.BACKWARD_COMPLETED, Events.UPDATE_STARTED, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda engine, batch: looks(engine))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: inner.run([0]))
    trainer.run(batches(2))
    return trainer


def test_the_model_can_be_copied_and_pickled_in_mid_training_and_brings_nothing_along():
    sizes = []

    def look(engine):
        stream = pickle.dumps(engine.model)
        sizes.append(len(stream))
        for again in (copy.deepcopy(engine.model), pickle.loads(stream)):
            assert again.state_dict().keys() == engine.model.state_dict().keys()
            ours = [one for one in reachable_from(again) if type(one).__module__.startswith(("pellucid", "ignite"))]
            assert ours == []

    run_with_looks(look)
    assert sizes == [len(pickle.dumps(net()))] * 10


def test_no_path_leads_from_the_model_to_the_engine():
    def look(engine):
        for module in engine.model.modules():
            found = [
                one
                for one in reachable_from(module)
                if isinstance(one, Engine) or type(one).__module__.startswith("pellucid")
            ]
            assert found == []

    run_with_looks(look)


def test_a_run_puts_nothing_on_the_model():
    model, during = net(), []
    before = attributes_of(model), hooks_of(*model.modules(), *model.parameters())

    def look(engine, batch):
        during.append((attributes_of(model), hooks_of(*model.modules(), *model.parameters())))

    engine = Engine(train_step, model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    engine.add_event_handler(Events.STARTED | Events.ITERATION_COMPLETED, look)
    engine.run(batches())
    look(engine, None)
    assert during == [before] * 5


@pytest.mark.parametrize("end", ["completed", "terminate", "interrupt", "raise"])
def test_a_run_takes_its_hooks_off_the_optimizer(end):
    def step(engine, batch):
        during.append(hooks_of(engine.optimizer))
        if end == "raise":
            raise RuntimeError("of the user")
        if end != "completed":
            getattr(engine, end)()

    model, during = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    before = hooks_of(optimizer), sorted(vars(optimizer))
    engine = Engine(step, model, optimizer=optimizer)
    assert hooks_of(optimizer) == before[0]
    with contextlib.suppress(RuntimeError):
        engine.run(batches(1))
    assert (hooks_of(optimizer), sorted(vars(optimizer))) == before
    assert during[0] != before[0]


def test_the_optimizer_can_be_copied_and_pickled_in_mid_training():
    def look(engine):
        for again in (copy.deepcopy(engine.optimizer), pickle.loads(pickle.dumps(engine.optimizer))):
            assert [one for one in reachable_from(again) if isinstance(one, Engine)] == []

    run_with_looks(lambda engine: look(engine) if engine.optimizer else None)
