"""Which values of a step's output are meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..engine import MonitorError

__all__ = ["Output", "check_output", "select_output"]

Output = Callable[[Any], Mapping[str, Any]] | Sequence[str] | str | None


def check_output(output: Any) -> Callable[[Any], Mapping[str, Any]] | tuple[str, ...]:
    """Return the function that picks values out of the output, or the names of the values.

    Raises:
        TypeError: something else.
    """
    if output is None:
        return ()
    if callable(output):
        return output  # type: ignore[no-any-return]
    names = (output,) if isinstance(output, str) else output
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"output={output!r}: names of values in the step's output were wanted, such as 'loss' or ['loss', 'norm'], "
            "or a function of the output that returns names and numbers"
        )
    return tuple(names)


def select_output(wanted: Callable[[Any], Mapping[str, Any]] | tuple[str, ...], output: Any) -> Mapping[str, Any]:
    """Return the wanted values: by key out of a mapping, by place out of a tuple or list, else the value itself.

    Raises:
        MonitorError: the output does not have them, or the function returned no mapping.
    """
    if callable(wanted):
        selected = wanted(output)
        if not isinstance(selected, Mapping):
            raise MonitorError(
                f"output={wanted!r} returned {selected!r}: a mapping of names to numbers was wanted, such as "
                '{"loss": output}'
            )
        return selected
    if isinstance(output, Mapping):
        missing = [name for name in wanted if name not in output]
        if missing:
            raise MonitorError(f"output={list(wanted)!r}: the step's output has no {missing}, it has {list(output)}")
        return {name: output[name] for name in wanted}
    values = output if isinstance(output, tuple | list) else (output,)
    if len(values) != len(wanted):
        raise MonitorError(f"output={list(wanted)!r}: as many values were wanted, the step returned {len(values)}")
    return dict(zip(wanted, values, strict=True))
