"""The modes of torch that belong to a thread: what an inner run must find fresh, and leave as they were."""

from __future__ import annotations

from types import TracebackType

import torch

from .devices import accelerator_type, current_index

__all__ = ["AmbientState", "fresh_modes"]

# what torch documents as the dtype of an autocast region that names none
_AUTOCAST_DTYPES = {"cpu": torch.bfloat16, "cuda": torch.float16}


class AmbientState:
    """Torch's modes in this thread at one moment: grad mode, autocast and its weight cache, the current device.

    Neither capturing nor restoring waits for a device or sets one up.
    """

    __slots__ = ("autocast", "cache_enabled", "depth", "device_index", "device_type", "grad")

    def __init__(self) -> None:
        self.device_type = accelerator_type()
        self.device_index = None if self.device_type is None else current_index(self.device_type)
        self.grad = torch.is_grad_enabled()
        self.autocast = [(kind, *_autocast(kind)) for kind in _autocast_types(self.device_type)]
        self.cache_enabled = torch.is_autocast_cache_enabled()
        self.depth = _autocast_depth()

    @classmethod
    def capture(cls) -> AmbientState:
        """Return the modes of this thread as they are now."""
        return cls()

    def restore(self) -> None:
        """Put every mode back that differs by now, also one that somebody entered and never left."""
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        for device_type, enabled, dtype in self.autocast:
            if (enabled, dtype) != _autocast(device_type):
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)
        if (depth := _autocast_depth()) != self.depth:
            self._restore_depth(depth)
        if self.device_type is not None:
            # a device that was not set up before is at its first index
            index = current_index(self.device_type)
            if index is not None and index != (self.device_index or 0):
                torch.get_device_module(self.device_type).set_device(self.device_index or 0)

    def _restore_depth(self, depth: int) -> None:
        """Leave the autocast regions that nobody left: they would keep the weight cache, and old weights in it."""
        while depth > self.depth:
            depth = torch.autocast_decrement_nesting()
        while depth < self.depth:
            depth = torch.autocast_increment_nesting()
        if not depth:
            torch.clear_autocast_cache()


class fresh_modes:
    """The region of a run: torch's modes in it are as in a new program, whatever region it was entered in.

    Gradients are on for training and off for evaluation; training works within ``torch.inference_mode`` too. Autocast
    is off. Within an outer autocast region the run neither reads nor writes the weight cache, as that cache outlives
    the run: a weight cast under ``no_grad`` would cut the outer step's gradient. Nor is the cache cleared: the outer
    region goes on with the casts it has. (Only a ``torch.autocast`` made outside of the run and entered in it, or one
    that says ``cache_enabled=True``, has the cache.)

    On leaving, everything is put back, whatever the code inside has done to it.
    """

    __slots__ = ("_before", "_not_inference", "_train")

    def __init__(self, train: bool) -> None:
        self._train = train
        self._not_inference = torch.inference_mode(False) if train and torch.is_inference_mode_enabled() else None

    def __enter__(self) -> None:
        self._before = before = AmbientState.capture()
        if self._not_inference is not None:
            self._not_inference.__enter__()
        if self._train != before.grad or self._not_inference is not None:
            torch.set_grad_enabled(self._train)
        for device_type, enabled, dtype in before.autocast:
            if enabled:
                torch.set_autocast_enabled(device_type, False)
            default = _AUTOCAST_DTYPES.get(device_type, dtype)
            if before.depth and dtype != default:
                torch.set_autocast_dtype(device_type, default)
        if before.depth:
            torch.set_autocast_cache_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._not_inference is not None:
            self._not_inference.__exit__(kind, error, traceback)
        self._before.restore()


def _autocast_types(accelerator: str | None) -> tuple[str, ...]:
    if accelerator is None or not torch.amp.is_autocast_available(accelerator):
        return ("cpu",)
    return ("cpu", accelerator)


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def _autocast_depth() -> int:
    """Return how many autocast regions this thread is in: torch tells only the one who changes it."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
