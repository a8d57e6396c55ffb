"""Look closely at some iterations with torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from ..engine import Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._monitor import require_number

__all__ = ["Profile"]


class Profile(Attachable):
    """Profile some iterations with ``torch.profiler`` and write traces for Perfetto (ui.perfetto.dev) or Chrome.

    In each run: ``wait`` iterations pass by, ``warmup`` are measured and thrown away, ``active`` are kept, and that
    ``repeat`` times. Each time leaves a file ``rank0_iteration12.json`` on each rank, named by its last iteration.
    What is kept when a run ends early, in an error too, is written as well.

    Args:
        directory: where the traces go.
        wait: iterations before the profiler warms up.
        warmup: iterations for the profiler's own start, whose first moments are slower.
        active: iterations that are kept.
        repeat: how often; 0: to the end of the run.
        activities: what is measured; None: the host, and the accelerator if there is one.
        record_shapes: keep the shapes of the operators' inputs.
        profile_memory: measure what is allocated.
        with_stack: keep where in the source each operator was called.

    Example:
        >>> profile = Profile("runs/profile", wait=3, active=3).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=1)
        >>> print(profile.table())
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        activities: Iterable[ProfilerActivity] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self.directory = Path(directory)
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 1), ("active", active, 1)):
            require_number(name, value, least=least, whole=True)
        require_number("repeat", repeat, least=0, whole=True)
        self._schedule = schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
        self._activities = None if activities is None else tuple(activities)
        if self._activities is not None and not all(isinstance(one, ProfilerActivity) for one in self._activities):
            raise TypeError(f"activities={self._activities!r}: values of torch.profiler.ProfilerActivity were wanted")
        self._options: Any = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: profile | None = None
        self._averages: Any = None
        self._at: tuple[int, int] = (0, 0)
        self._traces: list[Path] = []

    @property
    def traces(self) -> tuple[Path, ...]:
        """The files that were written on this rank in the last run."""
        return tuple(self._traces)

    def table(self, *, sort_by: str = "self_cpu_time_total", row_limit: int = 20) -> str:
        """Return the operators of the last kept iterations as a table, the most expensive first.

        Raises:
            HandlerError: nothing was kept yet.
        """
        if self._averages is None:
            raise HandlerError(f"{self!r} has kept nothing yet: run more than wait + warmup iterations")
        return str(self._averages.table(sort_by=sort_by, row_limit=row_limit))

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._start),)

    def last_subscriptions(self) -> Sequence[Subscription]:
        ends = Events.TERMINATE | Events.INTERRUPT | Events.COMPLETED | Events.EXCEPTION_RAISED
        return ((Events.ITERATION_COMPLETED, self._step), (ends, self._stop))

    def _start(self, engine: Engine, batch: Any) -> None:
        self._stop(engine, batch)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._traces = []
        self._at = engine.state.rank, engine.state.iteration
        self._profiler = profile(
            activities=self._activities or _activities(),
            schedule=self._schedule,
            on_trace_ready=self._keep,
            acc_events=True,
            **self._options,
        )
        self._profiler.start()

    def _step(self, engine: Engine, batch: Any) -> None:
        if self._profiler is not None:
            self._at = engine.state.rank, engine.state.iteration
            self._profiler.step()

    def _keep(self, profiler: profile) -> None:
        rank, iteration = self._at
        path = self.directory / f"rank{rank}_iteration{iteration}.json"
        profiler.export_chrome_trace(str(path))
        self._traces.append(path)
        self._averages = profiler.key_averages()

    def _stop(self, engine: Engine, batch: Any) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def __repr__(self) -> str:
        """Show where the traces go."""
        return f"Profile({str(self.directory)!r}, {len(self._traces)} traces)"


def _activities() -> list[ProfilerActivity]:
    accelerator = torch.accelerator.current_accelerator()
    own = None if accelerator is None else getattr(ProfilerActivity, accelerator.type.upper(), None)
    return [ProfilerActivity.CPU] if own is None else [ProfilerActivity.CPU, own]
