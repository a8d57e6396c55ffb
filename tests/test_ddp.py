"""Data parallelism in place: the same weights as one process and as torch's own wrapper, with the user's own model."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import (
    Case,
    assert_close,
    equal_to_the_bit,
    make_loader,
    make_net,
    make_optimizer,
    train_alone,
    train_step,
    train_with_engine,
    train_with_torch,
)
from ranks import RankError, run_on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pellucid.engine import DDP, Engine, Events, SingleDevice, StrategyError
from pellucid.handlers import Checkpoint

CASES = {
    "plain": Case(),
    "windows": Case(steps=2),
    "windows of three, the last one shorter": Case(steps=3),
    "weights": Case(weighted=True),
    "weights in windows": Case(steps=2, weighted=True),
    "clipping": Case(clip=0.1),
    "windows and clipping": Case(steps=2, clip=0.1),
    "bf16": Case(precision="bf16-mixed"),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_end_with_the_weights_of_one_process_on_the_joined_batches(case, world_size):
    alone = train_alone(case, world_size)
    first, *others = run_on_ranks(train_with_engine, world_size, case)
    assert_close(first, alone, 2e-2 if case.precision == "bf16-mixed" else 1e-5)
    assert all(equal_to_the_bit(first, other) for other in others)


def test_weights_count_items_where_ranks_have_batches_of_different_size():
    case = Case(weighted=True, epochs=1)
    alone = train_alone(case, 2, samples=11)  # batches of 3, 3, 3 and 2
    assert_close(run_on_ranks(train_with_engine, 2, case, 11)[0], alone)


OF_TORCH = [
    Case(),
    Case(batch_norm=True),
    Case(steps=2, batch_norm=True),
    Case(steps=3),
    Case(clip=0.1),
    Case(precision="bf16-mixed", batch_norm=True),
]


@pytest.mark.parametrize("case", OF_TORCH, ids=repr)
def test_ranks_end_with_the_weights_of_torchs_own_wrapper_to_the_bit(case):
    ours = run_on_ranks(train_with_engine, 2, case)
    assert [equal_to_the_bit(*pair) for pair in zip(ours, run_on_ranks(train_with_torch, 2, case), strict=True)] == [
        True,
        True,
    ]


def test_gradients_that_are_always_brought_together_give_the_same_weights():
    case = Case(steps=3)
    last_only = run_on_ranks(train_with_engine, 2, case)[0]
    always = run_on_ranks(_always_together, 2, case)[0]
    assert_close(always, last_only)


def _always_together(case: Case) -> Any:
    return train_with_engine(case, sync_every_batch=True)


# ---------------------------------------------------------------------- one model object


class Net(nn.Module):
    """A model with a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10)
        self.head = nn.Linear(10, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(inputs)))

    def describe(self) -> str:
        return f"{self.head.out_features} classes"


def _one_object() -> dict[str, Any]:
    net = Net()
    seen: dict[str, Any] = {}

    def step(engine: Engine, batch: Any) -> None:
        inputs, classes = batch
        cross_entropy(engine.model(inputs), classes).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        seen["same"] = engine.model is net and type(engine.model) is Net
        seen["method"] = engine.model.describe()
        seen["keys"] = list(engine.model.state_dict())

    engine = Engine(step, net, optimizer=make_optimizer(net))
    engine.run(make_loader(24))
    seen["strategy"], seen["world"] = engine.state.strategy, engine.state.world_size
    seen["weights"] = {name: value.clone() for name, value in net.state_dict().items()}
    return seen


def test_the_model_is_the_users_own_object_and_a_plain_loop_trains_in_parallel():
    first, second = run_on_ranks(_one_object, 2)
    assert first["same"] and first["method"] == "3 classes"
    assert first["keys"] == ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert (first["strategy"], first["world"]) == ("ddp", 2)
    assert equal_to_the_bit(first["weights"], second["weights"])


def _starts_from_rank_0() -> list[float]:
    torch.manual_seed(dist.get_rank())
    net = Net()
    Engine(train_step(Case()), net, optimizer=make_optimizer(net))
    return net.body.bias.tolist()


def test_all_ranks_start_from_the_weights_of_rank_0():
    first, second = run_on_ranks(_starts_from_rank_0, 2)
    assert first == second


def _copies() -> dict[str, Any]:
    net = make_net(batch_norm=True)
    before = set(vars(net))
    seen: dict[str, Any] = {}

    def step(engine: Engine, batch: Any) -> None:
        train_step(Case())(engine, batch)
        if engine.state.iteration != 2:
            return
        copied = copy.deepcopy(engine.model)
        pickled = pickle.dumps(engine.model)
        loaded = pickle.loads(pickled)
        seen["size"] = len(pickled)
        seen["equal"] = equal_to_the_bit(copied.state_dict(), loaded.state_dict())
        seen["drags"] = [type(one).__name__ for one in _reachable(copied) if isinstance(one, Engine | DDP)]
        if dist.get_rank() == 0:  # alone: a copy is detached from the ranks
            cross_entropy(copied(batch[0]), batch[1]).backward()
            cross_entropy(loaded(batch[0]), batch[1]).backward()

    engine = Engine(step, net, optimizer=make_optimizer(net))
    engine.run(make_loader(24))
    seen["attributes"] = set(vars(net)) - before
    del engine, step
    gc.collect()
    seen["hooks"] = len(net._forward_hooks) + len(net._forward_pre_hooks)
    seen["state"] = sum(value.numel() * value.element_size() for value in net.state_dict().values())
    return seen


def _reachable(root: Any) -> list[Any]:
    """Everything that can be got at from a module without going through a module of Python's or a class."""
    found: dict[int, Any] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in found or isinstance(one, type) or type(one).__name__ in {"module", "function", "dict_proxy"}:
            continue
        found[id(one)] = one
        left.extend(gc.get_referents(one))
    return list(found.values())


def test_a_copy_made_in_mid_training_is_detached_from_ranks_and_engine():
    for seen in run_on_ranks(_copies, 2):
        assert seen["equal"] and seen["drags"] == []
        assert seen["size"] < seen["state"] + 10_000
        assert seen["attributes"] == set() and seen["hooks"] == 0


# ---------------------------------------------------------------------- parameters that take no part


class TwoHeads(nn.Module):
    """Uses its second head in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 10)
        self.first = nn.Linear(10, 3)
        self.second = nn.Linear(10, 3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.body(inputs))
        return self.first(hidden) if self.calls % 2 else self.first(hidden) + self.second(hidden)


def _two_heads(frozen: bool, plain: bool, **options: Any) -> Any:
    net = TwoHeads()
    net.second.requires_grad_(not frozen)

    def plain_step(engine: Engine, batch: Any) -> None:
        cross_entropy(engine.model(batch[0]), batch[1]).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    engine = Engine(
        plain_step if plain else train_step(Case()),
        net,
        optimizer=make_optimizer(net),
        strategy=DDP(**options),
    )
    engine.run(make_loader(24), max_iters=4)
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("plain", [False, True])
def test_an_unused_parameter_is_an_error_that_names_it(plain):
    with pytest.raises(RankError, match=r"second\.weight.*find_unused_parameters=True") as error:
        run_on_ranks(_two_heads, 2, False, plain, timeout_sec=40)
    assert error.value.kind == "StrategyError"


def _unused_allowed() -> Any:
    return _two_heads(False, False, find_unused_parameters=True)


def _unused_frozen() -> Any:
    return _two_heads(True, False)


@pytest.mark.parametrize("body", [_unused_allowed, _unused_frozen])
def test_unused_parameters_that_are_allowed_or_frozen_are_no_error(body):
    first, second = run_on_ranks(body, 2)
    assert equal_to_the_bit(first, second)


def _thaws() -> Any:
    net = Net()
    net.body.requires_grad_(False)
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net))

    @engine.on(Events.ITERATION_STARTED(once=3))
    def thaw(engine: Engine, batch: Any) -> None:
        net.body.requires_grad_(True)

    engine.run(make_loader(24))
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_parameters_thawed_in_mid_run_are_averaged_from_then_on():
    first, second = run_on_ranks(_thaws, 2)
    assert equal_to_the_bit(first, second)
    assert not torch.equal(first["body.weight"], Net().body.weight)


# ---------------------------------------------------------------------- unusual steps


class Twice(nn.Module):
    """Two outputs, so that two losses can go through one forward without keeping the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(inputs), self.second(inputs)


def _two_losses(in_one: bool, steps: int) -> Any:
    torch.manual_seed(0)
    net = Twice()

    def step(engine: Engine, batch: Any) -> None:
        one, other = engine.model(batch[0])
        losses = cross_entropy(one, batch[1]), other.square().mean()
        for loss in [sum(losses)] if in_one else losses:
            engine.backward(loss)
        engine.update()

    engine = Engine(step, net, optimizer=make_optimizer(net), gradient_accumulation_steps=steps)
    engine.run(make_loader(24))
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_may_be_differentiated_in_pieces(steps):
    pieces, whole = (run_on_ranks(_two_losses, 2, in_one, steps) for in_one in (False, True))
    assert equal_to_the_bit(*pieces)
    assert_close(pieces[0], whole[0])


def _window_cut_by_terminate_epoch() -> Any:
    net = make_net()
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net), gradient_accumulation_steps=4)

    @engine.on(Events.ITERATION_COMPLETED(once=1))
    def cut(engine: Engine, batch: Any) -> None:
        if engine.state.rank == 1:
            engine.terminate_epoch()

    engine.run(make_loader(48))
    return engine.state.iteration, engine.state.updates, {k: v.clone() for k, v in net.state_dict().items()}


def test_an_update_whose_window_was_cut_short_has_the_gradients_of_all_ranks():
    first, second = run_on_ranks(_window_cut_by_terminate_epoch, 2)
    assert first[:2] == second[:2] == (2, 1)  # heard of one iteration later
    assert equal_to_the_bit(first[2], second[2])
    net = make_net()
    optimizer = make_optimizer(net)
    for inputs, classes in list(make_loader(48))[:4]:
        (cross_entropy(net(inputs), classes) / 4).backward()
    optimizer.step()
    assert_close(first[2], net.state_dict())


def _gan() -> Any:
    torch.manual_seed(0)
    model = {"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)}

    def step(engine: Engine, batch: Any) -> None:
        fake = engine.model["g"](batch)
        engine.backward(engine.model["d"](fake.detach()).mean() - engine.model["d"](batch).mean(), optimizer="d")
        engine.update("d")
        engine.backward(-engine.model["d"](fake).mean(), optimizer="g")
        engine.update("g")

    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.1) for name, part in model.items()}
    engine = Engine(step, model, optimizer=optimizers)
    generator = torch.Generator().manual_seed(5)
    engine.run([torch.randn(3, 4, generator=generator) for _ in range(8)])
    return {f"{name}.{key}": value.clone() for name, part in model.items() for key, value in part.state_dict().items()}


def test_two_models_with_two_optimizers_stay_equal_over_ranks():
    first, second = run_on_ranks(_gan, 2)
    assert equal_to_the_bit(first, second)


def _compiled() -> Any:
    net = make_net()
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net), strategy=DDP(compile={"backend": "eager"}))
    engine.run(make_loader(24))
    engine.run(make_loader(24), max_epochs=2)
    assert list(net.state_dict()) == list(make_net().state_dict())
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_a_model_compiled_in_place_trains_as_one_that_is_not():
    first, second = run_on_ranks(_compiled, 2)
    assert equal_to_the_bit(first, second)
    assert_close(first, run_on_ranks(train_with_engine, 2, Case(), 24)[0])


# ---------------------------------------------------------------------- what is refused


def _different_models(kind: str) -> None:
    torch.manual_seed(0)
    width = 10 if dist.get_rank() == 0 else 11
    if kind == "lazy":
        Engine(train_step(Case()), nn.Sequential(nn.LazyLinear(3)), strategy="ddp")
    elif kind == "shapes":
        Engine(train_step(Case()), nn.Linear(6, width), strategy="ddp")
    elif kind == "names":
        parts = [nn.Linear(6, 3)] * (1 + dist.get_rank())
        Engine(train_step(Case()), nn.Sequential(*[copy.deepcopy(part) for part in parts]), strategy="ddp")
    elif kind == "shared":
        shared = nn.Linear(6, 3)
        Engine(train_step(Case()), {"a": shared, "b": nn.Sequential(shared)}, strategy="ddp")
    elif kind == "two strategies":
        net = nn.Linear(6, 3)
        first = Engine(train_step(Case()), net, strategy=DDP())
        Engine(train_step(Case()), net, strategy=DDP())
        del first
    elif kind == "backend":
        DDP(backend="nccl")
    elif kind == "uneven":
        DDP(uneven="no")  # type: ignore[arg-type]
    elif kind == "another backend":
        dist.Backend.register_backend("another", lambda *args: None, devices=["cpu"])
        DDP(backend="another")


def _comes_apart(kind: str) -> None:
    torch.manual_seed(0)
    rank, net = dist.get_rank(), make_net()
    optimizer = make_optimizer(net)
    engine = Engine(train_step(Case()), net, optimizer=optimizer)
    data: Any = make_loader(24)
    if kind == "rates":
        optimizer.param_groups[0]["lr"] = 0.1 if rank else 0.2
    elif kind == "frozen":
        part = [one for one in net.modules() if isinstance(one, nn.Linear)][rank]
        engine.add_event_handler(Events.ITERATION_STARTED(once=2), lambda engine, batch: freeze(part))
    elif kind == "monitor":
        Checkpoint("unused", monitor="loss", mode="min", keep_last=False).attach(engine)
        if rank == 0:
            engine.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, _: engine.record({"loss": 1.0}))
    elif kind == "few":
        data = list(data)[:1]
    elif kind == "a short generator":
        data = (batch for batch in list(data)[:1])
    engine.run(data)


def freeze(part: nn.Module) -> None:
    part.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rates", r"optimizer.param_groups\[0\]\['lr'\] is 0.2 on rank 0 and 0.1 on rank 1"),
        ("frozen", "is frozen on rank 1 or on rank 0, and not on both"),
        ("monitor", "the score of Checkpoint.*monitor='loss' must be recorded on every rank"),
        ("few", "start fewer ranks"),
        ("a short generator", "fewer batches than ranks"),
    ],
)
def test_what_differs_between_ranks_is_named(tmp_path, monkeypatch, kind, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RankError) as error:
        run_on_ranks(_comes_apart, 2, kind, timeout_sec=30)
    assert re.search(text, "\n".join([error.value.text, *error.value.others.values()]))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("lazy", "lazy module"),
        ("shapes", r"differs between ranks.*\(11, 6\)"),
        ("names", "4 tensors on one rank, 2"),
        ("shared", "'a' and 'b' share the parameter"),
        ("two strategies", "under DDP.* already"),
        ("uneven", "'trim' or 'pad'"),
        ("another backend", "there is a process group already, with 'cpu:gloo.*' and without 'another'"),
    ],
)
def test_what_cannot_be_trained_together_is_refused_on_every_rank(kind, text):
    with pytest.raises(RankError, match=text) as error:
        run_on_ranks(_different_models, 2, kind)
    assert error.value.kind == "StrategyError" and len(error.value.others) == 1


def test_in_one_process_ddp_is_a_single_device():
    net = make_net()
    engine = Engine(train_step(Case()), net, optimizer=make_optimizer(net), strategy=DDP())
    engine.run(make_loader(24))
    alone = make_net()
    Engine(train_step(Case()), alone, optimizer=make_optimizer(alone), strategy=SingleDevice()).run(make_loader(24))
    assert engine.state.world_size == 1
    assert equal_to_the_bit(net.state_dict(), alone.state_dict())


# ---------------------------------------------------------------------- what we rely on in torch


def _torchs_wrapper() -> list[bool]:
    net = nn.Linear(2, 2)
    wrapper = DistributedDataParallel(net, init_sync=False)
    names = ("_pre_forward", "_post_forward", "require_backward_grad_sync", "broadcast_buffers", "reducer")
    return [hasattr(wrapper, name) for name in names] + [hasattr(wrapper.reducer, "prepare_for_backward")]


def test_torchs_wrapper_has_the_private_parts_that_we_call():
    assert run_on_ranks(_torchs_wrapper, 1) == [[True] * 6]


def test_a_strategy_can_be_copied_and_pickled():
    strategy = DDP(static_graph=True)
    assert copy.deepcopy(strategy).name == pickle.loads(pickle.dumps(strategy)).name == "ddp"
    with pytest.raises(StrategyError, match="comm_hook"):
        DDP(comm_hook=3)  # type: ignore[arg-type]
