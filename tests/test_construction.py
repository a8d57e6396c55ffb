from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch import nn

from pellucid.engine import (
    Engine,
    Events,
    HandlerError,
    ModelError,
    RunError,
    SingleDevice,
    StateError,
    StrategyError,
    UpdateError,
)

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def echo(engine, batch):
    return batch


def linear():
    return nn.Linear(2, 1)


def in_a_step(act, model=None, **options):
    """Call ``act(engine)`` in the step of one iteration."""
    Engine(lambda engine, batch: act(engine), model, **options).run([0])


# ---------------------------------------------------------------- the step, the mode, the name


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, r"a step must be callable as step\(engine, batch\), got None"),
        (lambda batch: batch, r"step <lambda>\(batch\) cannot be called as \(engine, batch\): too many positional"),
        (lambda engine, batch, model: batch, "missing a required argument: 'model'"),
        (Engine, "the step Engine is a class"),
    ],
)
def test_a_step_that_cannot_take_engine_and_batch_is_refused(step, message):
    with pytest.raises(HandlerError, match=message):
        Engine(step)


@pytest.mark.parametrize("mode", ["training", "EVAL", "", None, True])
def test_a_mode_is_train_or_eval(mode):
    with pytest.raises(RunError, match=rf"mode must be 'train' or 'eval', got {mode!r}"):
        Engine(echo, mode=mode)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("singel", "'singel'.*single"), ("", "''"), (None, "None"), (3, "3"), (SingleDevice, "SingleDevice")],
)
def test_an_unknown_strategy_is_refused(strategy, message):
    with pytest.raises(StrategyError, match=message):
        Engine(echo, strategy=strategy)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="optimiser"):
        Engine(echo, linear(), optimiser=SGD)


def test_an_engine_is_called_by_its_name_or_else_by_its_mode():
    assert (Engine(echo).name, Engine(echo, mode="eval").name, Engine(echo, name="gan").name) == (
        "train",
        "eval",
        "gan",
    )


def test_an_engine_needs_a_step_only():
    engine = Engine(echo)
    assert (engine.model, engine.optimizer, engine.modules) == (None, None, ())
    assert engine.run([1]).iteration == 1


# ---------------------------------------------------------------- the model


def test_the_model_is_the_very_object_that_was_passed_in():
    model, modules = linear(), {"a": linear(), "b": linear()}
    assert Engine(echo, model).model is model
    assert Engine(echo, modules).model is modules
    assert Engine(echo, modules).modules == (modules["a"], modules["b"])
    in_a_step(lambda engine: pytest.fail() if engine.model is not model else None, model)


@pytest.fixture
def process_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_model_that_is_wrapped_already_is_refused():
    wrapped = nn.parallel.DistributedDataParallel(linear())
    with pytest.raises(ModelError, match=r"model is wrapped already \(DistributedDataParallel\): pass .* `\.module`"):
        Engine(echo, wrapped)
    with pytest.raises(ModelError, match=r"model\['a'\] is wrapped already"):
        Engine(echo, {"a": wrapped})


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch.compile imports such code
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.DataParallel, r"wrapped already \(DataParallel\): pass the module inside it, `\.module`"),
        (torch.compile, r"wrapped already \(OptimizedModule\).*compile that one in place: `module\.compile\(\)`"),
    ],
)
def test_other_wrappers_are_refused_with_their_own_remedy(wrap, message):
    for mode in ("train", "eval"):
        with pytest.raises(ModelError, match=message):
            Engine(echo, wrap(linear()), mode=mode)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch.compile imports such code
def test_a_model_compiled_in_place_is_taken():
    model = linear()
    model.compile()
    assert Engine(echo, model).model is model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear, r"model is the class Linear: pass an instance, Linear\(\.\.\.\)"),
        ({"a": nn.Linear}, r"model\['a'\] is the class Linear"),
        (lambda x: x, "model is a function: pass a torch.nn.Module"),
        ("resnet18", "model is a str"),
        ([nn.Linear(1, 1)], "model is a list: pass a torch.nn.Module, or a dict"),
        (torch.ones(1), "model is a Tensor"),
        ({"a": 3}, r"model\['a'\] is a int"),
        ({}, "model is an empty mapping"),
        ({3: nn.Linear(1, 1)}, "model has the key 3"),
    ],
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(ModelError, match=message):
        Engine(echo, model)


def test_nothing_is_changed_where_a_construction_fails():
    model = linear().eval()
    before = dict(vars(model))
    with pytest.raises(UpdateError):
        Engine(echo, model, optimizer=SGD(linear().parameters()))
    assert vars(model) == before


# ---------------------------------------------------------------- the optimizer


def test_an_optimizer_comes_as_an_instance_a_factory_or_a_mapping_of_either():
    models = {"a": linear(), "b": linear()}
    mine = SGD(models["a"].parameters())
    assert Engine(echo, models["a"], optimizer=mine).optimizer is mine
    made = Engine(echo, models["a"], optimizer=SGD).optimizer
    assert made.param_groups[0]["params"] == list(models["a"].parameters())
    mapping = Engine(echo, models, optimizer={"a": mine, "b": SGD}).optimizer
    assert (mapping["a"], list(mapping)) == (mine, ["a", "b"])
    assert mapping["b"].param_groups[0]["params"] == list(models["b"].parameters())
    both = Engine(echo, models, optimizer=SGD).optimizer
    assert len(both.param_groups[0]["params"]) == 4


def test_a_factory_gets_each_parameter_once():
    shared = linear()
    models = {"a": nn.Sequential(shared, nn.ReLU()), "b": nn.Sequential(shared, linear())}
    optimizer = Engine(echo, models, optimizer=SGD).optimizer
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_optimizers_may_be_named_otherwise_than_modules():
    model = nn.ModuleDict({"body": linear(), "head": linear()})
    parts = {"slow": SGD(model["body"].parameters()), "fast": SGD(model["head"].parameters())}
    assert Engine(echo, model, optimizer=parts).optimizer is parts


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (SGD(nn.Linear(2, 1).parameters()), "'optimizer' holds none of the model's 2 parameters.*pass a factory"),
        ({"a": SGD(nn.Linear(2, 1).parameters())}, "'a' holds none of the model's 2 parameters"),
        ({}, r"optimizer=\{\} is an empty mapping"),
        ("sgd", "optimizer must be a torch optimizer, a factory .* got 'sgd'"),
        (0.1, "got 0.1"),
        ([SGD(nn.Linear(2, 1).parameters())], "optimizer must be a torch optimizer, a factory"),
        ({"a": "sgd"}, "a must be a torch optimizer"),
        (lambda parameters: None, "the factory of optimizer 'optimizer' must return a torch optimizer, got None"),
        (lambda parameters: "sgd", "must return a torch optimizer, got 'sgd'"),
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_refused(optimizer, message):
    with pytest.raises(UpdateError, match=message):
        Engine(echo, linear(), optimizer=optimizer)


def test_a_factory_for_a_model_without_parameters_is_refused():
    with pytest.raises(UpdateError, match="no parameters"):
        Engine(echo, nn.ReLU(), optimizer=SGD)
    with pytest.raises(UpdateError, match="no parameters"):
        Engine(echo, optimizer=SGD)


def test_an_optimizer_for_a_model_without_parameters_is_refused():
    with pytest.raises(UpdateError, match="holds none of the model's 0 parameters"):
        Engine(echo, nn.ReLU(), optimizer=SGD(linear().parameters()))


def test_without_a_model_any_optimizer_will_do():
    optimizer = SGD(linear().parameters())
    assert Engine(echo, optimizer=optimizer).optimizer is optimizer


def test_an_optimizer_on_an_evaluation_engine_is_refused():
    with pytest.raises(
        UpdateError, match="an evaluation engine makes no updates: leave optimizer out, or use mode='train'"
    ):
        Engine(echo, linear(), optimizer=SGD, mode="eval")


# ---------------------------------------------------------------- backward and update


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w: w.sum() * torch.ones(3), r"scalar loss of shape \(\), got shape \(3,\): take its mean or sum"),
        (lambda w: w * torch.ones(1, 1), r"got shape \(1, 1\)"),
        (lambda w: w.sum().detach(), "the loss carries no graph"),
        (lambda w: torch.ones(()), "the loss carries no graph"),
        (lambda w: 0.5, "backward takes the loss tensor of the step, got float: 0.5"),
        (lambda w: {"loss": w.sum()}, "got dict"),
        (lambda w: None, "got NoneType: None"),
    ],
)
def test_a_loss_that_backward_cannot_take_is_refused(loss, message):
    with pytest.raises(UpdateError, match=message):
        in_a_step(lambda engine: engine.backward(loss(engine.model.weight)), nn.Linear(1, 1), optimizer=SGD)


VERBS = {
    "backward": lambda engine: engine.backward(torch.ones((), requires_grad=True) * 2),
    "update": lambda engine: engine.update(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_without_an_optimizer_there_is_nothing_to_train(verb):
    with pytest.raises(
        UpdateError, match=rf"{verb} needs an optimizer, and this engine has none: Engine\(step, model, opt"
    ):
        in_a_step(VERBS[verb], linear())


@pytest.mark.parametrize("verb", VERBS)
def test_an_evaluation_engine_makes_no_updates(verb):
    with pytest.raises(UpdateError, match=f"{verb} was called in an evaluation engine, which makes no updates"):
        in_a_step(VERBS[verb], linear(), mode="eval")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c", r"no optimizer 'c'\. There are: 'gen', 'disc'"),
        ("dics", r"no optimizer 'dics': did you mean 'disc'\? There are: 'gen', 'disc'"),
        (None, r"this engine has several optimizers \('gen', 'disc'\): say which, engine.update\(name\)"),
    ],
)
def test_an_update_names_one_of_several_optimizers(name, message):
    models = {"gen": linear(), "disc": linear()}
    with pytest.raises(UpdateError, match=message):
        in_a_step(lambda engine: engine.update(name), models, optimizer={"gen": SGD, "disc": SGD})


def test_a_name_for_the_only_optimizer_must_be_right_too():
    with pytest.raises(UpdateError, match=r"no optimizer 'gen'\. There are: 'optimizer'"):
        in_a_step(lambda engine: engine.update("gen"), linear(), optimizer=SGD)


def test_a_wrong_call_leaves_weights_and_counters_alone():
    def step(engine, batch):
        for call in (lambda: engine.update("gen"), lambda: engine.backward(engine.model.weight)):
            with pytest.raises(UpdateError):
                call()

    model, fired = linear(), []
    before = model.weight.detach().clone()
    engine = Engine(step, model, optimizer=SGD)
    engine.add_event_handler(Events.UPDATE_STARTED | Events.BACKWARD_COMPLETED, lambda e, batch: fired.append(batch))
    engine.run([0])
    assert (engine.state.updates, fired, model.weight.grad) == (0, [], None)
    assert torch.equal(model.weight, before)


# ---------------------------------------------------------------- fork


@pytest.mark.parametrize("model", ["clone", "SHARE", "", None, True])
def test_a_fork_shares_or_copies_the_model(model):
    with pytest.raises(RunError, match=rf"fork\(model=\.\.\.\) must be 'share' or 'copy', got {model!r}"):
        Engine(echo, linear()).fork(echo, model=model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "training"}, RunError, "mode must be 'train' or 'eval'"),
        ({"optimizer": SGD}, UpdateError, "an evaluation engine makes no updates"),
        ({"mode": "train", "optimizer": "sgd"}, UpdateError, "must be a torch optimizer"),
        ({"metrics": 3}, HandlerError, "metrics= takes a mapping"),
    ],
)
def test_a_fork_checks_what_an_engine_checks(options, error, message):
    with pytest.raises(error, match=message):
        Engine(echo, linear()).fork(echo, **options)
    with pytest.raises(HandlerError, match="cannot be called as"):
        Engine(echo, linear()).fork(lambda batch: batch)


def test_a_copy_cannot_be_trained_by_the_optimizer_of_the_original():
    engine = Engine(echo, linear(), optimizer=SGD)
    with pytest.raises(UpdateError, match=r"holds none of the model's 2 parameters.*pass a factory"):
        engine.fork(echo, mode="train", model="copy", optimizer=engine.optimizer)


def test_a_fork_has_the_same_model_strategy_and_fields_and_fresh_state():
    engine = Engine(echo, linear(), state={"best": 0.0}, name="train")
    engine.run([1, 2])
    fork = engine.fork(echo)
    assert fork.model is engine.model
    assert fork.strategy is engine.strategy
    assert (fork.state.mode, fork.state.iteration, fork.state.best, fork.name) == ("eval", 0, 0.0, "train/echo")
    assert engine.fork(echo, name="probe").name == "probe"
    assert Engine(echo).fork(echo, model="copy").model is None


def test_a_copied_model_is_another_one_with_the_same_weights():
    models = {"a": linear(), "b": linear()}
    fork = Engine(echo, models, optimizer=SGD).fork(echo, mode="train", model="copy", optimizer=SGD)
    assert fork.model["a"] is not models["a"]
    assert torch.equal(fork.model["a"].weight, models["a"].weight)
    assert fork.optimizer.param_groups[0]["params"][0] is fork.model["a"].weight


def test_a_misspelt_field_in_a_fork_is_an_error_too():
    with pytest.raises(StateError, match="did you mean 'best'"):
        Engine(echo, state={"best": 0.0}).fork(echo).state.bset = 1


def test_a_mapping_need_not_be_a_dict():
    models = collections.OrderedDict(a=linear(), b=linear())
    assert Engine(echo, models, optimizer=SGD).run([0]).iteration == 1


def test_an_optimizer_that_computes_the_loss_itself_is_told_from_the_others():
    engine = Engine(backward_and_update, torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.LBFGS(p))
    with pytest.raises(UpdateError, match=r"LBFGS computes the loss itself.*engine\.optimizer\.step\(closure\)"):
        engine.run([torch.ones(1, 1)])


def test_an_update_outside_of_a_run_is_refused():
    engine = Engine(backward_and_update, torch.nn.Linear(1, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(RunError, match="outside of a run"):
        engine.update()


def backward_and_update(engine, batch):
    engine.backward(engine.model(batch).sum())
    engine.update()
