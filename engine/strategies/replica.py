"""Torch's ``DistributedDataParallel`` beside a module: two hooks on the module, and the wrapper of one run.

The private parts of torch's wrapper that are called here, and nowhere else, are ``_pre_forward``, ``_post_forward``,
``require_backward_grad_sync`` and of its reducer ``prepare_for_backward`` and ``_check_reducer_finalized``;
``tests/test_ddp.py`` tells when they change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import StrategyError

__all__ = ["CommHook", "Hooks", "Replica"]

CommHook = Callable[[Any, Any], Any]


class Replica:
    """Torch's wrapper for one module in one run, and what has been done with it since the last update."""

    def __init__(
        self,
        module: nn.Module,
        options: Mapping[str, Any],
        broadcast_buffers: bool,
        comm_hook: tuple[Any, CommHook] | None,
        agree: Callable[[list[str]], None],
    ) -> None:
        self._module = module
        self._options = options
        self._broadcast_buffers = broadcast_buffers
        self._comm_hook = comm_hook
        self._agree = agree  # with the other ranks, on the names of what is trained
        self.sync = True  # the forwards to come belong to a batch that brings gradients together
        self.is_apart = True  # gradients that are there, from before the run too, may not have been brought together
        self._forward: bool | None = None  # since the last backward: with sync, without, or none
        self._missing = ""  # what torch says of a backward that has left parameters out
        self._is_spent = False  # a backward has gone through the last forward
        self._build()

    def _build(self) -> None:
        self._named = [(name, one) for name, one in self._module.named_parameters()]
        self._wanted = [parameter.requires_grad for _, parameter in self._named]
        self._ddp: DistributedDataParallel | None = None
        if any(self._wanted):
            # rank 0's values were sent already; without device_ids torch leaves the inputs to us
            self._ddp = DistributedDataParallel(self._module, init_sync=False, **self._options)
            self._ddp.broadcast_buffers = self._broadcast_buffers  # not as an argument: torch is renaming that
            if self._comm_hook is not None:
                self._ddp.register_comm_hook(*self._comm_hook)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that are not frozen."""
        return [parameter for _, parameter in self._named if parameter.requires_grad]

    def before_forward(self) -> None:
        """Do what the wrapper does before a forward. A collective where buffers are sent."""
        if [parameter.requires_grad for _, parameter in self._named] != self._wanted:
            self._agree([name for name, one in self._named if one.requires_grad])  # frozen or thawed in mid-run
            self._build()
        ddp = self._ddp
        if ddp is None:
            return
        ddp.require_backward_grad_sync = self.sync
        try:
            ddp._pre_forward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise StrategyError(self._unused(str(error))) from error

    def after_forward(self, output: Any) -> Any:
        """Do what the wrapper does after a forward, and return the output that is to take its place."""
        self._forward, self._is_spent, self._missing = self.sync, False, ""
        if self._ddp is None:
            return output
        return self._ddp._post_forward(output)  # type: ignore[no-untyped-call]

    def before_backward(self, inputs: Sequence[Tensor] | None) -> None:
        """Prepare a backward pass, into all parameters or into ``inputs`` only."""
        if self._ddp is None or not self.sync:
            return
        if inputs is not None:
            given = {id(one) for one in inputs}
            mine = [name for name, one in self._named if one.requires_grad and id(one) in given]
            if not mine:
                self._forward = None  # no gradient of this module is made
                return
            if len(mine) < len(self.trained()):
                raise StrategyError(
                    f"backward(optimizer=...) reaches only a part of a module's parameters ({mine[0]!r}, ...), whose "
                    "gradients cannot be brought together so: give the parts as modules of their own, "
                    "Engine(step, {name: module, ...})"
                )
        if self._is_spent:
            # a second backward through one forward: torch's wrapper expects one for each
            self._ddp.reducer.prepare_for_backward([])
            self._forward = True

    def after_backward(self) -> None:
        """Take note of a backward pass."""
        if self._forward is None or self._ddp is None:
            return
        if self._forward:
            try:
                self._ddp.reducer._check_reducer_finalized()
            except RuntimeError as error:
                self._missing = str(error)  # not an error yet: another backward may bring the rest
                return
        self._missing, self._forward, self.is_apart, self._is_spent = "", None, not self._forward, True

    def check_finished(self) -> None:
        """Raise if gradients are left that this rank should have given to the others."""
        if self._missing:
            raise StrategyError(self._unused(self._missing))

    def _unused(self, text: str) -> str:
        """Return what to say where torch says ``text``."""
        names = unused_in(
            text, [name for (name, _), is_wanted in zip(self._named, self._wanted, strict=True) if is_wanted]
        )
        shown = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
        return (
            f"these parameters took no part in the loss: {shown or 'some of them'}. So this rank has nothing to "
            "average with the others. If they are unused in some batches give DDP(find_unused_parameters=True); if "
            "they are not to be trained, freeze them with requires_grad_(False)"
        )


class Hooks:
    """The two hooks on a module. A copy of them, which comes with a copy of the module, does nothing."""

    def __init__(self) -> None:
        self.replica: Replica | None = None  # for the length of a training run
        self.paused = False  # an evaluation is running
        self._handles: list[Any] = []
        self._is_guarded = False

    def put_on(self, module: nn.Module) -> None:
        """Put them on, such that compiled code calls them: what they do depends on the run, and must not be compiled.

        Again at each run, as torch's compiler may have been loaded since. To load it takes seconds, and without it
        nothing is compiled.
        """
        if self._handles and (self._is_guarded or "torch._dynamo" not in sys.modules):
            return
        if self._handles and getattr(module, "_compiled_call_impl", None) is not None:
            torch.compiler.reset()  # it may have been compiled with them in it
        self.take_off()
        self._is_guarded = "torch._dynamo" in sys.modules
        before, after = Hooks.before_forward, Hooks.after_forward
        if self._is_guarded:
            before, after = map(torch.compiler.disable, (before, after))
        self._handles = [
            module.register_forward_pre_hook(MethodType(before, self), prepend=True),
            module.register_forward_hook(MethodType(after, self)),
        ]

    def take_off(self) -> None:
        """Take them off."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Be called by the module before its forward."""
        if self.replica is not None and not self.paused and torch.is_grad_enabled():
            self.replica.before_forward()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Be called by the module after its forward."""
        if self.replica is not None and not self.paused and torch.is_grad_enabled():
            return self.replica.after_forward(output)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hooks:
        return Hooks()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hooks, ()


def unused_in(text: str, names: Sequence[str]) -> list[str]:
    """Return the parameters that torch's message speaks of, by index or, with its debug level, by name."""
    indices = re.search(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)", text)
    if indices is not None:
        return [names[int(index)] for index in indices.group(1).split()]
    named = re.search(r"Parameters which did not receive grad for rank \d+: ([^\n]+)", text)
    return [] if named is None else named.group(1).split(", ")
