"""``Engine``: a step, a model and an optimizer, run over data, with events around it.

It composes the parts and owns their order: the loop fires events and counts, ``nesting`` puts back what an inner run
touches, ``data`` knows where the run stands, ``updates`` steps and counts, the strategy knows devices. The events of a
run, in the order in which they fire::

    STARTED
      EPOCH_STARTED                      then the data is opened
        GET_BATCH_STARTED
        GET_BATCH_COMPLETED              the batch is on engine.device
        ITERATION_STARTED
          step(engine, batch)            BACKWARD_COMPLETED, UPDATE_STARTED, UPDATE_COMPLETED as it asks for them
        ITERATION_COMPLETED
      DATALOADER_STOP_ITERATION          the data has ended
      EPOCH_COMPLETED
    COMPLETED

``METRICS_RECORDED`` fires inside whatever calls ``engine.record``; TERMINATE_SINGLE_EPOCH, TERMINATE, INTERRUPT and
EXCEPTION_RAISED where a stop takes effect (``docs/stopping.md`` has the table).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._loop import IgniteLoop
from .attaching import calling_place, check_signature, replaced_by
from .checkpoint import load_engine, save_engine
from .course import Course, in_use_around
from .describe import Description
from .display import table
from .errors import EventError, HandlerError, RecordError, RunError, UpdateError, suggestion
from .events import Events, check_custom_event, event_name, find_event, split_events
from .limits import Limits
from .metrics import attach_metrics
from .nested import detach
from .nesting import active, refuse_reentry, run_scope
from .optimizers import build_optimizers
from .records import Announcements, MetricsView, Record, check_record
from .shares import make_shards
from .state import RunStatus, StateSnapshot, StateView, check_declared
from .strategies import Strategy, resolve
from .strategies.base import modules_of
from .strategies.wrapping import check_model
from .table import CallWatcher, Handle, Registration
from .updates import Updates

__all__ = ["Engine", "Handler", "Step"]

Model = nn.Module | Mapping[str, nn.Module] | None
_H = TypeVar("_H", bound=Callable[..., Any])
_log = logging.getLogger("pellucid.engine")


class Step(Protocol):
    """What an engine does with each batch; what it returns is ``engine.state.output``."""

    def __call__(self, engine: Engine, batch: Any, /) -> Any:
        """Take one batch."""


class Handler(Protocol):
    """What is called when an event fires; what it returns is not looked at."""

    def __call__(self, engine: Engine, batch: Any, /) -> Any:
        """Act on the event. ``batch`` is the batch in work, None outside an iteration."""


class Engine:
    """Runs ``step(engine, batch)`` over data, firing events around it.

    Args:
        step: called as ``step(engine, batch)`` for every batch; what it returns is ``engine.state.output``.
        model: a module, a mapping of modules, or None. ``engine.model`` is this very object, always.
        optimizer: an optimizer, a factory ``params -> optimizer``, or a mapping of either.
        strategy: where the model runs: ``"auto"`` (``"ddp"`` where there are several processes, else ``"single"``; a
            model that is under a strategy keeps it), ``"single"``, ``"ddp"``, ``"fsdp"``, ``"dp"``, or a
            :class:`Strategy`. Within several processes ``"single"`` is this rank alone.
        mode: ``"train"``, or ``"eval"``: no gradients, every module in eval mode during the run and put back after it.
        metrics: name -> Ignite or torchmetrics metric, computed over the outputs of an epoch and recorded at its end.
        state: fields of ``engine.state`` that steps and handlers may write, with their first values.
        gradient_accumulation_steps: batches that make one update. A window never crosses an epoch's end; the last one
            may be shorter, and each update has the mean gradient of what is really in its window.
        name: what the engine is called in messages, bars and logs; its mode if not given.

    Raises:
        HandlerError: ``step`` cannot be called as ``(engine, batch)``.
        ModelError: no module, or one that is wrapped already.
        UpdateError: an optimizer that cannot train this model.

    Example:
        >>> engine = Engine(lambda engine, batch: 2 * batch)
        >>> @engine.on(Events.ITERATION_COMPLETED)
        ... def show(engine, batch):
        ...     print(engine.state.iteration, batch, engine.state.output)
        >>> result = engine.run([10, 20])
        1 10 20
        2 20 40
        >>> result.stop_reason
        'completed'
    """

    __slots__ = (
        "__weakref__",
        "_announcements",
        "_course",
        "_declared",
        "_events",
        "_first_values",
        "_loop",
        "_metrics",
        "_model",
        "_name",
        "_optimizer",
        "_state",
        "_status",
        "_step",
        "_strategy",
        "_updates",
    )

    def __init__(
        self,
        step: Step,
        model: Model = None,
        *,
        optimizer: Any = None,
        strategy: str | Strategy = "auto",
        mode: str = "train",
        metrics: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        gradient_accumulation_steps: int = 1,
        name: str | None = None,
    ) -> None:
        if isinstance(step, nn.Module):
            raise HandlerError(f"the step is a {type(step).__name__}: are step and model swapped? Engine(step, model)")
        check_signature(step, "step")
        if mode not in ("train", "eval"):
            raise RunError(f"mode must be 'train' or 'eval', got {mode!r}")
        if mode == "eval" and optimizer is not None:
            raise UpdateError("an evaluation engine makes no updates: leave optimizer out, or use mode='train'")
        check_model(model)
        self._first_values = check_declared(state)
        self._declared = check_declared(state)
        self._step = step
        self._model = model
        self._name = name or mode
        self._strategy = resolve(strategy, model)
        if model is not None:
            self._strategy.prepare_model(model)
        self._optimizer, optimizers = build_optimizers(optimizer, model, self._strategy)
        self._status = RunStatus(mode, self._strategy)
        self._loop = self._make_loop(step)
        self._state = StateView(self._loop, self._status, self._declared)
        self._updates = self._make_updates(optimizers, _whole_number(gradient_accumulation_steps))
        self._events: dict[str, Any] = {event.name: event for event in Events}
        self._course = Course(
            self._loop, self._status, self._updates, self._strategy, model, make_shards(self._strategy)
        )
        self._announcements = Announcements()
        self._metrics = attach_metrics(self, metrics)

    def _make_loop(self, step: Step) -> IgniteLoop:
        loop = IgniteLoop(lambda engine, batch: None)
        # checked already, and Ignite's own check does not see through every decorator
        loop._process_function = step  # type: ignore[assignment]
        loop.owner = weakref.ref(self)
        loop.keep = detach
        loop.register_events(*(event for event in Events if event not in loop._allowed_events))
        status = self._status
        loop.count_with(Events.UPDATE_STARTED, lambda: status.updates + 1)
        loop.count_with(Events.UPDATE_COMPLETED, lambda: status.updates)
        return loop

    def _make_updates(self, optimizers: dict[str, Optimizer], steps: int) -> Updates:
        engine = weakref.ref(self)
        loop = self._loop

        def is_current() -> bool:
            running = active()
            return bool(running) and running[-1] is engine()

        return Updates(
            optimizers,
            self._strategy,
            self._model,
            self._status,
            steps=steps,
            iteration=lambda: loop.state.iteration,
            fire=loop._fire_event,
            done=loop.finish_iteration,
            current=is_current,
        )

    # ------------------------------------------------------------------ what steps and handlers use

    @property
    def model(self) -> Any:
        """The object that was passed in, never a wrapper."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer, or the mapping of them."""
        return self._optimizer

    @property
    def strategy(self) -> Strategy:
        """The device strategy."""
        return self._strategy

    @property
    def device(self) -> torch.device:
        """Where the step gets its batches."""
        return self._strategy.device

    @property
    def state(self) -> StateView:
        """What may be read of the run, and the declared fields."""
        return self._state

    @property
    def name(self) -> str:
        """What the engine is called in messages."""
        return self._name

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics it was given, by name; what they have computed is in ``state.metrics``."""
        return self._metrics

    def is_running(self) -> bool:
        """Say whether a run is in progress now, in this thread or another one."""
        if self._status.is_running and not self._loop.is_executing() and self not in active():
            self._course.rest()  # a second Ctrl-C has cut the end of its last run short
        return self._status.is_running

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules the engine was given: one, those of the mapping, or none."""
        return modules_of(self._model)

    @property
    def ignite(self) -> IgniteLoop:
        """The Ignite engine underneath: any Ignite component attaches to it and keeps Ignite's calling convention.

        Such as ``RunningAverage(...).attach(engine.ignite, "loss")``.
        """
        return self._loop

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context for the forward in the strategy's precision; it does nothing at full precision."""
        return self._strategy.autocast()

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, optimizer: str | None = None) -> None:
        """Add the gradient of ``loss`` to the current accumulation window.

        Does not make the host wait for the device.

        Args:
            loss: shape (), the mean over this batch.
            weight: how many items ``loss`` is the mean of (samples, tokens). With it the window's gradient is the mean
                over all its items; without it every batch counts the same.
            optimizer: add the gradient to the parameters of this optimizer only. For losses that reach parameters of
                another one, as a generator's loss reaches those of the discriminator.

        Raises:
            UpdateError: the engine has no optimizer, the loss is no scalar, or it carries no graph.
        """
        self._updates.backward(loss, weight, optimizer)

    def update(self, name: str | None = None) -> bool:
        """At a window's end, step the optimizer (of this name) and zero its gradients; else do nothing.

        Waits for the device only in ``"16-mixed"``, where the gradients decide whether the update is made.

        Returns:
            whether the weights were updated: False inside a window, and when the loss scale skipped the update.

        Raises:
            UpdateError: the engine has no such optimizer, or none of its parameters has a gradient.
        """
        return self._updates.update(name)

    def record(self, metrics: Mapping[str, Any], *others: Any) -> None:
        """Publish numbers under names, stamped with this iteration, and fire ``METRICS_RECORDED``.

        A tensor is copied and stays on its device; the host waits for it when somebody reads the number. What a
        handler of ``METRICS_RECORDED`` records itself is announced when all handlers have seen the record before it.

        Raises:
            RecordError: a name that is no text, or a value that is no number, tensor or array.
        """
        if others:
            raise RecordError(f"record takes one mapping: engine.record({{{metrics!r}: {others[0]!r}}})")
        kept = check_record(metrics)
        loop, status = self._loop, self._status
        loop.state.metrics.update(kept)
        record = Record(MetricsView(kept), loop.state.epoch, loop.state.iteration, status.updates)
        self._announcements.announce(record, status.see, lambda: loop._fire_event(Events.METRICS_RECORDED))

    def terminate(self, skip_completed: bool = False) -> None:
        """Stop the run after the event, or the step's iteration, that asks for it; the next ``run`` goes on from there.

        Args:
            skip_completed: fire TERMINATE only, not COMPLETED.

        Raises:
            RunError: no run is in progress.
        """
        self._require_running("terminate")
        self._loop.should_terminate = "skip_completed" if skip_completed else True

    def terminate_epoch(self, skip_epoch_completed: bool = False) -> None:
        """End this epoch after the event, or the step's iteration, that asks for it; the run goes on with the next one.

        Raises:
            RunError: no epoch is in progress; it is not yet in STARTED and EPOCH_STARTED.
        """
        self._require_running("terminate_epoch")
        if not self._loop.in_epoch:
            raise RunError(
                "terminate_epoch() was called where no epoch has batches to end. Ask in an event of an iteration, or "
                "stop the run with terminate()"
            )
        self._loop.should_terminate_single_epoch = "skip_epoch_completed" if skip_epoch_completed else True

    def interrupt(self) -> None:
        """Pause the run: only INTERRUPT fires, ``run`` returns, and the next ``run`` goes on from there.

        Raises:
            RunError: no run is in progress.
        """
        self._require_running("interrupt")
        self._loop.should_interrupt = True

    def fork(
        self,
        step: Step | None = None,
        *,
        mode: str = "eval",
        model: str = "share",
        optimizer: Any = None,
        metrics: Mapping[str, Any] | None = None,
        gradient_accumulation_steps: int = 1,
        strategy: Strategy | str | None = None,
        name: str | None = None,
    ) -> Engine:
        """Return an engine with the same model, strategy and declared fields, and fresh state, for an inner run.

        Args:
            step: its step; None: this engine's.
            mode: "eval" or "train".
            model: "share" for the very same model, "copy" for a deep copy, so that an inner *training* leaves the outer
                weights untouched.
            optimizer: for training, a factory such as ``lambda params: SGD(params, lr=0.1)``.
            metrics: as for ``Engine``.
            gradient_accumulation_steps: as for ``Engine``.
            strategy: another one, such as ``"single"`` for a run on this rank alone; None: this engine's.
            name: as for ``Engine``.

        Raises:
            RunError: ``model`` is neither "share" nor "copy".
            UpdateError: an optimizer instance with ``model="copy"``: it would hold the outer weights.
        """
        if model not in ("share", "copy"):
            raise RunError(f"fork(model=...) must be 'share' or 'copy', got {model!r}")
        given, step = self._model, step or self._step
        return Engine(
            step,
            given if given is None or model == "share" else self._strategy.copy_model(given),
            optimizer=optimizer,
            strategy=self._strategy if strategy is None else strategy,
            mode=mode,
            metrics=metrics,
            state=self._first_values,
            gradient_accumulation_steps=gradient_accumulation_steps,
            name=name or f"{self._name}/{getattr(step, '__name__', 'fork')}",
        )

    # ------------------------------------------------------------------ what the owner uses

    def run(
        self,
        data: Any = None,
        max_epochs: int | None = None,
        *,
        max_iters: int | None = None,
        epoch_length: int | None = None,
        limit_batches: int | None = None,
    ) -> StateSnapshot:
        """Run to the limit and return a frozen snapshot of the state.

        A training engine accumulates: it goes on from where its last run ended or was stopped, in mid-epoch too, with
        the random state it was stopped with. At the limit already it makes no step and says so in the log. An
        evaluation engine starts afresh each time.

        Called while another engine runs in this thread it is an *inner run*, which changes nothing of the outer one.

        Args:
            data: an iterable of batches, or a callable ``state -> iterable`` that is asked at each epoch's start. None
                with ``epoch_length``: the step gets ``None`` that many times.
            max_epochs: go to the end of this epoch, counted from the engine's first run. Without any limit: the limit
                of the run before, else one epoch.
            max_iters: go to this iteration instead.
            epoch_length: batches in an epoch. Without it an epoch is one pass over the data; with it the data is one
                stream that goes on over the epochs' borders and begins again when it has ended.
            limit_batches: take at most this many batches of each pass over the data, on each rank: a dry run of
                everything, validation included if its engine is given a limit too. Only this run is limited. To see
                whether a model can learn some batches by heart, give them as data: ``list(islice(loader, 3))``.

        Raises:
            LimitError: a limit below what is done, or one that is no positive whole number.
            DataError: data that is empty or cannot be iterated. The counters are as before.
            RunError: the engine is running already.
        """
        refuse_reentry(self)
        course = self._course
        if not course.plan(Limits.asked(max_epochs, max_iters, epoch_length, limit_batches), data):
            _log.warning(
                "engine %r is at its limit already (epoch %d, iteration %d): no step was made. "
                "Give a larger limit to go on; reset() begins afresh",
                self._name,
                self._state.epoch,
                self._state.iteration,
            )
            return self._state.snapshot()
        is_training = self._status.mode == "train"
        with (
            run_scope(self, data, *in_use_around(course)),
            self._strategy.running(self._model, is_training),
            self._updates.running(),
        ):
            try:
                course.begin(self, data)
                self._loop._internal_run()
            finally:
                course.finish(self)
        return self._state.snapshot()

    def _require_running(self, verb: str) -> None:
        if not self._status.is_running:
            raise RunError(f"{verb}() was called on engine {self._name!r}, which is not running")

    def reset(self) -> None:
        """Begin afresh: counters, records, limits, event counts and declared fields are as in a new engine.

        Model and optimizer are not touched.

        Raises:
            RunError: the engine is running.
        """
        if self.is_running():
            raise RunError(f"engine {self._name!r} is running: reset() is for an engine at rest")
        self._course.begin_afresh()
        self._updates.reset()
        self._declared.update(check_declared(self._first_values))

    # ------------------------------------------------------------------ events

    def on(self, event: Any, *others: Any) -> Callable[[_H], _H]:
        """Attach the decorated function to an event: ``@engine.on(Events.EPOCH_COMPLETED(every=2))``.

        Raises:
            EventError: this engine fires no such event, or several that are not joined with ``|``.
        """
        if others:
            raise EventError("on takes one event: join several with |, such as Events.STARTED | Events.COMPLETED")
        for one in split_events(event):
            find_event(one, self._events)

        def attach(handler: _H) -> _H:
            self.add_event_handler(event, handler)
            return handler

        return attach

    def add_event_handler(self, event: Any, handler: Any, *, last: bool = False) -> Handle:
        """Attach a handler, to be called as ``handler(engine, batch)``, to an event or a ``|`` list of events.

        In a notebook, a handler takes the place of the one that an earlier run of its cell has attached.

        Args:
            event: one event, or several joined with ``|``.
            handler: what is called.
            last: call it after all other handlers of the event, also those that are attached later: for what must see
                everything that they have done, such as saving.

        Returns:
            a handle that takes the handler off again.

        Raises:
            EventError: this engine fires no such event.
            HandlerError: the handler cannot be called as ``(engine, batch)``.
        """
        check_signature(handler, "handler")
        events = [find_event(one, self._events) for one in split_events(event)]
        if not events:
            raise HandlerError("an empty list of events was given: the handler would never be called")
        table = self._loop._event_handlers
        place = calling_place()
        old = replaced_by(handler, place, events, table.registrations())
        for entry in old:
            table.drop(entry)
        if old:
            names = ", ".join(dict.fromkeys(entry.short_name for entry in old))
            _log.warning("replaced what this cell, or a function of the same name, attached before: %s", names)
        entries = [Registration(handler, one, place, last) for one in events]
        for entry in entries:
            table[entry.event].append(entry)
        return Handle(table, entries)

    def remove_event_handler(self, handler: Handler, event: Any) -> None:
        """Take a handler off an event or a ``|`` list of events.

        Raises:
            HandlerError: it is not attached there.
        """
        table = self._loop._event_handlers
        events = [find_event(one, self._events) for one in split_events(event)]
        found = {one: [entry for entry in table.registrations(one) if entry.handler == handler] for one in events}
        for one, entries in found.items():
            if not entries:
                raise HandlerError(f"handler {handler!r} is not attached to {event_name(one)}")
        for entry in chain.from_iterable(found.values()):
            table.drop(entry)

    def has_event_handler(self, handler: Handler, event: Any = None) -> bool:
        """Say whether a handler is attached, to this event, to one of a ``|`` list, or to any.

        Raises:
            EventError: this engine fires no such event.
        """
        table = self._loop._event_handlers
        events = [None] if event is None else [find_event(one, self._events) for one in split_events(event)]
        return any(entry.handler == handler for one in events for entry in table.registrations(one))

    def register_events(self, *events: Any) -> None:
        """Add events of your own: texts, or the members of an ``EventEnum``; ``fire_event`` fires them.

        Filters on them count their firings in this engine.

        Raises:
            EventError: something else.
        """
        for event in events:
            check_custom_event(event)
        for event in events:
            self._loop.register_events(event)
            self._events.setdefault(event_name(event), event)

    def fire_event(self, event: Any) -> None:
        """Call the handlers of an event, as ``(engine, batch)``.

        Raises:
            EventError: the event is not registered.
        """
        self._loop._fire_event(find_event(event, self._events))

    def attached(self) -> tuple[object, ...]:
        """Return the objects that are attached or whose methods are, in order, each once; those on ``ignite`` too."""
        owners = {id(owner): owner for owner in self._loop._event_handlers.owners() if owner is not self._loop}
        return tuple(owners.values())

    def watch_calls(self, watcher: CallWatcher | None) -> None:
        """Let ``watcher`` be around every call of a handler from the next firing on; None: no more.

        It is what the handler ``Timing`` is built on. Without one nothing is slower. ``EXCEPTION_RAISED`` is left out.

        Args:
            watcher: an object with ``around(event, handler, call)``, which returns what is called in the place of
                ``call``, and ``spent(event, handler)``, which ``describe`` asks for calls and seconds.

        Raises:
            HandlerError: another one is there already.
        """
        table = self._loop._event_handlers
        if watcher is not None and table.watcher is not None and table.watcher is not watcher:
            raise HandlerError(f"{table.watcher!r} is around the calls of this engine already: take it off first")
        table.watch(watcher)

    def describe(self) -> Description:
        """Return every event in firing order, as text and as HTML, each with its handlers.

        Of a handler its filter is shown, the line where it is written, and the time it took if ``Timing`` is attached.
        """
        return Description(f"Engine {self._name}", self._loop._event_handlers, self._events)

    # ------------------------------------------------------------------ saving and showing

    def state_dict(self) -> dict[str, Any]:
        """Return counters, declared fields, metrics and the position in the data, as tensors and plain numbers.

        Not the model and not the optimizer: they have a ``state_dict`` of their own. Loaded into a new engine, with
        theirs, the next ``run`` goes on exactly as this one would.
        """
        return save_engine(
            self._loop,
            self._status,
            self._declared,
            self._course.limits,
            self._course.position(self),
            self._updates,
            self._metrics,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned. Everything is checked before anything is changed.

        Raises:
            CheckpointError: it does not fit this engine.
            RunError: the engine is running.
        """
        if self.is_running():
            raise RunError(f"engine {self._name!r} is running: load_state_dict() is for an engine at rest")
        limits, position = load_engine(state, self._loop, self._status, self._declared, self._updates, self._metrics)
        self._course.go_on_from(limits, position)

    def __getattr__(self, name: str) -> NoReturn:
        """Say what there is instead: reached only for names that an engine does not have."""
        known = [known for known in dir(type(self)) if not known.startswith("_")]
        raise AttributeError(
            f"an Engine has no {name!r}{suggestion(name, known)} (An Ignite component attaches to engine.ignite.)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied or pickled: a copy would share the model and be half of a run."""
        raise RunError(
            "an Engine cannot be copied or pickled: use engine.fork(step) for a second engine, and "
            "engine.state_dict() for what is to be saved"
        )

    def __repr__(self) -> str:
        """Show the engine in one line."""
        state = self._state
        return (
            f"<Engine {self._name!r}: {state.mode}, epoch {state.epoch}, iteration {state.iteration}, "
            f"{type(self._model).__name__} on {self.device}>"
        )

    def _repr_html_(self) -> str:
        state = self._state
        rows = [
            ("mode", state.mode),
            ("model", type(self._model).__name__),
            ("runs on", f"{state.device} ({state.strategy}, {state.precision})"),
            ("epoch", f"{state.epoch} of {state.max_epochs}" if state.max_epochs else str(state.epoch)),
            ("iteration", str(state.iteration)),
            ("updates", str(state.updates)),
            ("last stop", str(state.stop_reason)),
            *((name, f"{value!r}") for name, value in state.metrics.items()),
        ]
        return table(f"Engine {self._name}", rows)


def _whole_number(steps: Any) -> int:
    if isinstance(steps, bool) or not hasattr(steps, "__index__") or steps < 1:
        raise UpdateError(f"gradient_accumulation_steps must be a whole number of at least 1, got {steps!r}")
    return int(steps)
