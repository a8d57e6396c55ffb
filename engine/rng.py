"""The random state of a program: Python, NumPy, torch, every device, and generators that the data keeps.

Captured around inner runs and at the moments a run can be taken up again from. NumPy is looked at only if the
program has imported it, a device only if it is initialised already.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["GeneratorStates", "Moment", "RandomState", "find_generators", "go_own_way"]

# what keeps no generator; an iterator of a loader belongs to one run, and is not there in another
_LEAVES = (str, bytes, int, float, complex, type, type(None), ModuleType, torch.Tensor, _BaseDataLoaderIter)
_SHORT, _MOST_PARTS = 100, 10_000
_EMPTY_CELL = CellType()
_ODD = 0x9E3779B97F4A7C15  # spreads small numbers over all bits: 2**64 over the golden ratio


class RandomState:
    """The global random state at one moment.

    Capturing and restoring take some 0.1 ms, most of it NumPy's. Neither waits for a device.
    """

    def __init__(self) -> None:
        """Capture the state as it is now."""
        self.python = random.getstate()
        self.torch = torch.default_generator.get_state()
        numpy = sys.modules.get("numpy")
        self.numpy = None if numpy is None else numpy.random.get_state()
        self.devices = {kind: module.get_rng_state_all() for kind, module in _device_modules()}

    def restore(self) -> None:
        """Put the captured state back."""
        random.setstate(self.python)
        torch.default_generator.set_state(self.torch)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)
        for kind, module in _device_modules():
            if kind in self.devices:
                here = len(module.get_rng_state_all())  # a checkpoint may come from a machine with more devices
                module.set_rng_state_all(self.devices[kind][:here])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain numbers, so that a weights-only loader reads it."""
        version, words, gauss = self.python
        state: dict[str, Any] = {"python": [version, torch.tensor(words, dtype=torch.int64), gauss]}
        state["torch"] = self.torch.clone()
        if self.numpy is not None:
            kind, keys, position, has_gauss, cached = self.numpy
            keys = torch.tensor(keys.tolist(), dtype=torch.int64)
            state["numpy"] = [str(kind), keys, int(position), int(has_gauss), float(cached)]
        state["devices"] = {kind: [one.clone() for one in states] for kind, states in self.devices.items()}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """Return what ``state_dict`` was made of."""
        self = cls.__new__(cls)
        version, words, gauss = state["python"]
        self.python = (version, tuple(words.tolist()), gauss)
        self.torch = state["torch"].cpu()  # wherever the file was mapped to
        self.numpy = None
        if "numpy" in state:
            import numpy

            kind, keys, position, has_gauss, cached = state["numpy"]
            self.numpy = (kind, numpy.array(keys.tolist(), dtype=numpy.uint32), position, has_gauss, cached)
        self.devices = {kind: [one.cpu() for one in states] for kind, states in state["devices"].items()}
        return self


def go_own_way(rank: int) -> None:
    """Let this rank draw other random numbers than rank 0 from now on, decided by those it would have drawn.

    Ranks that were seeded alike agree on what was made before a run, and get dropout masks of their own in it.
    """
    seed = int(torch.empty((), dtype=torch.int64).random_().item()) ^ (rank * _ODD)
    torch.manual_seed(seed % 2**63)
    random.seed(random.getrandbits(63) ^ rank)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int(numpy.random.randint(2**31)) ^ rank)


class GeneratorStates:
    """The states of the generators that a data source keeps: its own, its sampler's, its data set's."""

    def __init__(self, data: Any) -> None:
        """Capture the states as they are now."""
        self._generators = find_generators(data)
        self.states = [_get_state(generator) for generator in self._generators]

    def put_back(self) -> None:
        """Put the states back into the very generators they were taken from."""
        for generator, state in zip(self._generators, self.states, strict=True):
            _set_state(generator, state)

    def restore(self, data: Any) -> None:
        """Put the states into data built the same way, by place; data with other generators is left alone."""
        generators = find_generators(data)
        if [_kind(_get_state(generator)) for generator in generators] == [_kind(state) for state in self.states]:
            for generator, state in zip(generators, self.states, strict=True):
                _set_state(generator, state)

    def state_dict(self) -> list[Any]:
        """Return the states as tensors and plain numbers."""
        return [_plain(state) for state in self.states]

    @classmethod
    def from_state_dict(cls, states: list[Any]) -> GeneratorStates:
        """Return what ``state_dict`` was made of."""
        self = cls(None)
        self.states = [_from_plain(state) for state in states]
        return self


class Moment:
    """The random state at one moment, with that of the data's own generators."""

    def __init__(self, source: Any) -> None:
        """Capture it as it is now."""
        self.random = RandomState()
        self.generators = GeneratorStates(source)

    def put_back(self) -> None:
        """Put it back, into the very generators that it was taken from."""
        self.random.restore()
        self.generators.put_back()

    def restore(self, source: Any) -> None:
        """Put it back, into a source that was built the same way."""
        self.random.restore()
        self.generators.restore(source)

    def state_dict(self) -> dict[str, Any]:
        """Return it as tensors and plain numbers."""
        return {"random": self.random.state_dict(), "generators": self.generators.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Moment:
        """Return what ``state_dict`` was made of."""
        self = cls.__new__(cls)
        self.random = RandomState.from_state_dict(state["random"])
        self.generators = GeneratorStates.from_state_dict(state["generators"])
        return self


def find_generators(data: Any) -> list[Any]:
    """Return the random generators (torch, Python, NumPy) that ``data`` keeps, always in the same order.

    Samplers that shuffle by the number of the epoch are among them: that number is their state.

    Looks into the loaders, samplers, data sets and transforms it is made of, wherever they keep one: in an attribute, a
    short list, a function's closure. Into what a function takes from its module only if ``data`` is a function itself.
    """
    function = getattr(data.func if isinstance(data, partial) else data, "__func__", data)
    if isinstance(function, FunctionType):
        data = (data, *_named_in(function))
    found: list[Any] = []
    seen: dict[int, Any] = {}
    left = [data]
    while left and len(seen) < _MOST_PARTS:
        value = left.pop()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value  # the value too: an id names an object only while that lives
        if _is_generator(value) or _counts_epochs(value):
            found.append(value)
        if not _is_generator(value):
            left.extend(_parts(value))
    return found


def _named_in(function: FunctionType, depth: int = 3) -> Iterator[Any]:
    """Yield what a function, and the functions it calls, take from their modules, but for engines and models."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, nn.Module) or hasattr(type(value), "add_event_handler"):
            continue
        yield value
        if isinstance(value, FunctionType) and depth:
            yield from _named_in(value, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what may keep a generator; not the samples: a container of many things."""
    if isinstance(value, list | tuple | dict):
        if len(value) <= _SHORT:
            yield from value.values() if isinstance(value, dict) else value
        return
    if isinstance(value, MethodType | BuiltinMethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL)
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from list(attributes.values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield getattr(value, name, None)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator) or (isinstance(value, random.Random) and not _has_no_state(value)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _has_no_state(generator: random.Random) -> bool:
    return isinstance(generator, random.SystemRandom)


def _counts_epochs(value: Any) -> bool:
    """Say whether this is a sampler that shuffles by the epoch: counts it, or is told it as DistributedSampler is."""
    by_epoch = isinstance(value, Sampler) or callable(getattr(value, "set_epoch", None))
    return by_epoch and type(getattr(value, "epoch", None)) is int


def _get_state(generator: Any) -> Any:
    if _counts_epochs(generator):
        return generator.epoch
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()


def _kind(state: Any) -> Any:
    """Return what two states have in common of which one may be put in the other's place."""
    if isinstance(state, int):
        return int
    if isinstance(state, torch.Tensor):
        return state.numel()
    return state["bit_generator"] if isinstance(state, dict) else (type(state[0]), len(state))


def _set_state(generator: Any, state: Any) -> None:
    if _counts_epochs(generator):
        set_epoch = getattr(generator, "set_epoch", None) or partial(setattr, generator, "epoch")
        set_epoch(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _plain(value: Any) -> Any:
    """Return tensors, numbers, strings, lists and dicts only; tuples and arrays are marked so that they come back."""
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _plain(item) for key, item in value.items()}}
    if hasattr(value, "dtype") and not isinstance(value, torch.Tensor):
        return {"array": [str(value.dtype), value.tolist()]}
    return value


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_plain(item) for item in value["tuple"])
    if "dict" in value:
        return {key: _from_plain(item) for key, item in value["dict"].items()}
    import numpy

    kind, items = value["array"]
    return numpy.array(items, dtype=kind)


def _device_modules() -> Iterator[tuple[str, Any]]:
    """Yield the accelerator's module of torch if it is initialised, never initialising it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", None)
    if hasattr(module, "get_rng_state_all"):
        if is_initialized is None or is_initialized():
            yield accelerator.type, module
    elif hasattr(module, "get_rng_state"):
        yield accelerator.type, _OneDevice(module)


class _OneDevice:
    """The random state of a device kind that has one device only (mps)."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.module.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.module.set_rng_state(states[0])
