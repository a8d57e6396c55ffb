"""The errors of pellucid, one tree.

Every message says what came, what was wanted and what to do about it. Each error is also of the built-in type that
Python users would catch for its kind::

    PellucidError
    ├── StateError     (AttributeError)   a field of engine.state that is unknown or read-only
    ├── EventError     (ValueError)       an event that is unknown here, a filter that makes no sense
    ├── HandlerError   (TypeError)        a step or handler that cannot be called as (engine, batch)
    ├── ModelError     (TypeError)        not a module, or a module that is wrapped already
    ├── UpdateError    (RuntimeError)     backward, update and optimizers used wrongly
    ├── DataError      (ValueError)       empty data, an iterator that has run out
    ├── LimitError     (ValueError)       max_epochs, max_iters, epoch_length
    ├── RunError       (RuntimeError)     an engine started inside itself, a verb outside a run
    ├── RecordError    (ValueError)       a name or value that cannot be recorded
    ├── MetricError    (KeyError)         a metric name that nobody recorded
    ├── MonitorError   (LookupError)      a handler that watches a metric nobody records
    ├── CheckpointError (ValueError)      a state dictionary that does not fit
    └── StrategyError  (RuntimeError)     devices and strategies
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DataError",
    "EventError",
    "HandlerError",
    "LimitError",
    "MetricError",
    "ModelError",
    "MonitorError",
    "PellucidError",
    "RecordError",
    "RunError",
    "StateError",
    "StrategyError",
    "UpdateError",
]


class PellucidError(Exception):
    """The root of all errors that pellucid raises itself."""


class StateError(PellucidError, AttributeError):
    """A field of ``engine.state`` that does not exist, or that only the loop may write."""


class EventError(PellucidError, ValueError):
    """An event that this engine does not fire, or an event filter that makes no sense."""


class HandlerError(PellucidError, TypeError):
    """A step or handler that cannot be called as ``(engine, batch)``."""


class ModelError(PellucidError, TypeError):
    """A model that is no ``torch.nn.Module``, or one that is wrapped already."""


class UpdateError(PellucidError, RuntimeError):
    """``backward``, ``update`` or an optimizer used in a way that cannot train the model."""


class DataError(PellucidError, ValueError):
    """Data that is empty, has run out, or cannot be iterated."""


class LimitError(PellucidError, ValueError):
    """A limit of a run (``max_epochs``, ``max_iters``, ``epoch_length``) that makes no sense here."""


class RunError(PellucidError, RuntimeError):
    """An engine started inside itself, or a verb used where no run can take it."""


class RecordError(PellucidError, ValueError):
    """A metric name or value that ``engine.record`` cannot take."""


class MetricError(PellucidError, KeyError):
    """A metric name that nobody has recorded."""

    def __str__(self) -> str:
        """Return the message itself: ``KeyError`` would show its quoted representation."""
        return str(self.args[0]) if self.args else ""


class MonitorError(PellucidError, LookupError):
    """A handler that monitors a metric which nobody records."""


class CheckpointError(PellucidError, ValueError):
    """A state dictionary that does not fit the engine it is loaded into."""


class StrategyError(PellucidError, RuntimeError):
    """A device or strategy that does not exist or does not fit."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``": did you mean 'x'?"`` for the nearest of the ``known`` names, or a full stop if none is near."""
    folded = {one.casefold(): one for one in known}
    nearest = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f": did you mean {folded[nearest[0]]!r}?" if nearest else "."
