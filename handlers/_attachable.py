"""What all handlers share, yours too: how they are attached to an engine and come off again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..engine import Engine, EventLike, Handler, HandlerError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Attachable", "StatefulHandler", "Subscription"]

Subscription = tuple[EventLike, Handler]


class Attachable(ABC):
    """What a handler with settings or a state derives from: its methods listen to events of an engine.

    It keeps no reference to the engine, which is passed in with every event. With ``state_dict`` and
    ``load_state_dict`` it is saved and resumed with the engine's checkpoints.

    A handler that records metrics has an attribute ``records``: the names it will record. Patterns are allowed
    (``"val/*"``). Whoever monitors one of these waits for it.
    """

    @abstractmethod
    def subscriptions(self) -> Sequence[Subscription]:
        """Return the events this handler listens to, and the method for each: pairs ``(event, self.method)``."""

    def last_subscriptions(self) -> Sequence[Subscription]:
        """Return those of its methods that are called after all other handlers of their event."""
        return ()

    def attach(self, engine: Engine) -> Self:
        """Listen to ``engine``'s events, and return the handler itself.

        Raises:
            HandlerError: no engine, or one that it is attached to already.
        """
        if not isinstance(engine, Engine):
            raise HandlerError(
                f"{type(self).__name__} attaches to an Engine, got {type(engine).__name__}: {engine!r}. "
                "(engine.ignite is for Ignite's own components.)"
            )
        if self._is_attached(engine):
            raise HandlerError(f"{self!r} is attached to this engine already, and would do everything twice")
        for event, method in self.subscriptions():
            engine.add_event_handler(event, method)
        for event, method in self.last_subscriptions():
            engine.add_event_handler(event, method, last=True)
        return self

    def detach(self, engine: Engine) -> None:
        """Listen to ``engine`` no more.

        Raises:
            HandlerError: it is not attached to this engine.
        """
        if not self._is_attached(engine):
            raise HandlerError(f"{self!r} is not attached to this engine, so it cannot be detached from it")
        for event, method in (*self.subscriptions(), *self.last_subscriptions()):
            engine.remove_event_handler(method, event)

    def _is_attached(self, engine: Engine) -> bool:
        return any(other is self for other in engine.attached())


@runtime_checkable
class StatefulHandler(Protocol):
    """What is attached to an engine and has a state that is saved and resumed with it, derived from what it will.

    :func:`pellucid.handlers.testing.check_handler` takes these, and those without a state too.
    """

    def attach(self, engine: Engine) -> Any:
        """Listen to ``engine``'s events, and return the handler itself."""

    def detach(self, engine: Engine) -> None:
        """Listen to ``engine`` no more."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state as tensors, numbers, texts, lists and dicts."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Take up a state that ``state_dict`` returned."""
