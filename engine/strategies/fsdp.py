"""Sharding in place: torch's ``fully_shard`` leaves each rank a part of every weight, gradient and optimizer state.

The user's object stays the model. Its parameters become shards (``DTensor``), which are gathered for the forward and
the backward of the group that they are in, and let go of afterwards. So a forward is a collective, in evaluation too.

Gradients are brought together with each backward pass, also within an accumulation window: to put it off, a rank would
have to keep whole gradients, which is the memory that sharding is there to save (meta-pytorch/tnt #1057).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import StrategyError
from ..nested import map_nested
from .base import Model, ModelT, Uneven, modules_of
from .broadcasting import broadcast, memory_of
from .distributed import Distributed
from .fsdp_adopting import Replaced, adopt
from .fsdp_groups import Choice, Groups, called_modules, find_groups, matching
from .fsdp_options import check_plan, shard_options
from .fsdp_plain import Origins, copied, refuse_deepcopy
from .fsdp_steppers import ShardedLossScaler, ShardedStepper
from .fsdp_tensors import clip_gradients, part_like, whole
from .mesh import Mesh, check_sizes, data_place, make_mesh, sharding_part
from .options import check_switches
from .precision import Stepper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["FSDP"]


class FSDP(Distributed):
    """A part of the model on every rank, a part of each batch on each, gradients averaged in the backward pass.

    Making one is a collective: it makes the process group if there is none. In a program that is one process alone it
    does what ``SingleDevice`` does.

    Buffers are not sharded, and each rank changes its own in training: a BatchNorm's statistics are those of the rank's
    batches. Rank 0's are the model's: all ranks have them at the start of a training run, during an evaluation, and in
    ``full_state_dict``.

    A parameter that takes no part in the loss must do so on all ranks; else give ``find_unused_parameters=True``.

    Args:
        device: as for ``DDP``.
        shard: which modules are groups of their own, gathered and let go of together: a class or several, a function
            ``(name, module) -> bool``, or names as in ``model.named_modules()``, where ``*`` stands for one part of a
            name (``"layers.*"``). What is in no group forms one with the whole model. None: the blocks that the
            model's lists and sequences are made of; ``()``: the whole model is one group.
        precision: as for ``SingleDevice``; weights are kept and gathered in the model's type.
        mixed_precision: in which types weights are gathered and gradients are sent; see ``MixedPrecisionPolicy``.
        cpu_offload: keep shards, gradients and optimizer state in the memory of the host.
        mesh: sizes by name, such as ``{"replicate": 2, "shard": 4}``: shard among 4 ranks, and keep copies on 2 such
            sets. ``"tensor"`` is the number of ranks that share the work of layers, on the same data. Or a
            ``DeviceMesh`` with dimensions of these names. None: all ranks shard.
        reshard_after_forward: let the gathered weights go between forward and backward. False keeps them, a number
            shards them among so many ranks. None is torch's default, to keep those in no inner group: then a forward
            without a backward must not come between the backward and the update, unless in an inner run.
        tensor_parallel: which modules share their work, by name as in ``shard``, and how: styles of
            ``torch.distributed.tensor.parallel``, such as ``ColwiseParallel()``.
        find_unused_parameters: for models that leave parameters out in some batches on some ranks. Such a parameter has
            a gradient of zero then, also where all ranks leave it out.
        methods: names of the model's methods that compute with its weights and are called beside its forward.
        compile: as for ``SingleDevice``.
        scaler: as for ``SingleDevice``.
        uneven: as for ``DDP``.
        backend: as for ``DDP``.
        timeout_sec: as for ``DDP``.

    Raises:
        StrategyError: arguments that do not fit the ranks or one another, or as for ``DDP``.
    """

    name: ClassVar[str] = "fsdp"

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        *,
        shard: Choice = None,
        precision: str = "32-true",
        mixed_precision: MixedPrecisionPolicy | None = None,
        cpu_offload: bool = False,
        mesh: Mesh | DeviceMesh | None = None,
        reshard_after_forward: bool | int | None = True,
        tensor_parallel: Mapping[str, ParallelStyle] | None = None,
        find_unused_parameters: bool = False,
        methods: Sequence[str] = (),
        compile: bool | Mapping[str, Any] = False,
        scaler: Mapping[str, Any] | None = None,
        uneven: Uneven = "trim",
        backend: str | None = None,
        timeout_sec: float | None = None,
    ) -> None:
        check_switches(cpu_offload=cpu_offload, find_unused_parameters=find_unused_parameters)
        check_sizes(mesh)
        super().__init__(device, precision, compile, scaler, uneven, backend, timeout_sec)
        self._shard = shard
        self._plan = dict(tensor_parallel or {})
        self._finds_unused = find_unused_parameters
        self._methods = (methods,) if isinstance(methods, str) else tuple(methods)
        self._keeps_whole = reshard_after_forward is not True
        self._forget_models()
        self.forward_is_collective = self.peers is not None
        if self.peers is None:
            return
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)  # the only one that fully_shard works on
        self._mesh = make_mesh(mesh, self.device.type, self.world_size)
        self.data_rank, self.data_world_size = data_place(self._mesh)
        check_plan(self._plan, self._mesh)
        offloads = cpu_offload and self.device.type != "cpu"
        self._options = shard_options(
            reshard_after_forward, mixed_precision, offloads, find_unused_parameters, self._mesh["shard"].size()
        )

    def _forget_models(self) -> None:
        self._origins = Origins()
        self._replaced = Replaced()
        # the models that were prepared, and the shards of each
        self._prepared: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: not the mesh, nor what belongs to modules."""
        dropped = ("_mesh", "_options", "_origins", "_replaced", "_prepared")
        state = {name: value for name, value in super().__getstate__().items() if name not in dropped}
        return {**state, "forward_is_collective": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a copy keeps."""
        self.__dict__.update(state)
        self._forget_models()

    # ------------------------------------------------------------------ a model comes under the strategy

    def prepare_model(self, model: Model) -> None:
        """Bring rank 0's weights and buffers to all ranks and shard ``model``, in place. A collective.

        Its parameters are other objects afterwards. The model has to fit on the device whole for a moment.

        Raises:
            StrategyError: parameters that cannot be sharded, models that differ between ranks, or a choice of modules
                that fits none.
        """
        if self.peers is None:
            super().prepare_model(model)
            return
        fresh = self._fresh(model)
        if fresh is None:
            return
        super().prepare_model(fresh)
        groups = find_groups(fresh, self._shard)
        planned = [(module, style) for key, style in self._plan.items() for module in matching(fresh, key, "the plan")]
        methods = [(root, name) for name in self._methods for root in _having(fresh, name)]
        modules = list(dict.fromkeys(module for root in modules_of(fresh) for module in root.modules()))
        broadcast([one for root in modules_of(fresh) for one in (*root.parameters(), *root.buffers())])
        with self._origins.noting(modules), self._replaced.noting(modules):
            self._shard_modules(groups, planned, methods)
            for module in modules:
                if next(module.parameters(), None) is not None:
                    vars(module)["__deepcopy__"] = refuse_deepcopy
        for root in (*modules_of(fresh), *called_modules(fresh).values()):
            self._prepared[root] = list(root.parameters())

    def _fresh(self, model: Model) -> Model | None:
        """Return what of ``model`` has not been prepared yet."""
        fresh = {name: one for name, one in _named(model).items() if not self._is_prepared(name, one)}
        if not fresh or isinstance(model, Mapping):
            return fresh or None
        return model

    def _is_prepared(self, name: str, module: nn.Module) -> bool:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        if module in self._prepared:
            return True
        label = f"the module {name!r}" if name else "the model"
        if module in self._origins:
            if isinstance(module, FSDPModule) or next(module.parameters(), None) is None:
                return True
            raise StrategyError(
                f"{label}, a {type(module).__name__}, is a part of a sharded model and no group of its own: only the "
                "forward of its group has its weights whole. Choose it as a group, FSDP(shard=...)"
            )
        if any(isinstance(one, FSDPModule) for one in module.modules()) or any(
            isinstance(one, DTensor) for one in module.parameters()
        ):
            raise StrategyError(
                f"{label}, a {type(module).__name__}, holds parts that are sharded already: make the engine of the "
                "largest model first, and give all engines the same strategy object"
            )
        return False

    def _shard_modules(
        self, groups: Groups, planned: list[tuple[nn.Module, ParallelStyle]], methods: list[tuple[nn.Module, str]]
    ) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
        from torch.distributed.tensor.parallel import parallelize_module

        for module, style in planned:
            parallelize_module(module, self._mesh["tensor"], style)
        mesh = sharding_part(self._mesh)
        for module in groups.modules:
            fully_shard(module, mesh=mesh, **self._options)
            if self._finds_unused:
                module.set_reduce_scatter_unused_params(True, recurse=False)  # type: ignore[operator]
        for module, name in methods:
            register_fsdp_forward_method(module, name)

    def adopt_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer hold the shards in place of the parameters that it was made with. A collective.

        Its state is sharded like them, with rank 0's values.

        Raises:
            StrategyError: it holds a parameter of no model under this strategy, or state that has not the parameter's
                shape.
        """
        if self.peers is not None:
            shards = [parameter for parameters in self._prepared.values() for parameter in parameters]
            adopt(optimizer, self._replaced, shards, self.peers)

    # ------------------------------------------------------------------ runs

    @contextmanager
    def running(self, model: Model | None, train: bool) -> Iterator[None]:
        """Return the region of one run; see :meth:`Strategy.running`. All ranks have rank 0's buffers. A collective.

        After an evaluation each rank has its own buffers again, so that looking changes nothing.
        """
        with super().running(model, train):
            if self.peers is None:
                yield
                return
            # not the tensors themselves: a graph that waits for its backward must not see that they were written to
            buffers = [memory_of(one.data) for one in self._plain_buffers(model)]
            kept = [one.clone() for one in buffers] if not train and self.rank else []
            self._let_go(model)
            for root in modules_of(model):
                if root in self._prepared:
                    self._prepared[root] = list(root.parameters())  # loading with assign=True puts new ones there
            broadcast(buffers)
            try:
                yield
            except BaseException:
                self._recover(model)
                raise
            finally:
                self._let_go(model)
                for one, before in zip(buffers, kept, strict=False):
                    one.copy_(before)

    def _plain_buffers(self, model: Model | None) -> list[Tensor]:
        found = {id(one): one for root in modules_of(model) for one in root.buffers()}
        return [one for one in found.values() if not hasattr(one, "device_mesh")]

    def _let_go(self, model: Model | None) -> None:
        """Let go of gathered weights that a forward has left: they would be old after the next update."""
        from torch.distributed.fsdp import FSDPModule

        for root in modules_of(model):
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _recover(self, model: Model | None) -> None:
        """Forget a forward or backward that an error has cut: the next one would be taken for a part of it."""
        for root in called_modules(model or {}).values():
            reset = getattr(root, "reset_iter_state", None)  # older versions of torch have no such method
            if reset is not None:
                with suppress(AttributeError):  # torch's own, before the first forward, when there is nothing to forget
                    reset()

    def make_stepper(self) -> Stepper:
        """Return what steps the optimizers of one engine."""
        if self.peers is None:
            return super().make_stepper()
        if self.precision == "16-mixed":
            return ShardedLossScaler(self.device, self._shards, **(self._scaler or {}))
        return ShardedStepper(self._shards)

    def _shards(self) -> Iterator[nn.Parameter]:
        for parameters in list(self._prepared.values()):
            yield from parameters

    def reduce_gradients(self, model: Model | None, parameters: Sequence[Tensor]) -> None:
        """Prepare an update: gradients have been averaged over the ranks by each backward pass. Not a collective."""
        if self.peers is not None and self._keeps_whole:
            self._let_go(model)

    def clip_gradients(
        self, parameters: Sequence[Tensor], max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients down; see :meth:`Strategy.clip_gradients`. A collective."""
        return clip_gradients(parameters, max_norm, norm_type)

    # ------------------------------------------------------------------ whole weights

    def copy_model(self, model: ModelT) -> ModelT:
        """Return a plain deep copy of ``model``, whole on every rank; see :meth:`Strategy.copy_model`. A collective."""
        if self.peers is None:
            return super().copy_model(model)
        self._let_go(model)
        return copied(model, self._origins)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return ``model.state_dict()`` with every tensor whole, in the host's memory, on every rank. A collective."""
        if self.peers is None:
            return super().full_state_dict(model)
        self._let_go(model)
        found: dict[int, Tensor] = {}
        # with the tensors themselves, so that what is tied is gathered once
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                if id(value) not in found:
                    found[id(value)] = self._gathered(value)
                state[key] = found[id(value)]
        return dict(state)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if hasattr(tensor, "device_mesh"):
            return whole(tensor).cpu()
        value = tensor.detach().clone()
        dist.broadcast(value, src=0)
        return value.cpu()

    def whole(self, value: Any) -> Any:
        """Return ``value`` with every sharded tensor in it whole; see :meth:`Strategy.whole`. A collective."""
        return map_nested(value, lambda one: whole(one).cpu() if hasattr(one, "device_mesh") else one)

    def part_like(self, value: Tensor, like: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor; see :meth:`Strategy.part_like`. Not a collective."""
        part: Tensor = _part(value, like)
        return part

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict`` returned, which every rank must have: each takes its part. Not a collective."""
        if self.peers is not None:
            self._let_go(model)
            present = model.state_dict(keep_vars=True)
            state = {key: _part(value, present.get(key)) for key, value in state.items()}
        super().load_full_state_dict(model, state)


def _part(value: Any, present: Any) -> Any:
    is_shard = hasattr(present, "device_mesh") and not hasattr(value, "device_mesh")
    fits = is_shard and isinstance(value, Tensor) and value.shape == present.shape
    return part_like(value, present) if fits else value  # what does not fit is for load_state_dict to complain of


def _named(model: Model) -> Mapping[str, nn.Module]:
    return model if isinstance(model, Mapping) else {"": model}


def _having(model: Model, method: str) -> list[nn.Module]:
    roots = [root for root in called_modules(model).values() if callable(getattr(root, method, None))]
    if not roots:
        raise StrategyError(f"methods has {method!r}, which is no method of the model: leave it out, or see its name")
    return roots
