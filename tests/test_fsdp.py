"""Sharding in place: the weights of one process, whole copies and states, and optimizers that were there before."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.metrics import Loss
from ranks import run_on_ranks as run_body
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Subset, TensorDataset

from pellucid.engine import FSDP, Engine, Events, StrategyError
from pellucid.handlers import EMA, GradientClip, Validate

Batches = list[tuple[Tensor, Tensor]]
States = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Net(nn.Module):
    """Two blocks and a head, with what sharding must carry: a tie, a frozen layer, an unused one, buffers, a tag."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 3)
        self.head.weight.is_large = True
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.skips: Any = False

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = torch.tanh(self.first(inputs))
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(torch.tanh(self.frozen(self.last(inputs)))) * self.scale

    def hidden(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.first(inputs))


def make_batches(count: int = 12, samples: int = 4) -> Batches:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))
        for _ in range(count)
    ]


def joined(batches: Batches, size: int) -> Batches:
    """Return what one process takes at once where ``size`` ranks take a batch each."""
    parts = [batches[begin : begin + size] for begin in range(0, len(batches), size)]
    return [(torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "fused": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
    "one by one": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1, foreach=False),
}


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    *,
    steps: int = 1,
    clip: Callable[[Any, float], Tensor] | None = None,
    strategy: FSDP | None = None,
) -> list[float]:
    """Train in a plain loop; return the norms of the gradients."""
    norms = []
    stepper = None if strategy is None else strategy.make_stepper()
    for number, (inputs, targets) in enumerate(batches, start=1):
        if strategy is None or stepper is None:
            (mse_loss(model(inputs), targets) / steps).backward()
        else:
            with strategy.autocast():
                loss = mse_loss(model(inputs), targets) / steps
            stepper.backward(loss, None)
        if number % steps == 0:
            if stepper is not None:
                stepper.unscale(optimizer)
            if clip is not None:
                norms.append(float(clip(list(model.parameters()), 0.1)))
            (optimizer if stepper is None else stepper).step(*([] if stepper is None else [optimizer]))
            if stepper is not None:
                stepper.finish()
            optimizer.zero_grad()
    return norms


def plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def half() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "the default": lambda: {},
    "by class": lambda: {"shard": Block},
    "by classes": lambda: {"shard": (Block, nn.Conv2d)},
    "by names": lambda: {"shard": ["blocks.*", "head"]},
    "by a function": lambda: {"shard": lambda name, module: name.endswith("up")},
    "one group": lambda: {"shard": ()},
    "as torch reshards": lambda: {"reshard_after_forward": None},
    "no resharding": lambda: {"reshard_after_forward": False},
    "offloaded": lambda: {"cpu_offload": True},
    "compiled": lambda: {"compile": {"backend": "eager"}},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"precision": "16-mixed", "scaler": {"init_scale": 1024.0}},
    "bf16 gathered": lambda: {"mixed_precision": half()},
    "hybrid": lambda: {"mesh": {"replicate": 2, "shard": 2}},
    "hybrid, one size left out": lambda: {"mesh": {"replicate": 2}},
    "copies only": lambda: {"mesh": {"replicate": 4, "shard": 1}},
    "tensor": lambda: {"mesh": {"tensor": 2, "shard": 2}, "tensor_parallel": plan()},
    "tensor only": lambda: {"mesh": {"tensor": 2}, "tensor_parallel": plan()},
    "all three": lambda: {"mesh": {"replicate": 2, "tensor": 2}, "tensor_parallel": plan()},
    "resharding to two": lambda: {"reshard_after_forward": 2},
}


def train_sharded(options: str, optimizer: str = "sgd", steps: int = 1, hidden: int = 8) -> Any:
    if options == "compiled":
        # dynamo asks tensors for a gradient and hides the warning, in a way that an error gets through
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
    strategy = FSDP("cpu", **OPTIONS[options]())
    model = Net(hidden)
    strategy.prepare_model(model)
    updated = OPTIMIZERS[optimizer](model.parameters())
    batches = make_batches()[strategy.data_rank :: strategy.data_world_size]
    with strategy.running(model, True):
        norms = train(model, updated, batches, steps=steps, clip=strategy.clip_gradients, strategy=strategy)
    return strategy.full_state_dict(model), norms, strategy.data_world_size


def train_alone(data_ranks: int, optimizer: str = "sgd", steps: int = 1, hidden: int = 8) -> tuple[States, list[float]]:
    model = Net(hidden)
    batches = joined(make_batches(), data_ranks)
    norms = train(model, OPTIMIZERS[optimizer](model.parameters()), batches, steps=steps, clip=nn.utils.clip_grad_norm_)
    return model.state_dict(), norms


def assert_same(found: States, wanted: States, tolerance: float = 1e-5) -> None:
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert type(found[key]) is Tensor and found[key].device.type == "cpu"
        torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance)


def run_on_ranks(body: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    return run_body(with_fresh_caches, world_size, body.__name__, *args, **options)


def with_fresh_caches(name: str, *args: Any) -> Any:
    """Run a body in a process in which another process group was before: torch's caches hold on to that."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    return globals()[name](*args)


# ---------------------------------------------------------------- the weights of one process


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(2, name) for name in list(OPTIONS)[:13]]
    + [(4, name) for name in list(OPTIONS)[13:]]
    + [(3, "the default"), (4, "the default"), (2, "tensor only")],
)
def test_updates_are_those_of_one_process_on_the_joined_batches(world_size: int, options: str) -> None:
    results = run_on_ranks(train_sharded, world_size, options)
    state, norms, data_ranks = results[0]
    wanted, wanted_norms = train_alone(data_ranks)
    tolerance = 0.02 if "16" in options else 1e-5
    assert_same(state, wanted, tolerance)
    assert norms == pytest.approx(wanted_norms, rel=tolerance)
    for other, other_norms, _ in results[1:]:
        assert other_norms == norms
        assert all(torch.equal(other[key], value) for key, value in state.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_accumulation_window_has_the_mean_of_its_batches_under_every_optimizer(optimizer: str) -> None:
    state, norms, _ = run_on_ranks(train_sharded, 2, "the default", optimizer, 2)[0]
    wanted, wanted_norms = train_alone(2, optimizer, 2)
    assert_same(state, wanted)
    assert norms == pytest.approx(wanted_norms, rel=1e-5)


@pytest.mark.parametrize("options", ["tensor", "all three"])
def test_layers_of_odd_sizes_are_shared_out_too(options: str) -> None:
    state, _, data_ranks = run_on_ranks(train_sharded, 4, options, "adamw", 1, 6)[0]
    assert_same(state, train_alone(data_ranks, "adamw", hidden=6)[0])


# ---------------------------------------------------------------- a model comes under the strategy


def sharded(model: nn.Module | None = None, **options: Any) -> tuple[FSDP, Any]:
    strategy = FSDP("cpu", **options)
    model = Net() if model is None else model
    strategy.prepare_model(model)
    return strategy, model


def look_at_prepared() -> Any:
    model = Net()
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            one.add_(dist.get_rank())
    strategy, same = sharded(model)
    before = [id(one) for one in model.parameters()]
    strategy.prepare_model(model)
    strategy.prepare_model({"block": model.blocks[0], "all": model})
    assert same is model
    assert before == [id(one) for one in model.parameters()]
    assert isinstance(model, Net)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert model.first.weight is model.last.weight
    assert model.head.weight.is_large
    assert [one.requires_grad for one in model.parameters()] == [one.requires_grad for one in Net().parameters()]
    assert strategy.forward_is_collective
    assert (strategy.data_rank, strategy.data_world_size) == (strategy.rank, 2)
    assert model.seen == 0
    return strategy.full_state_dict(model), sum(one.to_local().numel() for one in model.parameters())


def test_all_ranks_have_rank_0s_weights_and_a_part_each_and_preparing_again_changes_nothing() -> None:
    (state, mine), (other, others) = run_on_ranks(look_at_prepared, 2)
    assert_same(state, Net().state_dict(), 0)
    assert_same(other, Net().state_dict(), 0)
    assert mine + others == sum(one.numel() for one in Net().parameters())


def groups_of(options: dict[str, Any], model: nn.Module | None = None) -> list[str]:
    from torch.distributed.fsdp import FSDPModule

    _, model = sharded(model, **options)
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.lists = nn.ModuleList([nn.ModuleList([Block()])])

    def forward(self, inputs: Tensor) -> Tensor:
        for block in (*self.blocks, self.lists[0][0]):
            inputs = block(inputs)
        return inputs


def look_at_groups() -> None:
    assert groups_of({}) == ["", "blocks.0", "blocks.1"]
    assert groups_of({"shard": ()}) == [""]
    assert groups_of({"shard": Block}) == ["", "blocks.0", "blocks.1"]
    assert groups_of({"shard": "blocks.*.up"}) == ["", "blocks.0.up", "blocks.1.up"]
    assert groups_of({"shard": lambda name, module: name == "head"}) == ["", "head"]
    tied = Tied()
    assert groups_of({}, tied) == ["", "blocks.1", "lists.0.0"]
    reference = Tied()
    reference.load_state_dict({key: value.full_tensor() for key, value in tied.state_dict().items()})
    inputs = torch.ones(2, 6)
    torch.testing.assert_close(tied(inputs), reference(inputs))
    layer = Block()
    repeated = nn.Sequential(*[layer] * 3)
    assert groups_of({}, repeated) == ["", "0"]
    assert groups_of({}, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == [""]


def test_blocks_are_groups_unless_they_share_a_parameter_and_others_can_be_chosen() -> None:
    run_on_ranks(look_at_groups, 2)


def train_two_models() -> None:
    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))

    inputs = torch.randn(2, 6)
    for kind in (dict, nn.ModuleDict):
        (g, d), (plain_g, plain_d) = make(), make()
        strategy = FSDP("cpu")
        strategy.prepare_model(kind({"g": g, "d": d}))
        stepper = strategy.make_stepper()
        for generator, critic in ((g, d), (plain_g, plain_d)):
            critic(generator(inputs)).sum().backward()
        ours = critic_of_both = d(g(inputs)).pow(2).sum()
        # into the critic alone, though the generator is in the graph too
        stepper.backward(critic_of_both, list(d.parameters()))
        plain_d(plain_g(inputs)).pow(2).sum().backward(inputs=list(plain_d.parameters()))
        assert ours.requires_grad
        for one, wanted in zip(
            (*g.parameters(), *d.parameters()), (*plain_g.parameters(), *plain_d.parameters()), strict=True
        ):
            torch.testing.assert_close(one.grad.full_tensor(), wanted.grad)


def test_a_mapping_of_models_is_sharded_each_and_a_backward_pass_can_be_kept_to_one() -> None:
    run_on_ranks(train_two_models, 2)


def call_a_method() -> None:
    strategy, model = sharded(methods=["hidden"], shard=())
    inputs = torch.ones(2, 6)
    torch.testing.assert_close(model.hidden(inputs), Net().hidden(inputs))
    model(inputs).sum().backward()
    assert "hidden" not in vars(strategy.copy_model(model))


def test_methods_that_are_named_gather_weights_as_forward_does() -> None:
    run_on_ranks(call_a_method, 2)


def leave_parameters_out() -> None:
    class Branches(nn.ModuleList):
        def forward(self, inputs: Tensor, index: int) -> Tensor:
            return self[index](inputs)

    model = Branches([nn.Linear(3, 1), nn.Linear(3, 1)])
    sharded(model, find_unused_parameters=True)
    model(torch.ones(2, 3), dist.get_rank()).mean().backward()
    for branch in model:
        torch.testing.assert_close(branch.weight.grad.full_tensor(), torch.full((1, 3), 0.5))


def test_ranks_that_use_different_parameters_average_zero_for_the_others() -> None:
    run_on_ranks(leave_parameters_out, 2)


def work_alone() -> None:
    strategy, model = sharded(mesh={"shard": 4}, shard="no such module", tensor_parallel=plan())
    assert strategy.peers is None and not strategy.forward_is_collective and strategy.world_size == 1
    assert type(model) is Net and type(model.head.weight) is nn.Parameter
    optimizer = SGD(model.parameters(), lr=0.1)
    strategy.adopt_optimizer(optimizer)
    with strategy.running(model, True):
        mse_loss(model(torch.ones(2, 6)), torch.ones(2, 3)).backward()
        norm = strategy.clip_gradients(list(model.parameters()), 0.1)
    assert norm > 0.1
    assert copy.deepcopy(model).state_dict().keys() == strategy.copy_model(model).state_dict().keys()


def test_in_a_world_of_one_process_nothing_is_sharded() -> None:
    run_on_ranks(work_alone, 1, group=False)


def copy_the_strategy() -> None:
    strategy, _ = sharded(precision="bf16-mixed")
    for one in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert one.peers is None and one.precision == "bf16-mixed" and not one.forward_is_collective
        plain = Net()
        one.prepare_model(plain)
        assert type(plain) is Net
    assert strategy.peers is not None


def test_a_copy_of_the_strategy_works_on_its_own() -> None:
    run_on_ranks(copy_the_strategy, 2)


def let_a_model_go() -> None:
    strategy, model = sharded()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with strategy.running(model, True):
        train(model, optimizer, make_batches(2), strategy=strategy)
    reference = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert reference() is None


def test_a_strategy_does_not_keep_a_model_alive() -> None:
    run_on_ranks(let_a_model_go, 2)


# ---------------------------------------------------------------- optimizers


def adopt(with_state: bool, options: str) -> States:
    model = Net()
    optimizer = AdamW([{"params": [model.head.weight], "lr": 0.1}, {"params": rest(model)}], lr=0.01)
    inputs, targets = make_batches()[0]
    if with_state:
        train(model, optimizer, [(inputs * (1 + dist.get_rank()), targets)])
    strategy = FSDP("cpu", **OPTIONS[options]())
    strategy.prepare_model(model)
    strategy.adopt_optimizer(optimizer)
    strategy.adopt_optimizer(optimizer)
    assert {id(one) for group in optimizer.param_groups for one in group["params"]} <= set(map(id, model.parameters()))
    batches = make_batches()[strategy.data_rank :: strategy.data_world_size]
    with strategy.running(model, True):
        train(model, optimizer, batches, strategy=strategy)
    assert all(one in optimizer.state or one.grad is None for one in model.parameters())
    return strategy.full_state_dict(model)


def rest(model: Net) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one is not model.head.weight]


@pytest.mark.parametrize(
    ("world_size", "with_state", "options"), [(2, False, "the default"), (2, True, "the default"), (4, True, "tensor")]
)
def test_an_optimizer_made_before_goes_on_with_the_shards_and_its_state(
    world_size: int, with_state: bool, options: str
) -> None:
    state = run_on_ranks(adopt, world_size, with_state, options)[0]
    model = Net()
    optimizer = AdamW([{"params": [model.head.weight], "lr": 0.1}, {"params": rest(model)}], lr=0.01)
    if with_state:
        train(model, optimizer, make_batches()[:1])
    train(model, optimizer, joined(make_batches(), 2))
    assert_same(state, model.state_dict())


def adopt_what_cannot_be() -> list[str]:
    strategy, model = sharded()
    found = []
    loose = nn.Parameter(torch.ones(3))
    other = Net()
    half_done = OPTIMIZERS["adamw"](other.parameters())
    other(torch.ones(2, 6)).sum().backward()
    if dist.get_rank() == 0:
        half_done.step()
    strategy.prepare_model(other)
    odd = Net()
    with_odd_state = OPTIMIZERS["sgd"](odd.parameters())
    with_odd_state.state[odd.head.weight]["rows"] = torch.ones(3)
    strategy.prepare_model(odd)
    for optimizer in (SGD([*model.parameters(), loose], lr=0.1), half_done, with_odd_state):
        before = [id(one) for group in optimizer.param_groups for one in group["params"]]
        with pytest.raises(StrategyError) as caught:
            strategy.adopt_optimizer(optimizer)
        found.append(str(caught.value))
        assert before == [id(one) for group in optimizer.param_groups for one in group["params"]]
    return found


def test_an_optimizer_that_cannot_be_adopted_is_left_as_it_is_with_the_remedy() -> None:
    for unknown, unlike, odd in run_on_ranks(adopt_what_cannot_be, 2):
        assert "SGD holds a parameter of shape (3,)" in unknown and "lambda parameters" in unknown
        assert "AdamW differs between ranks" in unlike
        assert "the state 'rows' of SGD has the shape (3,) where its parameter has (3, 6)" in odd


def overflow(name: str) -> tuple[list[bool], list[float]]:
    strategy, model = sharded(precision="16-mixed", scaler={"init_scale": 8.0})
    optimizer = OPTIMIZERS[name](model.parameters())
    stepper: Any = strategy.make_stepper()
    changed, scales = [], []
    for rank in (0, 1, None):
        stepper.backward(model(torch.ones(2, 6)).sum(), None)
        if dist.get_rank() == rank:
            model.head.weight.grad.to_local()[0, 0] = torch.inf
        before = strategy.full_state_dict(model)
        stepper.unscale(optimizer)
        stepper.step(optimizer)
        stepper.finish()
        optimizer.zero_grad()
        after = strategy.full_state_dict(model)
        changed.append(any(not torch.equal(before[key], after[key]) for key in before))
        scales.append(stepper.scale())
    fresh: Any = strategy.make_stepper()
    fresh.load_state_dict(stepper.state_dict())
    assert fresh.scale() == stepper.scale()
    return changed, scales


@pytest.mark.parametrize("optimizer", ["sgd", "fused"])
def test_an_overflow_in_one_shard_skips_the_update_on_all_ranks(optimizer: str) -> None:
    assert run_on_ranks(overflow, 2, optimizer) == [([False, False, True], [4.0, 2.0, 2.0])] * 2


# ---------------------------------------------------------------- whole weights


def copy_a_model() -> None:
    strategy, model = sharded()
    batches = make_batches()[dist.get_rank() :: 2]
    train(model, OPTIMIZERS["sgd"](model.parameters()), batches, strategy=strategy)
    # what has changed since the model was sharded is in the copy too
    model.skips = {"of": model.blocks[0], "weight": model.head.weight}
    model.blocks[1].eval()
    model.blocks[0].up.requires_grad_(False)
    calls: list[int] = []
    model.head.register_forward_hook(lambda module, args, output: calls.append(1))
    model.register_module("added", nn.Linear(1, 1))
    classes = [type(module) for module in model.modules()]
    with torch.inference_mode():
        copied = strategy.copy_model(model)
    assert [type(module) for module in model.modules()] == classes
    assert type(copied) is Net
    assert [one.training for one in copied.modules()] == [one.training for one in model.modules()]
    assert [one.requires_grad for one in copied.parameters()] == [one.requires_grad for one in model.parameters()]
    assert copied.first.weight is copied.last.weight and copied.head.weight.is_large
    assert copied.skips["of"] is copied.blocks[0] and copied.skips["weight"] is copied.head.weight
    assert all(type(one) is nn.Parameter and one.grad is None for one in copied.parameters())
    assert_same(copied.state_dict(), strategy.full_state_dict(model), 0)
    # it is plain: it can be copied, run by one rank, and trained without a trace in the other
    before = strategy.full_state_dict(model)
    again = copy.deepcopy(copied)
    if dist.get_rank() == 0:
        train(again, SGD([one for one in again.parameters() if one.requires_grad], lr=0.1), make_batches(2))
        assert calls
    assert_same(strategy.full_state_dict(model), before, 0)
    for module in copied.modules():
        for name, hooks in vars(module).items():
            if "_hooks" in name:
                assert not any("torch.distributed" in str(getattr(hook, "__module__", "")) for hook in hooks.values())
        assert not [name for name in vars(module) if "fsdp" in name or "composable" in name or name == "__deepcopy__"]
    # and the sharded one goes on
    train(model, OPTIMIZERS["sgd"](model.parameters()), batches, strategy=strategy)


def test_a_copy_is_plain_and_whole_on_every_rank_and_as_the_model_is_now() -> None:
    run_on_ranks(copy_a_model, 2)


def copy_models() -> None:
    tie = nn.Embedding(4, 6)  # no module of the mapping calls it, so it is a model of its own
    parts = nn.ModuleDict({"a": Net(), "tie": tie})
    model = {"parts": parts, "b": Net()}
    strategy = FSDP("cpu")
    strategy.prepare_model(model)
    copied = strategy.copy_model(model)
    assert type(copied) is dict and type(copied["b"]) is Net and type(copied["parts"]["tie"]) is nn.Embedding
    torch.testing.assert_close(copied["b"].head.weight, model["b"].head.weight.full_tensor())
    both = {"x": model["b"], "y": model["b"]}
    strategy.prepare_model(both)
    copied = strategy.copy_model(both)
    assert copied["x"] is copied["y"]


def test_a_mapping_is_copied_as_one() -> None:
    run_on_ranks(copy_models, 2)


def copy_shared_work() -> None:
    strategy, model = sharded(Net(6), **OPTIONS["tensor"]())
    copied = strategy.copy_model(model)
    assert_same(copied.state_dict(), Net(6).state_dict(), 0)
    torch.testing.assert_close(copied(torch.ones(2, 6)), model(torch.ones(2, 6)))


def test_a_copy_of_a_model_whose_layers_are_shared_works_alone() -> None:
    run_on_ranks(copy_shared_work, 4)


def deepcopy() -> list[str]:
    _, model = sharded()
    found = []
    for module in (model, model.blocks, model.blocks[0], model.head):
        with pytest.raises(StrategyError) as caught:
            copy.deepcopy(module)
        found.append(str(caught.value))
    return found


def test_a_bare_deepcopy_says_what_to_do_instead() -> None:
    for text in run_on_ranks(deepcopy, 2)[0]:
        assert 'engine.fork(step, model="copy")' in text and "copy_model(model)" in text and "full_state_dict" in text


def exchange_states(options: str) -> None:
    strategy, model = sharded(**OPTIONS[options]())
    plain = Net()
    with torch.no_grad():
        for one in (*plain.parameters(), *plain.buffers()):
            one.add_(1)
    inputs = torch.ones(2, 6)
    with torch.no_grad():
        model(inputs)
    strategy.load_full_state_dict(model, plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))
    model.scale.fill_(3 + dist.get_rank())
    state = strategy.full_state_dict(model)
    assert state["first.weight"] is state["last.weight"]
    assert state["scale"] == 3, "rank 0's"
    fresh = Net()
    fresh.load_state_dict(state, strict=True)
    assert_same(fresh.blocks.state_dict(), plain.blocks.state_dict(), 0)
    state["head.bias"].zero_()
    assert model.head.bias.full_tensor().abs().sum() > 0, "the state is a copy"


@pytest.mark.parametrize(("world_size", "options"), [(2, "the default"), (2, "as torch reshards"), (4, "all three")])
def test_a_full_state_loads_into_a_plain_model_and_that_of_a_plain_one_into_shards(
    world_size: int, options: str
) -> None:
    run_on_ranks(exchange_states, world_size, options)


def load_what_does_not_fit() -> list[str]:
    strategy, model = sharded()
    state = strategy.full_state_dict(model)
    found = []
    for changed in (
        {key: value for key, value in state.items() if key != "head.bias"},
        state | {"extra": torch.ones(1)},
        state | {"head.bias": torch.ones(4)},
    ):
        with pytest.raises(RuntimeError) as caught:
            strategy.load_full_state_dict(model, changed)
        found.append(str(caught.value))
    return found


def test_a_state_that_does_not_fit_is_refused_by_key() -> None:
    missing, extra, size = run_on_ranks(load_what_does_not_fit, 2)[0]
    assert 'Missing key(s) in state_dict: "head.bias"' in missing
    assert 'Unexpected key(s) in state_dict: "extra"' in extra
    assert "size mismatch for head.bias" in size


# ---------------------------------------------------------------- runs


def look_in_between(options: str) -> States:
    strategy, model = sharded(**OPTIONS[options]())
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def look(inputs: Tensor) -> None:
        model.eval()
        with torch.no_grad(), strategy.running(model, False):
            model(inputs)
        model.train()

    with strategy.running(model, True):
        for inputs, targets in make_batches()[dist.get_rank() :: 2]:
            look(inputs)
            loss = mse_loss(model(inputs), targets)
            look(inputs)
            loss.backward()
            look(inputs)
            strategy.clip_gradients(list(model.parameters()), 0.1)
            optimizer.step()
            look(inputs)
            optimizer.zero_grad()
    return strategy.full_state_dict(model)


@pytest.mark.parametrize("options", ["the default", "as torch reshards", "no resharding", "one group"])
def test_an_evaluation_anywhere_in_an_iteration_changes_no_weight(options: str) -> None:
    state = run_on_ranks(look_in_between, 2, options)[0]
    assert_same(state, train_alone(2)[0])


def forward_before_update() -> bool:
    strategy, model = sharded(reshard_after_forward=None)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    inputs = torch.ones(2, 6)
    with strategy.running(model, True):
        model(inputs).sum().backward()
        with torch.no_grad():
            before = model(inputs)
        strategy.reduce_gradients(model, list(model.parameters()))
        optimizer.step()
        with torch.no_grad():
            return torch.equal(before, model(inputs))


def test_an_update_is_seen_by_the_next_forward_though_weights_were_kept() -> None:
    assert run_on_ranks(forward_before_update, 2) == [False, False]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(6, 6)
        self.fails = True

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        if self.fails:
            raise KeyError("in mid-forward")
        return self.inner(outputs)


def fail_and_go_on() -> None:
    model = nn.Sequential(Fails(), nn.Tanh(), Fails())
    strategy, model = sharded(model)
    inputs = torch.ones(2, 6)
    model[0].fails = False
    with pytest.raises(KeyError), strategy.running(model, True):
        model(inputs)
    model[2].fails = False
    with strategy.running(model, True):
        model(inputs).sum().backward()
        # an inner run that fails between the two leaves the outer backward right
        loss = model(inputs).sum()
        model[2].fails = True
        with pytest.raises(KeyError), torch.no_grad(), strategy.running(model, False):
            model(inputs)
        model[2].fails = False
        loss.backward()
    plain = strategy.copy_model(model)
    (2 * plain(inputs).sum()).backward()
    for one, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), wanted.grad)
    fresh, untouched = sharded()
    with pytest.raises(KeyError), fresh.running(untouched, False):
        raise KeyError("before any forward")


def test_after_an_error_in_a_forward_the_next_run_is_right() -> None:
    run_on_ranks(fail_and_go_on, 2)


def watch_batch_norm() -> list[list[float]]:
    strategy, model = sharded(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    rank = dist.get_rank()
    seen = []
    model[0].eval()
    with strategy.running(model, True):
        model[0].running_mean.fill_(rank)
        loss = model(torch.ones(2, 1)).sum()  # its backward needs the statistics that it was made with
        with torch.no_grad(), strategy.running(model, False):
            seen.append(float(model[0].running_mean))
        seen.append(float(model[0].running_mean))
        loss.backward()
    seen.append(float(strategy.full_state_dict(model)["0.running_mean"]))
    seen.append(float(model[0].running_mean))
    with strategy.running(model, True):
        seen.append(float(model[0].running_mean))
    return [seen]


def give_buffers() -> None:
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    buffers = {
        "few bits": torch.full((2,), rank, dtype=torch.int16),
        "complex": torch.full((2,), rank, dtype=torch.complex64),
        "flag": torch.tensor(bool(rank)),
        "expanded": torch.tensor([float(rank)]).expand(3),
        "transposed": torch.full((2, 3), rank).t(),
        "nothing": torch.ones(0),
    }
    for name, one in buffers.items():
        model.register_buffer(name, one)
    strategy, _ = sharded(model)
    assert all(getattr(model, name) is one and not one.any() for name, one in buffers.items())
    model.expanded.data[:1] = rank
    with strategy.running(model, False):
        assert not model.expanded.any()
    assert bool(model.expanded.all()) == bool(rank)


def test_buffers_of_every_kind_come_from_rank_0() -> None:
    run_on_ranks(give_buffers, 2)


def test_statistics_are_each_ranks_own_in_training_and_rank_0s_in_evaluation_and_state() -> None:
    assert run_on_ranks(watch_batch_norm, 2) == [[[0, 0, 0, 0, 0]], [[0, 1, 0, 1, 0]]]


# ---------------------------------------------------------------- what is refused


@contextmanager
def refused(found: dict[str, str], what: str) -> Iterator[None]:
    with pytest.raises(StrategyError) as caught:
        yield
    found[what] = str(caught.value)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sizes": (lambda: FSDP("cpu", mesh={"shard": 3}), r"mesh=.* is for 3 ranks \(shard 3\), and there are 2"),
    "left out": (lambda: FSDP("cpu", mesh={"replicate": 3}), r"is for 3 ranks \(replicate 3 x shard 1\), and there"),
    "a size": (lambda: FSDP("cpu", mesh={"shard": 0}), r"mesh\['shard'\]=0: a number of ranks"),
    "a dimension": (lambda: FSDP("cpu", mesh={"dp": 2}), "no dimension 'dp': its names are 'replicate', 'shard', 'te"),
    "no mesh": (lambda: FSDP("cpu", mesh=2), "mesh=2: sizes by name"),  # type: ignore[arg-type]
    "unnamed mesh": (lambda: FSDP("cpu", mesh=a_mesh(None)), r"has the dimensions \(\): they must be among"),
    "ranks without styles": (lambda: FSDP("cpu", mesh={"tensor": 2}), "need both, mesh="),
    "styles without ranks": (lambda: FSDP("cpu", tensor_parallel=plan()), "need both, mesh="),
    "no style": (lambda: FSDP("cpu", mesh={"tensor": 2}, tensor_parallel={"a": 1}), r"tensor_parallel\['a'\]=1: a st"),  # type: ignore[dict-item]
    "resharding": (lambda: FSDP("cpu", reshard_after_forward=3), "reshard_after_forward=3: True, False"),
    "no policy": (lambda: FSDP("cpu", mixed_precision="bf16"), "mixed_precision='bf16': a torch.*Policy was"),  # type: ignore[arg-type]
    "uneven": (lambda: FSDP("cpu", uneven="drop"), "uneven must be"),  # type: ignore[arg-type]
    "no choice": (lambda: sharded(shard=3), "shard=3: a class of modules"),
    "a name": (lambda: sharded(shard="layers.*"), r"'layers\.\*', which is the name of no module: .*'blocks\.0\.up'"),
    "a class": (lambda: sharded(shard=nn.Conv2d), r"shard=\(.*Conv2d.*chooses no module of the model: .*'first'"),
    "a function": (lambda: sharded(shard=lambda name, module: False), "chooses no module of the model"),
    "a container": (lambda: sharded(shard="blocks"), "shard chooses a ModuleList, which has no forward"),
    "a tie": (lambda: sharded(shard=["first", "last"]), "'first.weight' and 'last.weight' are one parameter in two"),
    "a plan": (
        lambda: sharded(mesh={"tensor": 2}, tensor_parallel={"layers.up": plan()["blocks.*.up"]}),
        r"the plan has 'layers\.up', which is the name of no module",
    ),
    "a method": (lambda: sharded(methods="generate"), "'generate', which is no method"),
    "a number": (lambda: sharded(Scalar(torch.tensor(1.0))), r"'number' is a number of shape \(\).*shape \(1,\)"),
    "channels last": (lambda: sharded(channels_last()), "'weight' is not contiguous.*contiguous_format"),
    "types": (lambda: sharded(mixed_types()), r"different types: '0\.weight' of torch\.float32, '1\.weight' of"),
    "meta": (lambda: sharded(nn.Linear(2, 2, device="meta")), "is on the meta device"),
    "lazy": (lambda: sharded(nn.LazyLinear(2)), "has no shape yet"),
    "no forward": (lambda: sharded(container()), "'loose' is a parameter of a ModuleDict, which has no forward"),
    "sharing": (lambda: FSDP("cpu").prepare_model(sharing()), r"'a\.0\.weight' and 'b\.0\.weight' are one parameter"),
    "a part": (lambda: FSDP("cpu").prepare_model(whole_and_part()), "the module 'b' is also a part of 'a'"),
    "again": (lambda: FSDP("cpu").prepare_model(sharded()[1]), "the model, a FSDPNet, holds parts that are sharded"),
    "larger": (lambda: prepare_larger(), "the model, a Sequential, holds parts that are sharded already"),
    "a layer": (lambda: prepare_layer(), "the module 'head', a Linear, is a part of a sharded model and no group"),
    "unlike": (lambda: sharded(nn.Linear(2, 2 + dist.get_rank())), "the model differs between ranks"),
}


def a_mesh(names: tuple[str, ...] | None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,), mesh_dim_names=names)


class Scalar(nn.Module):
    def __init__(self, number: Tensor) -> None:
        super().__init__()
        self.number = nn.Parameter(number)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.number


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def mixed_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))


def container() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    model.register_parameter("loose", nn.Parameter(torch.ones(2)))
    return model


def sharing() -> dict[str, nn.Module]:
    layer = nn.Linear(2, 2)
    return {"a": nn.Sequential(layer), "b": nn.Sequential(layer)}


def whole_and_part() -> dict[str, nn.Module]:
    net = Net()
    return {"a": net, "b": net.head}


def prepare_larger() -> None:
    strategy, model = sharded()
    strategy.prepare_model(nn.Sequential(model, nn.Linear(3, 3)))


def prepare_layer() -> None:
    strategy, model = sharded()
    strategy.prepare_model({"head": model.head})


def refuse_all() -> dict[str, str]:
    found: dict[str, str] = {}
    for what, (make, _) in REFUSED.items():
        with refused(found, what):
            make()
    return found


def test_what_cannot_be_sharded_is_refused_with_the_remedy() -> None:
    for found in run_on_ranks(refuse_all, 2):
        for what, (_, pattern) in REFUSED.items():
            assert re.search(pattern, found[what]), f"{what}: {found[what]}"


# ---------------------------------------------------------------- what torch does, and must go on doing


def look_at_torch() -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = Net()
    old = model.head.weight
    fully_shard(model, reshard_after_forward=True, mesh=a_mesh(("shard",)))
    model(torch.ones(2, 6)).sum().backward()
    assert isinstance(model, FSDPModule) and isinstance(model, Net)
    assert model.head.weight is not old and old.shape == (3, 6), "parameters are replaced, the old are left whole"
    hooks = {
        (name, hook)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
        for hook in hooks.values()
    }
    origins = {getattr(hook, "__module__", "").rpartition(".")[0] for _, hook in hooks if callable(hook)}
    assert origins == {"torch.distributed.fsdp._fully_shard"}, "by its origin a copy knows a hook that is torch's"
    assert callable(model.reshard) and callable(model.reset_iter_state)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model)
    # a backward pass that is kept to the shards makes no gradient at all, and says nothing
    model.zero_grad()
    model(torch.ones(2, 6)).sum().backward(inputs=[model.head.weight, model.head.bias])
    assert all(one.grad is None for one in model.parameters())


def look_at_old_weights() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 1)
    fully_shard(model, mesh=a_mesh(("shard",)))
    optimizer = SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 2)).sum().backward()
    with torch.no_grad():
        before = model(torch.ones(2, 2))
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(before, model(torch.ones(2, 2))), "torch keeps what was gathered: no need to let go of it?"


def test_torchs_fully_shard_is_as_it_was_when_this_was_written() -> None:
    run_on_ranks(look_at_torch, 2)
    run_on_ranks(look_at_old_weights, 2)


# ---------------------------------------------------------------- with an engine


def make_loader(samples: int = 48) -> DataLoader[tuple[Tensor, ...]]:
    batches = make_batches()
    data = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return DataLoader(Subset(data, range(samples)), batch_size=4 if samples == len(data) else 1)


def step(engine: Engine, batch: Any) -> Tensor:
    inputs, targets = batch
    with engine.autocast():
        loss = mse_loss(engine.model(inputs), targets)
    engine.backward(loss)
    engine.update()
    return loss


def look(engine: Engine, batch: Any) -> Any:
    inputs, targets = batch
    return engine.model(inputs), targets


def run_engine(steps: int, options: str = "the default", clip: str = "max_norm") -> States:
    model = Net()
    engine = Engine(
        step,
        model,
        optimizer=OPTIMIZERS["sgd"](model.parameters()),
        strategy=FSDP("cpu", **OPTIONS[options]()),
        gradient_accumulation_steps=steps,
    )
    GradientClip(**{clip: 0.1}).attach(engine)
    engine.run(make_loader(), max_epochs=1)
    assert engine.model is model
    assert engine.state.updates == 12 // engine.strategy.data_world_size // steps
    return engine.strategy.full_state_dict(model)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_engine_trains_the_shards_of_a_model_whose_optimizer_was_made_before(steps: int) -> None:
    assert_same(run_on_ranks(run_engine, 2, steps)[0], train_alone(2, steps=steps)[0])


def test_an_engine_trains_ranks_that_share_the_work_of_a_layer() -> None:
    for found in run_on_ranks(run_engine, 2, 1, "tensor only"):
        assert_same(found, train_alone(1)[0])


def clip_by_value(parameters: Any, limit: float) -> Tensor:
    nn.utils.clip_grad_value_(parameters, limit)
    return torch.zeros(())


def test_gradients_of_shards_are_clipped_by_value() -> None:
    model = Net()
    train(model, OPTIMIZERS["sgd"](model.parameters()), joined(make_batches(), 2), steps=1, clip=clip_by_value)
    assert_same(run_on_ranks(run_engine, 2, 1, "the default", "max_value")[0], model.state_dict())


def average() -> tuple[States, dict[str, Any]]:
    """Train with averaged weights; go on from what was saved in new objects."""
    model = Net()
    engine = Engine(step, model, optimizer=OPTIMIZERS["sgd"], strategy=FSDP("cpu"))
    ema = EMA(decay=0.9).attach(engine)
    engine.run(make_loader(), max_epochs=1)
    weights = ema.weights()
    with ema.applied():
        assert_same(engine.strategy.full_state_dict(model), weights, 0)
    again = EMA(decay=0.9).attach(Engine(step, Net(), optimizer=OPTIMIZERS["sgd"], strategy=engine.strategy))
    again.load_state_dict(ema.state_dict())
    assert_same(again.weights(), weights, 0)
    return weights, dict(ema.state_dict()["updates"])


def test_averaged_weights_of_shards_are_whole_on_every_rank() -> None:
    (first, updates), (second, _) = run_on_ranks(average, 2)
    assert_same(first, second, 0)
    assert updates == {"optimizer": 6}
    assert_same(first, average_alone())


def average_alone() -> States:
    model = Net()
    batches = joined(make_batches(), 2)
    engine = Engine(step, model, optimizer=OPTIMIZERS["sgd"], strategy="single")
    ema = EMA(decay=0.9).attach(engine)
    engine.run(batches, max_epochs=1)
    return ema.weights()


def train_inside() -> None:
    model = Net()
    engine = Engine(step, model, optimizer=OPTIMIZERS["sgd"], strategy=FSDP("cpu"))
    engine.run(make_loader(), max_epochs=1)
    before = engine.strategy.full_state_dict(model)
    inner = engine.fork(step, mode="train", model="copy", optimizer=OPTIMIZERS["sgd"])
    inner.run(make_loader(), max_epochs=1)
    assert_same(engine.strategy.full_state_dict(model), before, 0)
    assert not torch.equal(engine.strategy.full_state_dict(inner.model)["head.bias"], before["head.bias"])


def test_an_inner_training_of_a_copy_leaves_the_outer_weights_alone() -> None:
    run_on_ranks(train_inside, 2)


def fail_in_a_step() -> States:
    fails = [3]

    def failing_step(engine: Engine, batch: Any) -> Tensor:
        if engine.state.iteration in fails:
            fails.clear()
            engine.model(batch[0])
            raise KeyError("between forward and backward")
        return step(engine, batch)

    model = Net()
    engine = Engine(failing_step, model, optimizer=OPTIMIZERS["sgd"], strategy=FSDP("cpu"))
    GradientClip(max_norm=0.1).attach(engine)
    with pytest.raises(KeyError):
        engine.run(make_loader(), max_epochs=1)
    engine.run(make_loader(), max_epochs=1)
    return engine.strategy.full_state_dict(model)


def test_a_run_goes_on_after_an_error_in_the_step() -> None:
    assert_same(run_on_ranks(fail_in_a_step, 2)[0], train_alone(2)[0])


def evaluate(samples: int) -> tuple[float, float]:
    model = Net()
    trainer = Engine(step, model, optimizer=OPTIMIZERS["sgd"], strategy=FSDP("cpu"))
    evaluator = Engine(look, model, mode="eval", metrics={"loss": Loss(mse_loss)})
    assert evaluator.strategy is trainer.strategy
    Validate(evaluator, make_loader(samples), every=Events.ITERATION_COMPLETED).attach(trainer)
    trainer.run(make_loader(), max_epochs=1)
    plain = trainer.strategy.copy_model(model)
    with torch.no_grad():
        losses = [mse_loss(plain(inputs), targets) for inputs, targets in make_loader(samples)]
    return evaluator.state.metrics["loss"], float(torch.stack(losses).mean())


@pytest.mark.parametrize(("world_size", "samples"), [(2, 1), (2, 7), (3, 2)])
def test_an_evaluation_is_that_of_one_process_with_any_number_of_samples(world_size: int, samples: int) -> None:
    for found, wanted in run_on_ranks(evaluate, world_size, samples):
        assert found == pytest.approx(wanted, rel=1e-5)
