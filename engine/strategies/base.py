"""What an engine asks of a device strategy."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..nested import map_nested
from .precision import Stepper

__all__ = ["Model", "Strategy", "modules_of"]

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
        world_size: the number of processes.
    """

    name: ClassVar[str]
    device: torch.device
    precision: str = "32-true"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

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

    def copy_model(self, model: ModelT) -> ModelT:
        """Return a deep copy of ``model`` that shares nothing with it: same devices, modes and ties, no gradients.

        A mapping is copied as one graph, so a module that two of its modules share is shared in the copy too. Tensors
        that modules have kept from a forward pass are copied without their graph. A collective in sharding strategies.
        """
        memo: dict[int, Any] = {}
        # neither no_grad nor inference mode of the caller may get into the copy: it may be for training
        with torch.inference_mode(False), torch.enable_grad(), _CopyWithoutGraph():
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
