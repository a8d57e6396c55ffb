"""Signals that several may listen to: one handler of the process for each, which is gone when nobody listens."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

__all__ = ["leave", "listen"]

Hear = Callable[[signal.Signals], None]

_listeners: dict[signal.Signals, list[Hear]] = {}
_before: dict[signal.Signals, Any] = {}


def listen(signals: Iterable[signal.Signals], hear: Hear) -> None:
    """Let ``hear`` be called with the signal when one of these comes. In the main thread only."""
    for one in signals:
        if one not in _listeners:
            _before[one] = signal.signal(one, _on_signal)
            _listeners[one] = []
        _listeners[one].append(hear)


def leave(hear: Hear) -> None:
    """Listen no more. Where that was the last listener, the signal does what it did before."""
    for one, listeners in list(_listeners.items()):
        if hear in listeners:
            listeners.remove(hear)
        if not listeners:
            del _listeners[one]
            _put_back(one, _before.pop(one))


def _put_back(one: signal.Signals, before: Any) -> None:
    if signal.getsignal(one) is _on_signal:  # nobody has put another in its place since
        signal.signal(one, signal.SIG_DFL if before is None else before)  # None: not installed by Python


def _on_signal(number: int, frame: FrameType | None) -> None:
    one = signal.Signals(number)
    for hear in tuple(_listeners.get(one, ())):
        hear(one)
