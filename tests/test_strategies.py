"""The device-strategy layer: where a model runs, what an inner run must find fresh, and which models are refused."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pellucid.engine.errors import ModelError, StrategyError
from pellucid.engine.strategies import DDP, FSDP, SingleDevice, Strategy, resolve
from pellucid.engine.strategies.ambient import AmbientState, fresh_modes
from pellucid.engine.strategies.wrapping import check_model

CPU = torch.device("cpu")
GPU = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
needs_gpu = pytest.mark.skipif(GPU is None, reason="needs an accelerator")


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.autocast_increment_nesting() * 0 + torch.autocast_decrement_nesting(),
    )


# ---------------------------------------------------------------- where a model runs


def test_the_default_device_is_the_accelerator_or_the_cpu() -> None:
    assert SingleDevice().device.type == (GPU or CPU).type
    assert SingleDevice("cpu").device == SingleDevice(torch.device("cpu:0")).device == CPU


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:1", "meta", "", -7, 99, 1.5, True])
def test_a_device_that_does_not_exist_is_refused_and_those_that_do_are_named(device: Any) -> None:
    with pytest.raises(StrategyError, match=f"device={device!r} .*here are 'cpu'"):
        SingleDevice(device)


def test_preparing_keeps_every_module_and_parameter_the_object_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = [*model.modules(), *model.parameters()]
    SingleDevice().prepare_model({"net": model})
    assert all(old is new for old, new in zip(before, [*model.modules(), *model.parameters()], strict=True))


def test_a_model_without_values_is_refused_with_the_parameter_named() -> None:
    model = {"g": nn.Linear(2, 2), "d": nn.Linear(2, 2, device="meta")}
    with pytest.raises(StrategyError, match=r"'d\.weight' is on the meta device.*to_empty"):
        SingleDevice("cpu").prepare_model(model)
    norm = nn.BatchNorm1d(2)
    norm.running_mean = torch.zeros(2, device="meta")
    with pytest.raises(StrategyError, match="'running_mean' is on the meta device"):
        SingleDevice().prepare_model(norm)


def test_a_lazy_model_can_be_prepared_before_its_first_batch() -> None:
    model = nn.LazyLinear(2)
    strategy = SingleDevice("cpu")
    strategy.prepare_model(model)
    assert model(strategy.prepare_batch(torch.zeros(3, 4))).shape == (3, 2)


def test_a_model_that_sits_there_already_is_not_asked_to_move() -> None:
    class Quantized(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("a quantized model cannot be moved")

    SingleDevice("cpu").prepare_model(Quantized(2, 2))


@needs_gpu
def test_a_model_stays_on_the_device_it_was_put_on_unless_the_caller_chose_another() -> None:
    assert GPU is not None
    model = nn.Linear(2, 2).to(GPU)
    strategy = SingleDevice()
    strategy.prepare_model(model)
    assert strategy.device == model.weight.device and strategy.device.index is not None
    SingleDevice("cpu").prepare_model(model)
    assert model.weight.device == CPU


@needs_gpu
def test_a_model_spread_over_devices_is_left_so_and_batches_go_to_its_first_parameter() -> None:
    model = nn.Sequential(nn.Linear(2, 2).to(GPU), nn.Linear(2, 2))
    strategy = SingleDevice()
    for _ in range(2):
        strategy.prepare_model(model)
        assert [p.device.type for p in model.parameters()] == [strategy.device.type] * 2 + ["cpu"] * 2
    assert strategy.prepare_batch(torch.zeros(2)).device == strategy.device


def test_a_single_process_is_rank_nought_of_one_at_full_precision() -> None:
    strategy = SingleDevice("cpu")
    assert (strategy.name, strategy.precision) == ("single", "32-true")
    assert (strategy.rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
    before = modes()
    with strategy.autocast():
        assert modes() == before


def test_a_step_through_the_strategy_is_the_plain_one_to_the_bit() -> None:
    model = nn.Linear(3, 1)
    plain = copy.deepcopy(model)
    stepper = SingleDevice("cpu").make_stepper()
    x = torch.randn(4, 3)
    for net, backward, step in (
        (model, lambda loss: stepper.backward(loss, None), stepper.step),
        (plain, Tensor.backward, torch.optim.SGD.step),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        backward(net(x).square().mean())
        step(optimizer)
    assert torch.equal(model.weight, plain.weight) and torch.equal(model.bias, plain.bias)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_strategy_can_be_copied_and_pickled(again: Callable[[Strategy], Strategy]) -> None:
    strategy = SingleDevice("cpu")
    strategy.prepare_model(nn.Linear(1, 1))
    assert again(strategy).device == CPU
    assert repr(again(strategy)) == "SingleDevice('cpu', precision='32-true')"


# ---------------------------------------------------------------- copies of a model


def test_a_copied_model_shares_nothing_and_has_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    model(torch.randn(4, 2)).sum().backward()
    copied = SingleDevice("cpu").copy_model(model)
    assert {t.data_ptr() for t in copied.state_dict().values()}.isdisjoint(
        t.data_ptr() for t in model.state_dict().values()
    )
    assert all(parameter.grad is None and parameter.requires_grad for parameter in copied.parameters())
    assert [module.training for module in copied.modules()] == [True, True, False]


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_modules_that_are_shared_stay_shared_in_the_copy_of_a_mapping(kind: Callable[..., Mapping[str, Any]]) -> None:
    body = nn.Linear(2, 2)
    models = kind({"a": nn.Sequential(body), "b": nn.Sequential(body, nn.Linear(2, 1))})
    copied = SingleDevice("cpu").copy_model(models)
    assert type(copied) is type(models)
    assert copied["a"][0] is copied["b"][0]
    assert copied["a"][0] is not body


def test_a_model_that_has_kept_an_activation_can_be_copied() -> None:
    model = nn.Linear(2, 2)
    model.kept = [{"last": model(torch.zeros(1, 2))}]  # type: ignore[assignment]
    copied: Any = SingleDevice("cpu").copy_model(model)
    assert not copied.kept[0]["last"].requires_grad
    assert torch.equal(copied.kept[0]["last"], model.kept[0]["last"])  # type: ignore[index]


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_a_copy_made_in_an_evaluation_can_be_trained(region: Callable[[], Any]) -> None:
    with region():
        copied = SingleDevice("cpu").copy_model(nn.Linear(2, 2))
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.weight.grad is not None and not copied.weight.is_inference()


# ---------------------------------------------------------------- from a name to a strategy


@pytest.mark.parametrize("strategy", ["DDP", "deepspeed", "Single", "", None, 3, SingleDevice])
def test_a_strategy_that_does_not_exist_is_refused_and_those_that_do_are_named(strategy: Any) -> None:
    with pytest.raises(StrategyError, match=r"'auto', 'single'|an instance, SingleDevice\(\)"):
        resolve(strategy, nn.Linear(1, 1))


def test_an_instance_is_taken_as_it_is_and_a_name_makes_one() -> None:
    strategy = SingleDevice("cpu")
    assert resolve(strategy, None) is strategy
    assert isinstance(resolve("auto", None), SingleDevice)
    assert [resolve(name, None).name for name in ("single", "ddp", "fsdp", "dp")] == ["single", "ddp", "fsdp", "dp"]
    assert isinstance(resolve("single", {"a": nn.Linear(1, 1)}), SingleDevice)


def test_a_model_keeps_its_strategy_and_so_do_its_parts() -> None:
    model = {"g": nn.Sequential(nn.Linear(1, 1)), "d": nn.Linear(1, 1)}
    strategy = resolve(SingleDevice("cpu"), model)
    assert resolve("auto", model) is strategy
    assert resolve("single", model["d"]) is strategy
    assert resolve("auto", model["g"][0]) is strategy  # type: ignore[index]
    assert resolve("auto", nn.Linear(1, 1)) is not strategy


def test_neither_a_strategy_nor_a_model_is_kept_alive_and_nothing_is_written_on_the_model() -> None:
    model = nn.Linear(1, 1)
    written = set(vars(model))
    strategy = weakref.ref(resolve(SingleDevice("cpu"), model))
    assert strategy() is None
    assert set(vars(model)) == written
    kept, strategy_of_both = weakref.ref(model), resolve(SingleDevice("cpu"), model)
    del model
    assert kept() is None and strategy_of_both.device == CPU


# ---------------------------------------------------------------- models that are refused


class OwnWrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture(scope="module")
def one_process_group() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped_in(name: str) -> nn.Module:
    model = nn.Linear(2, 2)
    if name == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(model)
    if name == "DataParallel":
        return nn.DataParallel(model)
    if name == "OptimizedModule":
        return torch.compile(model)
    from torch.distributed import fsdp

    if name == "FSDPModule":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fsdp.fully_shard(model, mesh=mesh)
        return model
    return fsdp.FullyShardedDataParallel(model, device_id=CPU)


WRAPPERS = ["DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule"]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.filterwarnings("ignore")  # what torch itself warns of when it wraps
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_refused_with_the_remedy_wherever_it_stands(name: str) -> None:
    wrapped = wrapped_in(name)
    with pytest.raises(ModelError, match=rf"^model is wrapped already \({name}\): pass the module"):
        check_model(wrapped)
    with pytest.raises(ModelError, match=rf"^model\['d'\] is wrapped already \({name}\)"):
        check_model({"g": nn.Linear(1, 1), "d": wrapped})
    check_model(nn.Sequential(wrapped))


def test_plain_modules_mappings_of_them_and_no_model_are_taken() -> None:
    compiled_in_place = nn.Linear(1, 1)
    compiled_in_place.compile()
    for model in (None, nn.Linear(1, 1), {"a": nn.Linear(1, 1)}, nn.ModuleDict(), OwnWrapper(nn.Linear(1, 1))):
        check_model(model)
    check_model(compiled_in_place)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear, r"model is the class Linear: pass an instance, Linear\(\.\.\.\)"),
        (lambda x: x, r"model is a function: pass a torch\.nn\.Module"),
        ([nn.Linear(1, 1)], "model is a list: pass .* or a dict"),
        ({}, "empty mapping"),
        ({0: nn.Linear(1, 1)}, "has the key 0"),
        ({"a": None}, r"model\['a'\] is a NoneType"),
        ({"a": nn.Linear}, r"model\['a'\] is the class Linear"),
    ],
)
def test_what_is_no_model_is_refused_with_its_place_and_the_remedy(model: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        check_model(model)


def test_importing_the_layer_and_checking_a_model_load_neither_fsdp_nor_dynamo() -> None:
    code = (
        "import sys, torch, ignite.engine; before = set(sys.modules)\n"
        "from pellucid.engine.strategies import SingleDevice, wrapping\n"
        "model = torch.nn.Linear(1, 1); wrapping.check_model(model); SingleDevice().prepare_model(model)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'pellucid', *sys.stdlib_module_names}, new\n"
        "heavy = ('torch._dynamo', 'torch.distributed')\n"
        "assert not {name for name in set(sys.modules) - before if name.startswith(heavy)}"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


# ---------------------------------------------------------------- the modes of an inner run


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "region",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    ],
)
def test_an_inner_run_finds_fresh_modes_in_any_region_and_leaves_them_as_they_were(
    region: Callable[[], Any], train: bool
) -> None:
    with region():
        before = modes()
        with fresh_modes(train):
            inside = modes()
            inference = before[1] and not train  # an evaluation may stay in it
            assert inside[:4] == (train, inference, False, torch.bfloat16)
        assert modes() == before


def leave_everything_changed() -> None:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    torch.autocast("cpu", dtype=torch.float16, cache_enabled=True).__enter__()
    torch.set_autocast_cache_enabled(not torch.is_autocast_cache_enabled())


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("region", [torch.enable_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_modes_that_user_code_leaves_changed_are_put_back(
    region: Callable[[], Any], error: type[BaseException] | None
) -> None:
    def inner() -> None:
        with fresh_modes(train=True):
            leave_everything_changed()
            if error is not None:
                raise error

    with region():
        before = modes()
        if error is None:
            inner()
        else:
            with pytest.raises(error):
                inner()
        assert modes() == before


def test_a_region_left_open_by_an_inner_run_leaves_no_old_weights_in_the_cache() -> None:
    linear = nn.Linear(2, 2)
    with fresh_modes(train=True):
        torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
        linear(torch.ones(1, 2))
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not linear(torch.ones(1, 2)).any()


def test_captured_modes_can_be_restored_at_any_time() -> None:
    before = modes()
    captured = AmbientState.capture()
    leave_everything_changed()
    captured.restore()
    assert modes() == before


def test_a_training_run_within_inference_mode_learns() -> None:
    linear = nn.Linear(2, 2)
    with torch.inference_mode(), fresh_modes(train=True):
        linear(torch.ones(1, 2)).sum().backward()
    assert linear.weight.grad is not None and not linear.weight.grad.is_inference()


def evaluate(linear: nn.Linear, x: Tensor) -> None:
    with fresh_modes(train=False):
        linear(x)


def evaluate_in_autocast(linear: nn.Linear, x: Tensor) -> None:
    with fresh_modes(train=False), torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)


def train_in_autocast(linear: nn.Linear, x: Tensor) -> None:
    copied = copy.deepcopy(linear)
    with fresh_modes(train=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (copied(x) + linear(x)).sum()
        torch.autograd.grad(loss, list(copied.parameters()))


def evaluate_and_fail(linear: nn.Linear, x: Tensor) -> None:
    with pytest.raises(ValueError), fresh_modes(train=False), torch.autocast("cpu", dtype=torch.bfloat16):
        linear(x)
        raise ValueError


def look_not(linear: nn.Linear, x: Tensor) -> None:
    pass


def gradients(look: Callable[[nn.Linear, Tensor], None], at: str) -> list[Tensor]:
    """Use one weight twice in one bf16 region, and look at it before, between and after."""
    torch.manual_seed(0)
    linear, x = nn.Linear(64, 64), torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if "before" in at:
            look(linear, x)
        y = linear(x).relu()
        if "between" in at:
            look(linear, x)
        loss = linear(y).float().square().mean()
        if "after" in at:
            look(linear, x)
    loss.backward()
    return [parameter.grad for parameter in linear.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("at", ["before", "between", "after", "before between after"])
@pytest.mark.parametrize("look", [evaluate, evaluate_in_autocast, train_in_autocast, evaluate_and_fail])
def test_an_inner_run_inside_an_autocast_region_leaves_the_gradients_bit_identical(
    look: Callable[[nn.Linear, Tensor], None], at: str
) -> None:
    alone, watched = gradients(look_not, at), gradients(look, at)
    assert len(alone) == len(watched) == 2
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_an_inner_run_sees_the_weights_as_they_are_and_the_outer_region_its_own() -> None:
    def evaluate_swapped(linear: nn.Linear, x: Tensor) -> None:
        kept = copy.deepcopy(linear.state_dict())
        with fresh_modes(train=False), torch.autocast("cpu", dtype=torch.bfloat16):
            for parameter in linear.parameters():
                parameter.zero_()
            assert not linear(x).any(), "a cast of the outer weights was used"
            linear.load_state_dict(kept)

    for at in ("before", "between", "after"):
        alone, watched = gradients(look_not, at), gradients(evaluate_swapped, at)
        assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))


def test_modes_of_other_threads_are_not_touched() -> None:
    seen: list[bool] = []
    with torch.no_grad(), fresh_modes(train=False):
        thread = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_modes_are_captured_without_setting_an_accelerator_up() -> None:
    code = (
        "import torch\n"
        "from pellucid.engine.strategies.ambient import fresh_modes\n"
        "with fresh_modes(True): pass\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_the_current_device_is_put_back() -> None:
    before = torch.zeros(1, device=GPU).device
    with fresh_modes(train=False):
        torch.get_device_module(GPU).set_device(before.index + 1)
    assert torch.zeros(1, device=GPU).device == before


# ---------------------------------------------------------------- options that make no sense


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *(
            (lambda name=name, value=value: DDP(**{name: value}), f"{name}={value!r}: True or False was wanted")
            for name, value in [
                ("sync_every_batch", "no"),
                ("static_graph", 2),
                ("broadcast_buffers", None),
                ("find_unused_parameters", "no"),
                ("gradient_as_bucket_view", 0),
            ]
        ),
        *(
            (lambda value=value: DDP(bucket_cap_mb=value), f"bucket_cap_mb={value!r}: a number of megabytes above 0")
            for value in (-1, 0, "25", True)
        ),
        *(
            (lambda value=value, kind=kind: kind(timeout_sec=value), f"timeout_sec={value!r}: a number of seconds")
            for value in ("x", 0, -3, float("inf"), float("nan"))
            for kind in (DDP, FSDP)
        ),
        (lambda: DDP(comm_hook=lambda bucket: bucket), "comm_hook is called as hook(state, bucket), but <function"),
        (lambda: DDP(comm_hook=3), "comm_hook must be a hook, or a pair"),
        (lambda: DDP(backend=3), "backend=3 is no name of a backend"),
        *(
            (lambda kind=kind: kind(precision="16-mixed", scaler=3), "scaler= are options of GradScaler")
            for kind in (DDP, FSDP, SingleDevice)
        ),
        *(
            (lambda mesh=mesh: FSDP(mesh=mesh), f"mesh={mesh!r}: sizes by name were wanted")
            for mesh in (3, {}, [2, 2])
        ),
        (lambda: FSDP(mesh={"shard": 0}), "mesh['shard']=0: a number of ranks was wanted"),
        (lambda: FSDP(mesh={"shards": 2}), "mesh has no dimension 'shards'"),
        (lambda: FSDP(cpu_offload="yes"), "cpu_offload='yes': True or False was wanted"),
        (lambda: FSDP(find_unused_parameters=1), "find_unused_parameters=1: True or False was wanted"),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused_on_one_process_too(make: Any, says: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(says)):
        make()
