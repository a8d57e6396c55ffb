"""Data parallelism in place: torch's ``DistributedDataParallel`` works beside the module, not around it.

For the length of a training run a ``DistributedDataParallel`` is made for the module, and two forward hooks on the
module call what the wrapper's own ``forward`` would call before and after it (torch's composable ``replicate`` does
the same). So the user's object is the only model there is. Without grad or in eval mode the hooks do nothing: an
evaluation makes no collective call in its forward, and shards of different length cannot hang.

The hooks stay on the module between runs, without the wrapper: what ``torch.compile`` has seen must not change.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import StrategyError
from .base import Model, Uneven, modules_of
from .broadcasting import broadcast
from .distributed import Distributed
from .options import check_hook, check_positive, check_switches
from .replica import CommHook, Hooks, Replica

__all__ = ["DDP"]


class DDP(Distributed):
    """The whole model on every rank, a part of each batch on each, gradients averaged in the backward pass.

    Making one is a collective: it makes the process group if there is none. In a program that is one process alone it
    does what ``SingleDevice`` does.

    Args:
        device: as for ``SingleDevice``; None: the accelerator of the local rank, else the CPU.
        precision: as for ``SingleDevice``.
        compile: as for ``SingleDevice``.
        scaler: as for ``SingleDevice``.
        find_unused_parameters: for models that leave parameters out in some batches. Costs a walk through the graph in
            every batch; without it such a batch is an error.
        static_graph: promise that all batches use the same parameters in the same order.
        gradient_as_bucket_view: gradients are views into what is sent, which saves their memory once.
        broadcast_buffers: rank 0's buffers, such as batch statistics, go to all ranks before a forward.
        bucket_cap_mb: megabytes of gradients sent at once; None: torch's default.
        comm_hook: compresses what is sent: a hook of ``torch.distributed.algorithms.ddp_comm_hooks``, or a pair of
            its state and the hook.
        sync_every_batch: bring gradients together with every batch of an accumulation window, not only the last.
        uneven: what to do with training data that does not give every rank as many batches: ``"trim"`` leaves the
            rest out and says so, ``"pad"`` repeats batches from the beginning.
        backend: as in ``torch.distributed.init_process_group``; None: what suits the device.
        timeout_sec: of each collective; None: torch's default.

    Raises:
        StrategyError: more ranks than devices, no such backend, or as for ``SingleDevice``.
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        device: str | int | torch.device | None = None,
        *,
        precision: str = "32-true",
        compile: bool | Mapping[str, Any] = False,
        scaler: Mapping[str, Any] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: CommHook | tuple[Any, CommHook] | None = None,
        sync_every_batch: bool = False,
        uneven: Uneven = "trim",
        backend: str | None = None,
        timeout_sec: float | None = None,
    ) -> None:
        state, hook = comm_hook if isinstance(comm_hook, tuple) and len(comm_hook) == 2 else (None, comm_hook)
        if hook is not None:
            check_hook(hook, comm_hook)
        check_switches(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            broadcast_buffers=broadcast_buffers,
            sync_every_batch=sync_every_batch,
        )
        check_positive("bucket_cap_mb", bucket_cap_mb, "megabytes")
        super().__init__(device, precision, compile, scaler, uneven, backend, timeout_sec)
        self._options = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._broadcast_buffers = broadcast_buffers
        self._comm_hook = None if hook is None else (state, hook)
        self._sync_every_batch = sync_every_batch
        self._hooks: WeakKeyDictionary[nn.Module, Hooks] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: not the hooks, which belong to modules."""
        return {name: value for name, value in super().__getstate__().items() if name != "_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what was kept."""
        self.__dict__.update(state)
        self._hooks = WeakKeyDictionary()

    def prepare_model(self, model: Model) -> None:
        """Bring ``model`` to the device of this rank, with rank 0's weights and buffers. A collective.

        Raises:
            StrategyError: parameters without values, models that differ between ranks, or modules of a mapping that
                share parameters.
        """
        super().prepare_model(model)
        if self.peers is None:
            return
        _refuse_shared(model)
        for module in modules_of(model):
            if module not in self._hooks:
                broadcast([*module.parameters(), *module.buffers()])
                self._hooks[module] = hooks = Hooks()
                hooks.put_on(module)
                weakref.finalize(self, hooks.take_off).atexit = False

    @contextmanager
    def running(self, model: Model | None, train: bool) -> Iterator[None]:
        """Return the region of one run: rank 0's weights go to all, and in training gradients are brought together.

        An evaluation takes rank 0's buffers. A collective.
        """
        with super().running(model, train), self._pausing(model, not train):
            if self.peers is None:
                yield
            elif train:
                with self._replicated(model):
                    yield
            else:
                if self._broadcast_buffers:
                    broadcast(one for module in modules_of(model) for one in module.buffers())
                yield

    @contextmanager
    def _replicated(self, model: Model | None) -> Iterator[None]:
        hooks = [self._hooks[module] for module in modules_of(model)]
        try:
            for module, one in zip(modules_of(model), hooks, strict=True):
                broadcast(module.parameters())  # buffers are sent before each forward, by torch's wrapper
                one.put_on(module)
                one.replica = Replica(module, self._options, self._broadcast_buffers, self._comm_hook, self._agree)
            yield
            for replica in self._replicas(model):
                replica.check_finished()
        finally:
            for one in hooks:
                one.replica = None

    def _agree(self, trained: list[str]) -> None:
        """Refuse parameters that are frozen or thawed in mid-run on some ranks only. A collective."""
        by_rank = self.gather(trained, "a change of which parameters are trained")
        for rank, theirs in enumerate(by_rank):
            differing = sorted(set(theirs) ^ set(by_rank[0]))
            if differing:
                raise StrategyError(
                    f"the parameter {differing[0]!r} is frozen on rank {rank} or on rank 0, and not on both: freeze "
                    "and thaw parameters on every rank, before the same batch"
                )

    def paused(self, model: Model | None) -> AbstractContextManager[None]:
        """Return the region in which this rank works with the model on its own: no forward is a collective."""
        return self._pausing(model, True)

    @contextmanager
    def _pausing(self, model: Model | None, paused: bool) -> Iterator[None]:
        hooks = [self._hooks[module] for module in modules_of(model) if module in self._hooks]
        before = [one.paused for one in hooks]
        try:
            for one in hooks:
                one.paused = paused
            yield
        finally:
            for one, was_paused in zip(hooks, before, strict=True):
                one.paused = was_paused

    def _replicas(self, model: Model | None) -> Iterator[Replica]:
        for module in modules_of(model):
            hooks = self._hooks.get(module)
            if hooks is not None and hooks.replica is not None:
                yield hooks.replica

    def sync_gradients(self, model: Model | None, on: bool) -> None:
        """Say whether the forwards to come are of a batch whose backward brings gradients together."""
        for replica in self._replicas(model):
            replica.sync = on or self._sync_every_batch

    def before_backward(self, model: Model | None, inputs: Sequence[Tensor] | None) -> None:
        """Prepare a backward pass; see :meth:`Strategy.before_backward`."""
        for replica in self._replicas(model):
            replica.before_backward(inputs)

    def after_backward(self, model: Model | None) -> None:
        """Take note of a backward pass; what it has left out must come before the update."""
        for replica in self._replicas(model):
            replica.after_backward()

    def reduce_gradients(self, model: Model | None, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the ranks where no backward pass has brought them together yet. A collective."""
        wanted = {id(parameter) for parameter in parameters}
        for replica in self._replicas(model):
            replica.check_finished()
            mine = [parameter for parameter in replica.trained() if id(parameter) in wanted]
            if replica.is_apart and mine:
                self._average(mine)

    def _average(self, parameters: Sequence[Tensor]) -> None:
        assert self.peers is not None
        anywhere = self.peers.largest("an update", [parameter.grad is not None for parameter in parameters])
        for parameter, has_gradient in zip(parameters, anywhere, strict=True):
            if has_gradient:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.world_size)
                dist.all_reduce(parameter.grad)


def _refuse_shared(model: Model) -> None:
    owners: dict[int, str] = {}
    if not isinstance(model, Mapping):
        return
    for key, module in model.items():
        for name, parameter in module.named_parameters():
            owner = owners.setdefault(id(parameter), key)
            if owner != key:
                raise StrategyError(
                    f"modules {owner!r} and {key!r} share the parameter {name!r}, whose gradient each would average "
                    "on its own: give them as one module, such as torch.nn.ModuleDict"
                )
