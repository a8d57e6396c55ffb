"""Inner runs: which engines are running in this thread, and what a run puts back when it ends.

A run that starts while another one is running in the same thread must not change it. In one ``finally``, whatever
happened inside: the train/eval flag of every sub-module; gradients that were pending, and which parameters want any;
buffers, such as batch statistics; grad and inference mode, autocast and its weight cache, the current device; the
random state of Python, NumPy, torch and every device; the data's own generators. That goes for the models and the data
of all runs around it, whether the inner engine was given them or its step only knows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import RunError
from .rng import Moment
from .state import StateView
from .strategies.ambient import fresh_modes

__all__ = ["Running", "active", "as_found_again", "refuse_reentry", "run_scope"]

_active: ContextVar[tuple[Any, ...]] = ContextVar("pellucid_active", default=())


# what the runs around another have left, and the data that they and it iterate
_left: ContextVar[tuple[tuple[Moment, tuple[Any, ...]], ...]] = ContextVar("pellucid_left", default=())


class Running(Protocol):
    """What nesting asks of an engine."""

    @property
    def state(self) -> StateView:
        """The engine's state."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules it was given."""

    def is_running(self) -> bool:
        """Whether its loop is running now, in this thread or another one."""

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics it was given."""

    @property
    def optimizer(self) -> Any:
        """Its optimizer, a mapping of them, or None."""

    @property
    def name(self) -> str:
        """What it is called in messages."""


def active() -> tuple[Any, ...]:
    """Return the engines that are running in this thread, the outermost first."""
    return _active.get()


def refuse_reentry(engine: Running) -> None:
    """Refuse to start an engine inside itself, or an inner training that would change the outer run's model.

    Raises:
        RunError: as above; the outer run is intact and may go on.
    """
    outer = active()
    if engine.is_running() or any(engine is other for other in outer):
        raise RunError(
            f"engine {engine.name!r} is running already and cannot be started again inside itself; nothing was "
            "changed. engine.fork(step) makes an engine with the same model and fresh state for an inner run"
        )
    for name, metric in engine.metrics.items():
        if any(metric is used for other in outer for used in other.metrics.values()):
            raise RunError(
                f"metric {name!r} of engine {engine.name!r} is a metric of the run around it too, and would lose what "
                "it has gathered there: give each engine a metric object of its own"
            )
    if engine.state.mode != "train" or not outer:
        return
    inside = {id(part) for part in _modules_and_parameters(*outer)}
    if any(id(part) in inside for part in chain(_modules_and_parameters(engine), _optimized(engine))):
        raise RunError(
            f"engine {engine.name!r} trains the model of the run around it, which an inner run must not change. Train "
            'a copy: engine.fork(step, mode="train", model="copy", optimizer=lambda params: SGD(params, lr))'
        )


def _modules_and_parameters(*engines: Running) -> Iterator[object]:
    for root in chain.from_iterable(engine.modules for engine in engines):
        yield from root.modules()
        yield from root.parameters()


def _optimized(engine: Running) -> Iterator[object]:
    given = engine.optimizer
    for optimizer in given.values() if isinstance(given, Mapping) else (given,):
        for group in () if optimizer is None else optimizer.param_groups:
            yield from group["params"]


@contextmanager
def run_scope(engine: Running, *data: Any) -> Iterator[None]:
    """Make an engine the running one; as an inner run, put everything back in the end.

    Args:
        engine: the engine.
        data: what it, and the runs around it, iterate.
    """
    outer = active()
    train = engine.state.mode == "train"
    around = _modules(chain.from_iterable(other.modules for other in outer))
    own = [] if train else _modules(engine.modules)
    all_of_them = list({id(module): module for module in (*around, *own)}.values())
    with ExitStack() as stack:
        stack.callback(_active.set, outer)
        _active.set((*outer, engine))
        if outer:
            moment, left = Moment(data), _left.get()
            stack.callback(_left.set, left)
            _left.set((*left, (moment, data)))
            stack.callback(moment.put_back)
        stack.callback(_restore_flags, [(module, module.training) for module in all_of_them])
        if outer:
            stack.callback(_restore_gradients, _take_gradients(all_of_them))
            stack.callback(_restore_buffers, _buffers(around))
        stack.enter_context(fresh_modes(train) if outer else _outermost_modes(train))
        if train:
            _train(engine.modules)
        else:
            _evaluate(engine.modules, own)
        yield


@contextmanager
def as_found_again(engine: Running) -> Iterator[None]:
    """Let a running engine be saved with the random state that it will find again when the runs inside have ended."""
    places = [place for place, running in enumerate(active()) if running is engine]
    left = _left.get()[places[0] :] if places else ()
    if not left:
        yield
        return
    found, data = left[0]
    now = Moment(data)
    found.put_back()
    try:
        yield
    finally:
        now.put_back()


def _outermost_modes(train: bool) -> Any:
    """A run on its own keeps what is set around it, but gradients are on in training and off in evaluation."""
    return fresh_modes(train) if train and torch.is_inference_mode_enabled() else torch.set_grad_enabled(train)


def _modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return every module once, a parent before its parts.

    Here and below torch's own dictionaries are read, of modules, parameters and buffers: an inner run goes through them
    all, and the public generators take several times as long.
    """
    found: dict[int, nn.Module] = {}
    left = [*roots]
    left.reverse()
    while left:
        module = left.pop()
        if id(module) not in found:
            found[id(module)] = module
            left.extend(part for part in reversed(module._modules.values()) if part is not None)
    return list(found.values())


def _train(roots: Iterable[nn.Module]) -> None:
    for root in roots:
        if not root.training:
            root.train()


def _evaluate(roots: Iterable[nn.Module], modules: list[nn.Module]) -> None:
    training = [module for module in modules if module.training]
    if all(map(_has_plain_flag, training)):
        for module in training:
            vars(module)["training"] = False
        return
    for root in roots:
        if any(module.training for module in root.modules()):
            root.eval()


def _restore_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    changed = [(module, training) for module, training in flags if module.training != training]
    if all(_has_plain_flag(module) for module, _ in changed):
        for module, training in changed:
            vars(module)["training"] = training
        return
    for module, training in flags:  # each asked anew: a parent's method changes its parts
        if module.training != training:
            module.train(training)  # its own method: some modules do more there, such as merging weights
    for module, training in flags:
        if module.training != training:
            module.training = training


def _has_plain_flag(module: nn.Module) -> bool:
    """Say whether switching this module is no more than setting its flag, as torch's own methods do."""
    kind, own = type(module), vars(module)
    return (
        kind.train is nn.Module.train
        and kind.eval is nn.Module.eval
        and kind.__setattr__ is nn.Module.__setattr__
        and "training" in own
        and "train" not in own
        and "eval" not in own
    )


def _take_gradients(modules: list[nn.Module]) -> list[tuple[nn.Parameter, bool, torch.Tensor | None]]:
    """Take pending gradients off the parameters: a backward inside must not add to them."""
    parameters = {
        id(parameter): parameter
        for module in modules
        for parameter in module._parameters.values()
        if parameter is not None
    }.values()
    taken = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    for parameter, _, gradient in taken:
        if gradient is not None:
            parameter.grad = None
    return taken


def _restore_gradients(taken: list[tuple[nn.Parameter, bool, torch.Tensor | None]]) -> None:
    for parameter, requires_grad, gradient in taken:
        if parameter.grad is not gradient:
            parameter.grad = gradient
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _buffers(modules: list[nn.Module]) -> list[_Buffer]:
    return [
        _Buffer(module, name, buffer, buffer.detach().clone())
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and not is_lazy(buffer)
    ]


class _Buffer(NamedTuple):
    """A buffer as an inner run found it."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    before: torch.Tensor

    def put_back(self) -> None:
        """Put the buffer and its values back, by `data`, which autograd does not take for a change of them.

        Always: batch normalisation does not count what it writes. But nothing writes to an expanded tensor.
        """
        if getattr(self.module, self.name, None) is not self.buffer:
            setattr(self.module, self.name, self.buffer)
        if not _is_expanded(self.buffer):
            self.buffer.data.copy_(self.before)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _restore_buffers(buffers: list[_Buffer]) -> None:
    for buffer in buffers:
        buffer.put_back()
