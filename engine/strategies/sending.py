"""How a function and its arguments get into the ranks: by a file that a new interpreter can read, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch

from ..errors import StrategyError
from .devices import accelerator_type, current_index

__all__ = ["Call", "check_can_be_copied", "check_is_good_copy", "pack", "unpack"]

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_FILE = "call.pt"
_REMEDY = (
    "define the function, and the classes of what it is given, in a module (a .py file) and import them from there"
)
_MAIN = ("__main__", "__mp_main__")  # the second is the first, in a new interpreter


def pack(fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> str | None:
    """Write the call for ``unpack`` in another process, and return None; or return why that cannot be.

    Tensors are copied: handed to ``multiprocessing``, all ranks would share their memory, and train the same weights.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is not None and not _main_can_be_read():
        return f"a new interpreter cannot read {path!r} again"  # python - < script.py
    modules: set[str] = set()

    class NotingPickler(pickle.Pickler):
        def reducer_override(self, one: object) -> Any:
            if isinstance(one, type | FunctionType | BuiltinFunctionType):
                modules.add(getattr(one, "__module__", None) or "builtins")
            return NotImplemented

    pickling = SimpleNamespace(__name__="pickle", Pickler=NotingPickler)
    try:
        torch.save((fn, args), folder / _FILE, pickle_module=pickling, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever somebody's __reduce__ raises
        return f"it cannot be pickled ({type(error).__name__}: {error})"
    unknown = sorted(name for name in modules if not _can_be_imported(name))
    if unknown:
        return f"a new interpreter cannot import {unknown[0]!r}"
    code = getattr(fn, "__code__", None)
    if getattr(fn, "__module__", None) in _MAIN and code is not None and code.co_filename.startswith("<"):
        return "it was defined interactively"  # python -i script.py
    return None


def unpack(folder: Path) -> Call:
    """Return what ``pack`` has written, its tensors on the CPU."""
    call: Call = torch.load(folder / _FILE, map_location="cpu", weights_only=False)
    return call


def check_can_be_copied(reason: str) -> None:
    """Do nothing if ranks can be copies of this process.

    Args:
        reason: why they must be.

    Raises:
        StrategyError: they cannot.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise StrategyError(f"the ranks must be copies of this process, as {reason}; this system has none: {_REMEDY}")
    accelerator = accelerator_type()
    if accelerator is not None and current_index(accelerator) is not None:
        raise StrategyError(_unusable(accelerator, reason))


def check_is_good_copy(reason: str, local_rank: int) -> None:
    """Do nothing if this process, a copy of the one that called ``launch``, can use the accelerator of its rank.

    Use of it before need not show in the process that was copied: to ask for the number of devices is enough.

    Raises:
        StrategyError: it cannot.
    """
    accelerator = accelerator_type()
    count = 0 if accelerator is None else torch.get_device_module(accelerator).device_count()
    if accelerator is None or not count:
        return
    try:
        weight = torch.ones((), device=f"{accelerator}:{min(local_rank, count - 1)}", requires_grad=True)
        torch.autograd.backward(weight)  # the threads for this were not copied either
    except RuntimeError as error:
        raise StrategyError(_unusable(accelerator, reason)) from error


def _unusable(accelerator: str, reason: str) -> str:
    return (
        f"the ranks must be copies of this process, as {reason}; but {accelerator} has been used in it, if only to ask "
        f"for the number of devices, and a copy cannot use it then: {_REMEDY}; or start this process anew and call "
        "launch before anything else asks for a device"
    )


def _can_be_imported(name: str) -> bool:
    """Say whether an interpreter that is new, with the same search path, would find the module."""
    if name in _MAIN:
        return _main_can_be_read()
    parts = name.split(".")
    path = None
    for count in range(1, len(parts) + 1):
        found = (finder.find_spec(".".join(parts[:count]), path) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None:
            return count == len(parts)
    return True


def _main_can_be_read() -> bool:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and os.path.isfile(path))
