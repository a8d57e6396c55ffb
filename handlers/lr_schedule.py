"""Learning-rate schedules: torch's and Ignite's, moved by real updates, epochs or a score."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

from ignite.handlers.param_scheduler import ParamGroupScheduler, ParamScheduler, ReduceLROnPlateauScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..engine import CheckpointError, Engine, Events, HandlerError
from ._attachable import Attachable, Subscription
from ._monitor import Monitor, require_number
from ._optimizers import metric_name, metric_patterns, optimizers_of, rates_of, set_rates, the_updating

__all__ = ["LRSchedule"]

Scheduler = LRScheduler | ParamScheduler | ParamGroupScheduler
Every = Literal["update", "epoch"]


class LRSchedule(Attachable):
    """Move a schedule of learning rates: one step after each real update of its optimizer, or after each epoch.

    The first update uses the schedule's first rate. An update that the loss scale skips moves nothing, nor does an
    epoch before the first real update. With accumulation a window is one update, so one step.

    Args:
        scheduler: any scheduler of ``torch.optim.lr_scheduler``; Ignite's ``ParamScheduler`` and what
            ``create_lr_scheduler_with_warmup`` returns; or a factory ``optimizer -> scheduler``, called when the
            handler is attached.
        every: ``"update"`` (the default) or ``"epoch"``. A ``ReduceLROnPlateau`` moves when ``monitor`` is recorded.
        monitor: the recorded metric of a ``ReduceLROnPlateau``; its ``mode`` is the scheduler's. Reading it waits for
            the device. NaN and infinity are never an improvement.
        warmup: so many updates, before the schedule begins, rise linearly to its first rate: update ``i`` (from 0) has
            ``warmup_start + (1 - warmup_start) * i / warmup`` of it.
        warmup_start: the factor of the first update of the warm-up.
        record: the name to record the rate under, such as ``"lr"``: the rate that was in use, each time before it may
            change. Where the engine has a mapping of optimizers or the optimizer several groups, it is recorded as
            ``"generator/lr"``, ``"group1/lr"``, ``"generator/group1/lr"``.
        optimizer: the name of the optimizer, for a factory in an engine with several.
        first_epoch: the epoch by whose end ``monitor`` must have been recorded; else it is an error.

    Raises:
        HandlerError: what ``scheduler`` is cannot be moved so.

    Example:
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR
        >>> LRSchedule(CosineAnnealingLR(optimizer, T_max=20), warmup=5).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=2)
    """

    def __init__(
        self,
        scheduler: Scheduler | Callable[[Optimizer], Scheduler],
        *,
        every: Every | None = None,
        monitor: str | None = None,
        warmup: int = 0,
        warmup_start: float = 0.01,
        record: str | None = None,
        optimizer: str | None = None,
        first_epoch: int = 1,
    ) -> None:
        if every is not None and (every not in get_args(Every) or monitor is not None):
            raise ValueError(f"every={every!r}: 'update' or 'epoch' was wanted, or nothing where monitor= is given")
        if not isinstance(scheduler, Scheduler) and not callable(scheduler):
            raise HandlerError(f"scheduler: one of torch, of Ignite, or a factory was wanted, got {scheduler!r}")
        self._every = every or "update"
        self._monitored = monitor
        self._first_epoch = first_epoch
        self._monitor: Monitor | None = None
        self._warmup: int = require_number("warmup", warmup, least=0, whole=True)
        self._start: float = require_number("warmup_start", warmup_start, least=0)
        self._record = record
        self._only = optimizer
        self._factory = scheduler
        self._scheduler: Scheduler | None = None
        self._has_begun = False
        self._is_resumed = False  # and has not moved since
        self._warmed = 0  # updates of the warm-up that have been made
        self._full_rates: list[float] = []  # those the warm-up rises to
        if isinstance(scheduler, Scheduler):
            self._take(scheduler)

    def _take(self, scheduler: Scheduler) -> None:
        _check_scheduler(scheduler, self._monitored)
        self._scheduler = scheduler
        self._optimizer = _optimizer_of(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            self._monitor = Monitor(str(self._monitored), mode=scheduler.mode, first_epoch=self._first_epoch)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of torch or Ignite that is moved.

        Raises:
            HandlerError: a factory makes it, and the handler has not been attached yet.
        """
        if self._scheduler is None:
            raise HandlerError(f"{self!r} has no scheduler yet: its factory is called when it is attached")
        return self._scheduler

    @property
    def rates(self) -> tuple[float, ...]:
        """The present learning rate of each parameter group."""
        return tuple(rates_of(_optimizer_of(self.scheduler)))

    @property
    def records(self) -> tuple[str, ...]:
        """The names it records, as patterns."""
        return () if self._record is None else metric_patterns(self._record)

    def attach(self, engine: Engine) -> LRSchedule:
        """Move the schedule with ``engine``'s updates from now on, and return the handler itself.

        Raises:
            HandlerError: the schedule belongs to no optimizer of this engine, or is attached to it already.
        """
        if not self._is_attached(engine):
            optimizers = optimizers_of(engine, self._only)
            if self._scheduler is None:
                self._take(self._make(optimizers))
            _check_belongs(self._optimizer, optimizers, self._only)
            self._begin(engine)
        return super().attach(engine)

    def _make(self, optimizers: Mapping[str, Optimizer]) -> Scheduler:
        names = list(optimizers) if self._only is None else [self._only]
        if len(names) > 1:
            raise HandlerError(f"this engine has the optimizers {names}: say which one the factory is for, optimizer=")
        assert not isinstance(self._factory, Scheduler), "a scheduler is taken at once"
        scheduler = self._factory(optimizers[names[0]])
        if not isinstance(scheduler, Scheduler):
            raise HandlerError(f"the factory must return a scheduler of torch or Ignite, got {scheduler!r}")
        return scheduler

    def _begin(self, engine: Engine) -> None:
        """Set the first rate. Torch's schedulers have done so when they were made, Ignite's do when first called."""
        if self._has_begun:
            return
        self._has_begun = True
        if not isinstance(self._scheduler, LRScheduler):
            self._move(engine)
        self._full_rates = rates_of(self._optimizer)
        if self._warmup:
            self._warm_up()

    def subscriptions(self) -> Sequence[Subscription]:
        if self._monitor is not None:
            moves: Sequence[Subscription] = ((Events.METRICS_RECORDED, self._judge), *self._monitor.subscriptions())
        else:
            moves = ((Events.EPOCH_COMPLETED, self._end_epoch),) if self._every == "epoch" else ()
        return ((Events.UPDATE_COMPLETED, self._end_update), *moves)

    def _end_update(self, engine: Engine, batch: Any) -> None:
        if the_updating(engine) is not self._optimizer:
            return
        if self._warmed < self._warmup:
            self._record_rates(engine)
            self._warmed += 1
            self._warm_up()
        elif self._every == "update" and self._monitor is None:
            self._record_rates(engine)
            self._move(engine)

    def _warm_up(self) -> None:
        if self._warmed == self._warmup:
            set_rates(self._optimizer, self._full_rates)
            return
        factor = self._start + (1 - self._start) * self._warmed / self._warmup
        set_rates(self._optimizer, [factor * rate for rate in self._full_rates])

    def _end_epoch(self, engine: Engine, batch: Any) -> None:
        has_updated = engine.state.updates_by_optimizer[self._name(engine)] > 0
        if has_updated and self._warmed == self._warmup:
            self._record_rates(engine)
            self._move(engine)

    def _judge(self, engine: Engine, batch: Any) -> None:
        assert self._monitor is not None, "only a plateau schedule listens to records"
        value = self._monitor.read(engine)  # waits for the device
        if value is not None:
            # ranks that judge differently would train with different rates from here on
            value = engine.strategy.broadcast(value)
        if value is None or self._warmed < self._warmup:
            return
        self._record_rates(engine)
        worst = math.inf if self._monitor.mode == "min" else -math.inf
        self._move(engine, value if math.isfinite(value) else worst)

    def _move(self, engine: Engine, *score: float) -> None:
        scheduler = self._scheduler
        if isinstance(scheduler, LRScheduler):
            with _no_false_alarm() if self._is_resumed else nullcontext():
                scheduler.step(*score)  # type: ignore[arg-type]  # a plateau schedule takes its score
            self._is_resumed = False
        elif scheduler is not None:
            scheduler(engine.ignite)

    def _name(self, engine: Engine) -> str:
        return next(name for name, optimizer in optimizers_of(engine).items() if optimizer is self._optimizer)

    def _record_rates(self, engine: Engine) -> None:
        if self._record is None:
            return
        groups = self._optimizer.param_groups
        names = [self._record] if len(groups) == 1 else [f"group{i}/{self._record}" for i in range(len(groups))]
        names = [metric_name(engine, self._name(engine), name) for name in names]
        engine.record({name: group["lr"] for name, group in zip(names, groups, strict=True)})

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, where the warm-up stands and the present rates, as plain values."""
        return {
            "scheduler": copy.deepcopy(dict(self.scheduler.state_dict())),
            "has_begun": self._has_begun,
            "warmed": self._warmed,
            "full_rates": list(self._full_rates),
            "rates": list(self.rates),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of an earlier ``state_dict()``, and set the optimizer's rates to those it had.

        Raises:
            CheckpointError: other keys than that has, or another number of parameter groups.
            HandlerError: a factory makes the scheduler, and the handler has not been attached yet.
        """
        wanted = self.state_dict()
        if set(state_dict) != set(wanted):
            raise CheckpointError(f"LRSchedule: the keys {sorted(wanted)} were wanted, got {sorted(state_dict)}")
        if len(state_dict["rates"]) != len(wanted["rates"]):
            raise CheckpointError(
                f"LRSchedule: the optimizer has {len(wanted['rates'])} parameter groups, and the state is of one with "
                f"{len(state_dict['rates'])}"
            )
        self.scheduler.load_state_dict(copy.deepcopy(state_dict["scheduler"]))  # some take keys out of what they load
        self._has_begun, self._is_resumed = bool(state_dict["has_begun"]), True
        self._warmed = int(state_dict["warmed"])
        if self._monitor is not None:  # every record is a step of the scheduler's
            self._monitor.has_come = getattr(self.scheduler, "last_epoch", 0) > 0
        self._full_rates = list(state_dict["full_rates"])
        set_rates(self._optimizer, state_dict["rates"])

    def __repr__(self) -> str:
        """Show what is moved, and when."""
        what = "factory" if self._scheduler is None else type(self._scheduler).__name__
        when = f"every={self._every!r}" if self._monitored is None else f"monitor={self._monitored!r}"
        return f"LRSchedule({what}, {when}{f', warmup={self._warmup}' if self._warmup else ''})"


@contextmanager
def _no_false_alarm() -> Iterator[None]:
    """Let torch not warn that no update came before: there was one, in the process that is gone on from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
        yield


def _check_scheduler(scheduler: Scheduler, monitor: str | None) -> None:
    if isinstance(scheduler, ReduceLROnPlateauScheduler):
        raise HandlerError("Ignite's ReduceLROnPlateauScheduler: give torch's ReduceLROnPlateau, and monitor=")
    is_plateau = isinstance(scheduler, ReduceLROnPlateau)
    if is_plateau and monitor is None:
        raise HandlerError("a ReduceLROnPlateau moves by a score: give monitor=, the name of a recorded metric")
    if monitor is not None and not is_plateau:
        raise HandlerError(f"monitor={monitor!r} is for a ReduceLROnPlateau, and {scheduler!r} looks at no score")
    for part in (scheduler, *getattr(scheduler, "schedulers", ())):
        if not isinstance(getattr(part, "lr_scheduler", scheduler), Scheduler):
            # Ignite 0.5.5 wraps CosineAnnealingWarmRestarts in a class without a state_dict
            raise HandlerError(f"Ignite's {part!r} could not be saved: give torch's scheduler itself, and warmup=")


def _optimizer_of(scheduler: Scheduler) -> Optimizer:
    found = scheduler.optimizer
    optimizers: list[Optimizer] = found if isinstance(found, list) else [found]
    if any(optimizer is not optimizers[0] for optimizer in optimizers):
        raise HandlerError(f"{scheduler!r} is of several optimizers: give each optimizer a schedule of its own")
    return optimizers[0]


def _check_belongs(optimizer: Optimizer, optimizers: Mapping[str, Optimizer], only: str | None) -> None:
    names = [name for name, one in optimizers.items() if one is optimizer]
    if not names or only not in (None, *names):
        wanted = "of any of the engine's optimizers" if only is None else f"of the optimizer {only!r}"
        raise HandlerError(
            f"the scheduler is not {wanted}, so it would change nothing: make it from the engine's own "
            f"(engine.optimizer), or give a factory optimizer -> scheduler"
        )
