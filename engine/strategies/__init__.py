"""The device-strategy layer: where a model runs, in what precision, on how many devices.

The one part of pellucid that knows of devices, autocast and parallel wrappers. It knows nothing of the engine.
"""

from .base import Strategy
from .selection import resolve
from .single import SingleDevice

__all__ = ["SingleDevice", "Strategy", "resolve"]
