"""Where a training run stands in its data: what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plain import from_plain, to_plain
from .rng import GeneratorStates, Moment, RandomState

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """Where a training run stands in its data, as a checkpoint holds it.

    Attributes:
        batches: how many batches of the pass are done; 0 also when no pass has been opened.
        drawn: whether one thing more was drawn: a batch that is not done or could not be made, or the end of the data.
        opened: the random state when the pass was opened, None when none was.
        generators: the states of the data's own generators at that moment.
        random: the random state now.
        generators_now: the states of the data's own generators now; None where drawing a batch has failed half-way.
        workers: whether persistent workers are there already when the pass is opened: a loader with new ones draws a
            seed for them.
        place_opened: of data that says itself where it stands, what it said when the pass was opened.
        place: what it says now; None where more was drawn than is done.
        is_saved: it comes from a state dictionary, so the data was built anew.
        asked: of data that a callable makes, the states of the generators that the callable keeps, before it was asked.
        asks: those states now.
        ahead: for each batch that is drawn and not done, in a run that looks ahead, the random state before it.
    """

    batches: int
    drawn: bool
    opened: RandomState | None
    generators: GeneratorStates | None
    random: RandomState
    generators_now: GeneratorStates | None
    workers: bool
    asked: GeneratorStates | None = None
    asks: GeneratorStates | None = None
    ahead: tuple[Moment, ...] = ()
    place_opened: Any = None
    place: Any = None
    is_saved: bool = False

    @classmethod
    def between_passes(cls) -> Position:
        """Return the position of a run that is inside no pass."""
        return cls(0, False, None, None, RandomState(), GeneratorStates(None), workers=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as tensors and plain numbers."""
        return {
            "batches": self.batches,
            "drawn": self.drawn,
            "opened": None if self.opened is None else self.opened.state_dict(),
            "random": self.random.state_dict(),
            **{name: None if states is None else states.state_dict() for name, states in self._generators().items()},
            "workers": self.workers,
            "ahead": [moment.state_dict() for moment in self.ahead],
            "place_opened": to_plain("what the data's state_dict() returned", self.place_opened),
            "place": to_plain("what the data's state_dict() returned", self.place),
        }

    def _generators(self) -> dict[str, GeneratorStates | None]:
        return {
            "generators": self.generators,
            "generators_now": self.generators_now,
            "asked": self.asked,
            "asks": self.asks,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Position:
        """Return what ``state_dict`` was made of."""
        opened = state["opened"]

        def generators(name: str) -> GeneratorStates | None:
            return None if state[name] is None else GeneratorStates.from_state_dict(state[name])

        return cls(
            batches=state["batches"],
            drawn=state["drawn"],
            opened=None if opened is None else RandomState.from_state_dict(opened),
            generators=generators("generators"),
            random=RandomState.from_state_dict(state["random"]),
            generators_now=generators("generators_now"),
            asked=generators("asked"),
            asks=generators("asks"),
            workers=state["workers"],
            ahead=tuple(Moment.from_state_dict(moment) for moment in state["ahead"]),
            place_opened=from_plain(state["place_opened"]),
            place=from_plain(state["place"]),
            is_saved=True,
        )
