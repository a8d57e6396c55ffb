"""What a model is made of, as a table."""

from __future__ import annotations

import html
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..engine import Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._monitor import require_number

__all__ = ["ModelSummary", "ModelSummaryRow"]

logger = logging.getLogger("pellucid.handlers")

_HEAD = ("module", "type", "output", "parameters", "trainable", "MiB")


@dataclass(frozen=True)
class ModelSummaryRow:
    """One module.

    Attributes:
        name: its name in the model, ``""`` for the whole.
        kind: its class.
        output: the shape of what it gives, if an example was given.
        parameters: how many numbers its parameters have, those of its sub-modules included and shared ones once;
            None where a lazy module has no shape yet.
        trainable: how many of them require a gradient.
        size_bytes: of parameters and buffers.
    """

    name: str
    kind: str
    output: str
    parameters: int | None
    trainable: int | None
    size_bytes: int | None


class ModelSummary(Attachable):
    """Log a table of the model's modules at the first start of a run, with parameters and sizes.

    The counts are of the whole model under every strategy, also where each rank holds a part of it. Only rank 0 logs.
    ``summary.rows`` and ``str(summary)`` have it too.

    Args:
        depth: down to which level of sub-modules; 1: the model's own children.
        example: a batch for the model, to see the shapes of what each module gives. The model is called with it once,
            ``model(example)`` or ``model(*example)`` for a tuple, in an inner run in evaluation mode: nothing of the
            run changes. On several ranks give it on all of them.

    Example:
        >>> ModelSummary(depth=2, example=torch.zeros(1, 3, 32, 32)).attach(trainer)
    """

    def __init__(self, depth: int = 1, *, example: Any = None) -> None:
        self._depth: int = require_number("depth", depth, least=0, whole=True)
        self._example = example
        self._rows: tuple[ModelSummaryRow, ...] = ()

    @property
    def rows(self) -> tuple[ModelSummaryRow, ...]:
        """The whole model first; empty before the first run."""
        return self._rows

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._look),)

    def _look(self, engine: Engine, batch: Any) -> None:
        if self._rows:
            return
        if engine.model is None:
            raise HandlerError("ModelSummary: the engine has no model: Engine(step, model)")
        shapes = self._shapes(engine) if self._example is not None else {}
        models = engine.model.items() if not isinstance(engine.model, nn.Module) else [("", engine.model)]
        self._rows = tuple(
            _row(name, module, shapes) for prefix, model in models for name, module in _down(prefix, model, self._depth)
        )
        if engine.state.rank == 0:
            logger.info("%s", self)

    def _shapes(self, engine: Engine) -> dict[int, str]:
        if not isinstance(engine.model, nn.Module):
            raise HandlerError("ModelSummary(example=...) is for one model, and the engine has a mapping of several")
        shapes: dict[int, str] = {}

        def note(module: nn.Module, given: Any, output: Any) -> None:
            shapes[id(module)] = _shape(output)

        hooks = [module.register_forward_hook(note) for module in engine.model.modules()]
        inner = engine.fork(_forward, mode="eval", name="model summary")
        try:
            inner.run([self._example])
        finally:
            for hook in hooks:
                hook.remove()
        return shapes

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self._rows:
            yield (row.name or "(model)", row.kind, row.output, _count(row.parameters), _count(row.trainable),
                   "?" if row.size_bytes is None else f"{row.size_bytes / 2**20:.2f}")  # fmt: skip

    def __str__(self) -> str:
        """Return the table as text."""
        if not self._rows:
            return repr(self)
        lines = [_HEAD, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        return "\n".join(
            "  ".join(cell.rjust(width) if column > 2 else cell.ljust(width)
                      for column, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines
        )  # fmt: skip

    def __repr__(self) -> str:
        """Show what is asked for."""
        return f"ModelSummary(depth={self._depth})"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in self._cells()
        )
        return f"<table><caption>{html.escape(repr(self))}</caption><tr>{head}</tr>{body}</table>"


def _forward(engine: Engine, batch: Any) -> None:
    engine.model(*batch) if isinstance(batch, tuple) else engine.model(batch)


def _down(prefix: str, module: nn.Module, depth: int) -> Iterator[tuple[str, nn.Module]]:
    yield prefix, module
    if depth:
        for name, child in module.named_children():
            yield from _down(f"{prefix}.{name}" if prefix else name, child, depth - 1)


def _row(name: str, module: nn.Module, shapes: dict[int, str]) -> ModelSummaryRow:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    kind = type(module).__name__.removeprefix("FSDP")  # sharding makes a subclass of this name
    output = shapes.get(id(module), "")
    if any(map(is_lazy, [*parameters, *buffers])):
        return ModelSummaryRow(name, kind, output, None, None, None)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    size = sum(tensor.numel() * tensor.element_size() for tensor in [*parameters, *buffers])
    return ModelSummaryRow(name, kind, output, _numbers(parameters), _numbers(trainable), size)


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _shape(output: Any) -> str:
    if isinstance(output, Tensor):
        return str(list(output.shape))
    if isinstance(output, list | tuple):
        return ", ".join(_shape(item) for item in output)
    return type(output).__name__


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
