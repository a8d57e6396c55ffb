"""Outputs taken apart by sample: tensors under names, on the host, and put together again as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..engine import DataError

__all__ = ["Kept", "Layout", "concatenate", "keep"]

_REMEDY = "Predictions(transform=...), a function of the step's output, chooses what is kept"


class Layout(NamedTuple):
    """What an output is made of."""

    kind: Literal["tensor", "tuple", "mapping"]
    names: tuple[str, ...]

    def put_together(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return a tensor, a tuple or a dict, as the outputs were."""
        if self.kind == "tensor":
            return tensors[self.names[0]]
        if self.kind == "tuple":
            return tuple(tensors[name] for name in self.names)
        return {name: tensors[name] for name in self.names}


class Kept(NamedTuple):
    """What is kept of some samples: by name, tensors on the host whose first dimension is the samples."""

    layout: Layout
    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def part(self, begin: int, end: int) -> Kept:
        """Return some of the samples. Shares memory with all."""
        return Kept(self.layout, {name: tensor[begin:end] for name, tensor in self.tensors.items()})


def keep(output: Any) -> Kept:
    """Return a copy of an output on the host. Waits for the device.

    Raises:
        DataError: it is no tensor, tuple or mapping of tensors with as many samples each.
    """
    layout, tensors = _named(output)
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DataError(f"{_place(layout, name)} is a {type(tensor).__name__}: a tensor was wanted. {_REMEDY}")
        if tensor.dim() == 0:
            raise DataError(
                f"{_place(layout, name)} is a single number: a tensor was wanted whose first dimension is the samples. "
                f"{_REMEDY}"
            )
    counts = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(counts.values())) != 1:
        raise DataError(
            f"the step's output has {counts} samples: tensors with as many samples each were wanted. {_REMEDY}"
        )
    return Kept(layout, {name: _on_host(tensor) for name, tensor in tensors.items()})


def concatenate(parts: Sequence[Kept]) -> Kept:
    """Return all samples of at least one part as one.

    Raises:
        DataError: the parts differ in what they are made of.
    """
    layout = parts[0].layout
    differing = next((part for part in parts if part.layout != layout), None)
    if differing is not None:
        raise DataError(f"the outputs of the step differ: one was {layout}, another {differing.layout}. {_REMEDY}")
    return Kept(layout, {name: _joined(layout, name, [part.tensors[name] for part in parts]) for name in layout.names})


def _joined(layout: Layout, name: str, tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors:
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise DataError(
                f"{_place(layout, name)} is {_described(first)} in one batch and {_described(tensor)} in another: "
                f"samples of one shape and dtype were wanted. {_REMEDY}, such as padded ones"
            )
    return torch.cat(list(tensors))


def _named(output: Any) -> tuple[Layout, dict[str, Any]]:
    if isinstance(output, Mapping) and output:
        return Layout("mapping", tuple(map(str, output))), {str(name): value for name, value in output.items()}
    if isinstance(output, tuple | list) and output:
        names = tuple(map(str, range(len(output))))
        return Layout("tuple", names), dict(zip(names, output, strict=True))
    return Layout("tensor", ("output",)), {"output": output}


def _place(layout: Layout, name: str) -> str:
    if layout.kind == "tensor":
        return "the step's output"
    return f"output[{name}]" if layout.kind == "tuple" else f"output[{name!r}]"


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape[1:])} of {tensor.dtype}"


def _on_host(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu()  # waits for the device
    if tensor.device.type == "cpu":  # the step may write into it again, and it may be a small part of a large one
        return host.clone(memory_format=torch.contiguous_format)
    return host.contiguous()
