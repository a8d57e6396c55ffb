"""The state of an optimizer: what it is compared by, and how it is loaded with the dtypes it was saved with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .errors import CheckpointError
from .nested import map_nested
from .strategies import Strategy

__all__ = ["check_optimizer", "load_optimizer", "made_of"]


def made_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's class and what its parameters are called, in its order.

    Args:
        optimizer: any.
        names: what each parameter is called, by its id; one of no model is not among them.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {"class": type(optimizer).__qualname__, "parameters": [names.get(id(one)) for one in held]}


def check_optimizer(name: str, optimizer: Optimizer, saved: Any, made: Mapping[str, Any], was: Any, where: Any) -> None:
    """Compare a saved state with the optimizer it is to go into.

    Args:
        name: the optimizer's.
        optimizer: here.
        saved: its state.
        made: what ``made_of`` says of it.
        was: what ``made_of`` said of the one that was saved.
        where: the checkpoint, for the message.

    Raises:
        CheckpointError: it does not fit.
    """
    if not _makes_sense(saved) or not isinstance(was, Mapping) or set(was) != set(made):
        raise CheckpointError(f"{where} was written by hand or is damaged: {name!r} has no state of an optimizer")
    if was["class"] != made["class"]:
        raise CheckpointError(
            f"optimizer {name!r} in {where} is of the class {was['class']}, and this engine's is a {made['class']}: "
            "make it as it was; load_weights(model, path) takes the weights alone, and begins a new run"
        )
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise CheckpointError(
            f"optimizer {name!r} in {where} has parameter groups of {there} parameters, and this engine's has {here}: "
            "make it as it was when it was saved"
        )
    for place, (one, other) in enumerate(zip(was["parameters"], made["parameters"], strict=True)):
        if one != other:
            raise CheckpointError(
                f"optimizer {name!r} in {where} has the parameter {one!r} at place {place}, and this engine's has "
                f"{other!r} there: give it the parameters in the order they had"
            )


def _makes_sense(saved: Any) -> bool:
    try:
        numbers = {number for group in saved["param_groups"] for number in group["params"]}
        # under other keys than a parameter's number an optimizer keeps what belongs to none
        return all(
            not isinstance(key, int) or (key in numbers and isinstance(values, Mapping))
            for key, values in saved["state"].items()
        )
    except (LookupError, TypeError, AttributeError):
        return False


def load_optimizer(optimizer: Optimizer, saved: Mapping[str, Any], strategy: Strategy | None) -> None:
    """Load a state as it was saved: torch alone would give it the dtype of the parameters, and take texts apart.

    Args:
        optimizer: that it fits.
        saved: its state dictionary, the tensors whole.
        strategy: takes this rank's part of each tensor; None: they are parts already.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip(numbers, held, strict=True))
    state = dict(saved["state"])
    if strategy is not None:
        state |= {key: _parts_like(state[key], parameters[key], strategy) for key in state.keys() & parameters.keys()}
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    for key in state.keys() & parameters.keys():
        loaded = optimizer.state[parameters[key]]
        for name, value in state[key].items():
            if not _is_as_saved(loaded.get(name), value):
                loaded[name] = _brought(value, loaded.get(name), parameters[key])


def _parts_like(values: Mapping[str, Any], parameter: Tensor, strategy: Strategy) -> dict[str, Any]:
    return {
        key: strategy.part_like(value, parameter) if isinstance(value, Tensor) else value
        for key, value in values.items()
    }


def _is_as_saved(loaded: Any, saved: Any) -> bool:
    if isinstance(saved, Tensor):
        return isinstance(loaded, Tensor) and loaded.dtype == saved.dtype
    return type(loaded) is type(saved) and isinstance(saved, bool | int | float | None)


def _brought(value: Any, loaded: Any, parameter: Tensor) -> Any:
    device = loaded.device if isinstance(loaded, Tensor) else parameter.device
    return map_nested(value, lambda tensor: tensor.to(device))
