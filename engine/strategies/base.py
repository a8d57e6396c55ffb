"""What an engine asks of a device strategy."""

# ruff: noqa: B027 (methods that are empty where one process has nothing to do)

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..nested import map_nested
from .alone import alone
from .peers import Peers
from .precision import Stepper

__all__ = ["Model", "Strategy", "Uneven", "copying", "deep_copy", "modules_of"]

_NOTHING = object()
Uneven = Literal["trim", "pad"]
Model = nn.Module | Mapping[str, nn.Module]
ModelT = TypeVar("ModelT", bound=Model)


class Strategy(ABC):
    """Where and how a model runs: the seam between the engine and devices, precision and processes.

    The model stays the user's own object: a strategy changes it in place, or not at all. A strategy holds no engine and
    no data, and can be copied and pickled.

    Attributes:
        name: as in ``Engine(strategy=name)``.
        device: where batches go on this rank.
        precision: such as ``"32-true"``; the names are in :mod:`.precision`.
        rank: this process among all, from 0.
        local_rank: this process among those of its machine, from 0.
        world_size: the number of processes that run the model together; 1 for one that works on its own.
        data_rank: this process among those that read different data, from 0.
        data_world_size: the number of those; fewer than ``world_size`` where ranks share a layer's work.
        uneven: what happens to training data that does not give every rank as many batches: ``"trim"`` leaves the
            rest out, ``"pad"`` repeats batches.
        forward_is_collective: whether a forward pass is one, also in evaluation.
        peers: how the ranks talk on the host; None where there is one process, or this one works on its own.
    """

    name: ClassVar[str]
    device: torch.device
    precision: str = "32-true"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    data_world_size: int = 1
    uneven: Uneven = "trim"
    forward_is_collective: bool = False
    peers: Peers | None = None

    @abstractmethod
    def prepare_model(self, model: Model) -> None:
        """Bring ``model`` to where it runs, in place: modules and parameters stay the objects they are.

        An engine calls it once, before its optimizer is made. Preparing a model again changes nothing. A collective in
        parallel strategies: every rank must call it.

        Raises:
            StrategyError: the model cannot run there.
        """

    @abstractmethod
    def prepare_batch(self, batch: Any) -> Any:
        """Return ``batch`` on :attr:`device`: the same object if it is there already, or holds no tensors.

        Never a collective. Waits for the device only where the copy has to (memory that is not pinned).
        """

    @abstractmethod
    def autocast(self) -> AbstractContextManager[None]:
        """Return the region in which a forward pass has this strategy's precision. Never waits, never a collective."""

    @abstractmethod
    def make_stepper(self) -> Stepper:
        """Return what makes backward passes and optimizer steps for one engine: each has a loss scale of its own."""

    @contextmanager
    def running(self, model: Model | None, train: bool) -> Iterator[None]:
        """Return the region of one run. In it Ignite's metrics see the ranks of this strategy, and no others.

        A collective where gradients are brought together, in training: every rank must enter it.

        Raises:
            StrategyError: the model cannot be trained, or run, by this strategy now.
        """
        with alone():
            yield

    def adopt_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer that was made before its model was prepared hold the parameters that the model has now.

        Raises:
            StrategyError: that cannot be done.
        """

    def sync_gradients(self, model: Model | None, on: bool) -> None:
        """Say whether the backward passes of the forwards to come bring gradients together over the ranks.

        To be called before the forward, in a run; at its start this is on. Does nothing where there is one process.
        """

    def before_backward(self, model: Model | None, inputs: Sequence[Tensor] | None) -> None:
        """Prepare a backward pass, into all parameters or into ``inputs`` only, where ``peers`` is not None.

        Raises:
            StrategyError: gradients for these alone cannot be brought together.
        """

    def after_backward(self, model: Model | None) -> None:
        """Take note of a backward pass, where ``peers`` is not None."""

    def reduce_gradients(self, model: Model | None, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the ranks where no backward pass has brought them together yet. A collective.

        Raises:
            StrategyError: the backward passes have left parameters out, so that the others wait for this rank.
        """

    def clip_gradients(
        self, parameters: Sequence[Tensor], max_norm: float | None = None, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients down so that their norm is at most ``max_norm``. A collective in sharding strategies.

        Args:
            parameters: whose gradients are taken together.
            max_norm: None: scale nothing.
            norm_type: as in ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            the norm as it was: shape (), a plain tensor, the same on all ranks. Does not wait for the device.
        """
        if max_norm is not None:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)

    def mean(self, value: float | Tensor) -> float | Tensor:
        """Return the mean of a number over the ranks that read different data. A collective; no wait for a device."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks are here. A collective."""
        if self.peers is not None:
            self.peers.barrier()

    def broadcast(self, value: Any, what: str = "a broadcast") -> Any:
        """Return rank 0's ``value``, whatever can be pickled. A collective; tensors that are sent are on the CPU.

        Args:
            value: rank 0's is sent, the others' is not looked at.
            what: it is, in words, for the message to ranks that are doing something else.
        """
        return value if self.peers is None else self.peers.broadcast(value, what)

    def gather(self, value: Any, what: str = "a gathering") -> list[Any]:
        """Return the ``value`` of every rank, by rank, whatever can be pickled. A collective.

        Args:
            value: this rank's.
            what: as for ``broadcast``.
        """
        return [value] if self.peers is None else self.peers.gather(value, what)

    def gather_batches(self, mine: Sequence[Any]) -> list[Any]:
        """Return what each rank has kept for its batches, in the order of the data, on all ranks. A collective.

        Args:
            mine: one entry for each batch of this rank, in order; whatever can be pickled, tensors on the CPU.
        """
        if self.peers is None:
            return list(mine)
        by_rank = dict(self.peers.gather((self.data_rank, list(mine)), "the gathering of batches"))
        rows = zip_longest(*(by_rank[rank] for rank in sorted(by_rank)), fillvalue=_NOTHING)
        return [entry for row in rows for entry in row if entry is not _NOTHING]

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return ``model.state_dict()`` with every tensor whole, as plain tensors. A collective in sharding strategies.

        It loads into a plain module, and with ``load_full_state_dict`` under every other strategy.
        """
        return dict(model.state_dict())

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load what ``full_state_dict`` returned. A collective in sharding strategies."""
        model.load_state_dict(state)

    def whole(self, value: Any) -> Any:
        """Return ``value`` with every sharded tensor in it whole, as a plain one on the host, on every rank.

        A collective in sharding strategies. Looks into lists, tuples and mappings.
        """
        return value

    def part_like(self, value: Tensor, like: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor that is to stand where ``like`` does. Not a collective."""
        return value

    def copy_model(self, model: ModelT) -> ModelT:
        """Return a deep copy of ``model`` that shares nothing with it: same devices, modes and ties, no gradients.

        A mapping is copied as one graph, so a module that two of its modules share is shared in the copy too. Tensors
        that modules have kept from a forward pass are copied without their graph. A collective in sharding strategies.
        """
        with copying():
            return deep_copy(model, {})


@contextmanager
def copying() -> Iterator[None]:
    """Return the region in which a model is copied.

    Neither no_grad nor inference mode of the caller gets into the copy, which may be for training, nor does a graph.
    """
    with torch.inference_mode(False), torch.enable_grad(), _CopyWithoutGraph():
        yield


def deep_copy(model: ModelT, memo: dict[int, Any]) -> ModelT:
    """Return a deep copy of a module, or of the modules of a mapping as one graph; ``memo`` as in ``copy.deepcopy``."""
    copied: ModelT = map_nested(model, lambda module: copy.deepcopy(module, memo), leaf=nn.Module)
    return copied


class _CopyWithoutGraph(TorchFunctionMode):
    """Lets ``copy.deepcopy`` copy tensors that belong to a graph, wherever a module has kept them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def modules_of(model: Model | None) -> tuple[nn.Module, ...]:
    """Return the module, those of the mapping, or nothing."""
    if model is None:
        return ()
    return tuple(model.values()) if isinstance(model, Mapping) else (model,)
