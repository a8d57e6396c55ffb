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
        ahead: for each batch that is drawn and not done, in a run that looks ahead, the random state before it.
    """

    batches: int
    drawn: bool
    opened: RandomState | None
    generators: GeneratorStates | None
    random: RandomState
    generators_now: GeneratorStates | None
    workers: bool
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
            "generators": None if self.generators is None else self.generators.state_dict(),
            "random": self.random.state_dict(),
            "generators_now": None if self.generators_now is None else self.generators_now.state_dict(),
            "workers": self.workers,
            "ahead": [moment.state_dict() for moment in self.ahead],
            "place_opened": to_plain("what the data's state_dict() returned", self.place_opened),
            "place": to_plain("what the data's state_dict() returned", self.place),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Position:
        """Return what ``state_dict`` was made of."""
        opened, generators, generators_now = state["opened"], state["generators"], state["generators_now"]
        return cls(
            batches=state["batches"],
            drawn=state["drawn"],
            opened=None if opened is None else RandomState.from_state_dict(opened),
            generators=None if generators is None else GeneratorStates.from_state_dict(generators),
            random=RandomState.from_state_dict(state["random"]),
            generators_now=None if generators_now is None else GeneratorStates.from_state_dict(generators_now),
            workers=state["workers"],
            ahead=tuple(Moment.from_state_dict(moment) for moment in state["ahead"]),
            place_opened=from_plain(state["place_opened"]),
            place=from_plain(state["place"]),
            is_saved=True,
        )
