"""Stop a run in which a number is no longer finite."""

from __future__ import annotations

import cmath
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine import Engine, Events
from ._attachable import Attachable, Subscription
from ._monitor import require_number
from ._optimizers import is_nth_update, optimizers_of, parameters_of, the_updating

__all__ = ["TerminateOnNan"]

logger = logging.getLogger("pellucid.handlers")


def _whole(output: Any) -> Any:
    return output


class TerminateOnNan(Attachable):
    """Stop the run when the step's output, a recorded value or a gradient is NaN or infinite, and say which.

    What was found, and where, is logged and in :attr:`reason`. The host waits for the device once for each thing it
    looks at: an output, a record, the gradients of an update.

    Args:
        output: what of the step's output to look at, such as ``lambda output: output["loss"]``; by default all numbers
            and tensors in it, however nested. None: it is not looked at.
        records: look at what ``engine.record`` publishes.
        gradients: look at the gradients before each update. Those that are not finite are dropped, all of that update,
            so the update it stops at leaves the weights as they were. Not in precision ``"16-mixed"``, where such
            gradients are part of finding the loss scale and the update is skipped anyway.
        every: look at every n-th output, at every n-th update of an optimizer, and at a record if the last one looked
            at is as many iterations ago: that is how often the host waits.

    Example:
        >>> TerminateOnNan(every=10).attach(trainer)
    """

    def __init__(
        self,
        *,
        output: Callable[[Any], Any] | None = _whole,
        records: bool = True,
        gradients: bool = False,
        every: int = 1,
    ) -> None:
        if output is not None and not callable(output):
            raise TypeError(f"output={output!r}: a function of the step's output was wanted, or None")
        self._output = output
        self._looks_at_records = records
        self._looks_at_gradients = gradients
        self._every: int = require_number("every", every, least=1, whole=True)
        self._last_looked = -self._every  # the iteration of the last record looked at
        self._reason: str | None = None

    @property
    def reason(self) -> str | None:
        """What stopped the last run, or None."""
        return self._reason

    def attach(self, engine: Engine) -> TerminateOnNan:
        """Look at ``engine``'s numbers from now on, and return the handler itself.

        Raises:
            HandlerError: gradients are asked for and the engine makes no updates; it has this handler already.
        """
        if self._looks_at_gradients:
            optimizers_of(engine)
        return super().attach(engine)

    def subscriptions(self) -> Sequence[Subscription]:
        due: list[Subscription] = [(Events.STARTED, self._begin)]
        if self._output is not None:
            due.append((Events.ITERATION_COMPLETED(every=self._every), self._check_output))
        if self._looks_at_records:
            due.append((Events.METRICS_RECORDED, self._check_record))
        if self._looks_at_gradients:
            due.append((Events.UPDATE_STARTED, self._check_gradients))
        return due

    def _begin(self, engine: Engine, batch: Any) -> None:
        self._reason = None
        self._last_looked = engine.state.iteration - self._every

    def _check_output(self, engine: Engine, batch: Any) -> None:
        assert self._output is not None, "not subscribed without"
        self._check(engine, _numbers(self._output(engine.state.output), "the step's output"))

    def _check_record(self, engine: Engine, batch: Any) -> None:
        record = engine.state.last_record
        assert record is not None, "METRICS_RECORDED comes with a record"
        if self._last_looked != record.iteration < self._last_looked + self._every:
            return
        self._last_looked = record.iteration
        self._check(engine, _numbers(record.values.raw(), "the record"))

    def _check_gradients(self, engine: Engine, batch: Any) -> None:
        if engine.state.precision == "16-mixed" or not is_nth_update(engine, self._every):
            return
        held = [p for p in parameters_of(the_updating(engine)) if p.grad is not None]
        names = _parameter_names(engine.model)
        if self._check(engine, [(f"the gradient of {names.get(id(p), 'a parameter')}", p.grad) for p in held]):
            for parameter in held:
                parameter.grad = None

    def _check(self, engine: Engine, numbers: Sequence[tuple[str, Any]]) -> bool:
        flags = [_is_finite(value) for _, value in numbers]
        if _all(flags):  # waits for the device
            return False
        where = next(name for (name, _), flag in zip(numbers, flags, strict=True) if not flag)
        state = engine.state
        self._reason = f"{where} was not finite at iteration {state.iteration}, epoch {state.epoch}"
        logger.error("TerminateOnNan stops the run: %s", self._reason)
        engine.terminate()
        return True

    def __repr__(self) -> str:
        """Show what stopped the run, if anything did."""
        return f"TerminateOnNan(every={self._every}, reason={self._reason!r})"


def _numbers(value: Any, path: str, around: tuple[int, ...] = ()) -> list[tuple[str, Any]]:
    """Return the numbers, tensors and arrays in ``value`` with their places; what contains itself is seen once."""
    if isinstance(value, Tensor | float | complex) or hasattr(value, "__array__"):
        return [(path, value)]
    if id(value) in around:
        return []
    around = (*around, id(value))
    return [number for place, item in _items(value) for number in _numbers(item, path + place, around)]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))


def _is_finite(value: Any) -> bool | Tensor:
    """Return whether all is finite; of a tensor as a tensor on its device, without waiting."""
    if isinstance(value, float | complex):
        return cmath.isfinite(value)
    if not isinstance(value, Tensor):
        if value.dtype.kind not in "fc":
            return True
        value = torch.as_tensor(value)
    if value.is_sparse:
        value = value.coalesce().values()
    return torch.isfinite(value).all()


def _all(flags: Sequence[bool | Tensor]) -> bool:
    """Return whether all are true, waiting once for each device."""
    devices: dict[torch.device, list[Tensor]] = {}
    for flag in flags:
        if isinstance(flag, Tensor):
            devices.setdefault(flag.device, []).append(flag)
        elif not flag:
            return False
    return all(bool(torch.stack(on_one).all()) for on_one in devices.values())  # waits for the device


def _parameter_names(model: Any) -> dict[int, str]:
    parts = model.items() if isinstance(model, Mapping) else [("", model)]
    return {
        id(parameter): f"{part}.{name}" if part else name
        for part, module in parts
        if module is not None
        for name, parameter in module.named_parameters()
    }
