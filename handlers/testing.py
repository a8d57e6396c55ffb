"""One contract that any handler can be held to, yours too: ``check_handler(lambda engine: MyHandler())``.

Each check trains a small net in objects of its own and says with a :class:`ContractError` what was not kept. It needs
no test framework: call it in a test of whichever you use. It seeds Python's, NumPy's and torch's random state.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

from torch import Tensor

from ..engine import Engine, EventLike, Events, PellucidError
from ._contract import (
    ContractError,
    Failure,
    MakeHandler,
    SmallTraining,
    compare,
    has_state,
    open_resources,
    through_a_file,
)

__all__ = [
    "ContractError",
    "check_comes_off",
    "check_copes_with_errors",
    "check_handler",
    "check_inner_runs",
    "check_keeps_nothing_alive",
    "check_looking_changes_nothing",
    "check_resumes",
    "check_state_is_plain",
]

_FAILING = (Events.STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED)


class _ErrorOfTheUsersError(Exception):
    """What a step or another handler raises in a check."""


def check_handler(make: MakeHandler, *, changes_training: bool = False, ignore: Collection[str] = ()) -> None:
    """Hold a handler to the whole contract. Takes one to two seconds.

    Args:
        make: given the training engine that it is going to be attached to, returns a new handler, not yet attached. The
            engine records ``"loss"`` in every iteration and ``"score"`` at each epoch's end, and its output is
            ``{"loss": tensor}``. What the handler needs, such as a folder, must be new each time too.
        changes_training: the handler is there to change weights, rates or the course of the training.
        ignore: keys of its ``state_dict()``, and names that it records, that differ from run to run, such as times.
            Patterns are allowed (``"time/*"``).

    Raises:
        ContractError: it does not keep a part; the message says which.
    """
    check_comes_off(make)
    check_state_is_plain(make, ignore=ignore)
    check_keeps_nothing_alive(make)
    check_copes_with_errors(make, changes_training=changes_training)
    check_resumes(make, ignore=ignore)
    check_inner_runs(make, changes_training=changes_training, ignore=ignore)
    if not changes_training:
        check_looking_changes_nothing(make)


def check_comes_off(make: MakeHandler) -> None:
    """Check that ``detach`` takes back what ``attach`` and a run have done: handlers of events, hooks of the model.

    Raises:
        ContractError: it does not.
    """
    training = SmallTraining()
    handler = make(training.engine)
    before = training.listeners()
    for epochs in (1, 2):
        if handler.attach(training.engine) is not handler:
            raise ContractError(f"{handler!r}: attach() must return the handler itself, so that it can be chained")
        if training.listeners()["handlers"] == before["handlers"]:
            raise ContractError(f"{handler!r}: attach() has attached nothing to the engine")
        training.run(epochs)
        handler.detach(training.engine)
        after = training.listeners()
        compare(f"{handler!r}: detach() leaves handlers behind", before["handlers"], after["handlers"])
        compare(f"{handler!r}: detach() leaves hooks of the model behind", before["hooks"], after["hooks"])


def check_state_is_plain(make: MakeHandler, *, ignore: Collection[str] = ()) -> None:
    """Check that its state can be saved, loaded by a safe loader, and taken up by a new handler.

    Raises:
        ContractError: it cannot.
    """
    training = SmallTraining(make).run()
    handler = training.handler
    if not has_state(handler):
        return
    state = handler.state_dict()
    other = SmallTraining(make).handler
    other.load_state_dict(through_a_file(state, handler))
    compare(f"{other!r}: load_state_dict() takes up another state", state, other.state_dict(), ignore)


def check_keeps_nothing_alive(make: MakeHandler) -> None:
    """Check that engine, model, batches and outputs are let go of at once, without the cycle collector.

    Raises:
        ContractError: it keeps one of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        training = SmallTraining(make)
        seen: list[tuple[str, weakref.ref[Tensor]]] = []

        def note(engine: Engine, batch: Any) -> None:
            seen.extend((("a batch", weakref.ref(batch[0])), ("an output", weakref.ref(engine.state.output["loss"]))))

        training.engine.add_event_handler(Events.ITERATION_COMPLETED, note)
        training.run()
        handler = training.handler
        kept = sorted({what for what, reference in seen if reference() is not None})
        if kept:
            raise ContractError(f"{handler!r}: after the run it keeps {' and '.join(kept)} alive")
        name, engine, model = repr(handler), weakref.ref(training.engine), weakref.ref(training.model)
        del training, note
        if engine() is not None:
            raise ContractError(f"{name}: it keeps the engine alive: use the one that is passed in with each event")
        del handler
        if model() is not None:
            raise ContractError(f"{name}: it keeps the model alive when it is let go of itself: there is a cycle")
    finally:
        if was_enabled:
            gc.enable()


def check_copes_with_errors(make: MakeHandler, *, changes_training: bool = False) -> None:
    """Check that an error, or Ctrl-C, in the step or in another handler leaves the run, and that the next run goes on.

    Both runs leave weights and everything else of the training as they do without the handler, and the one that failed
    leaves no thread, no open file and no handler of a signal behind.

    Raises:
        ContractError: another error leaves the run, or one more, or none; something is left behind; the next run fails.
    """
    SmallTraining(make).run()  # what a library opens once, for as long as the process lives, is open from here on
    for kind in (_ErrorOfTheUsersError, KeyboardInterrupt):
        for event, before in ((None, False), *((event, before) for event in _FAILING for before in (True, False))):
            wanted = None if changes_training else _outcomes(Failure(kind(), event, before))
            _check_failure(SmallTraining(make, failure=Failure(kind(), event, before)), wanted)


def _check_failure(training: SmallTraining, wanted: tuple[Any, Any] | None) -> None:
    failure, name = training.failures[0], repr(training.handler)
    opened = open_resources()
    raised = _run(training)
    if training.failures:
        return  # the handler has ended the run before
    _check_error(name, failure, raised)
    left = sorted(open_resources() - opened)
    if left:
        raise ContractError(f"{name}: {failure} leaves behind {', '.join(left)}: close on every way out of a run")
    if wanted is not None:
        compare(f"{name}: {failure} ends the run with another outcome than without it", wanted[0], training.outcome)
    raised = _run(training)
    if raised is not None:
        raise ContractError(f"{name}: the run after {failure} fails: {raised!r}") from raised
    if wanted is not None:
        compare(f"{name}: the run after {failure} ends with another outcome", wanted[1], training.outcome)
    training.handler.detach(training.engine)
    hooks = SmallTraining().listeners()["hooks"]
    compare(f"{name}: {failure} leaves hooks of the model behind", hooks, training.listeners()["hooks"])


def _check_error(name: str, failure: Failure, raised: BaseException | None) -> None:
    if raised is None:
        raise ContractError(f"{name}: {failure} does not leave the run")
    if raised is not failure.error:
        raise ContractError(f"{name}: after {failure} another error leaves the run: {raised!r}") from raised
    later = raised.__context__
    if later is not None:
        raise ContractError(f"{name}: after {failure} it raises an error itself: {later!r}") from later


def _outcomes(failure: Failure) -> tuple[Any, Any]:
    """Return those of the run that fails and of the next, without a handler."""
    training = SmallTraining(failure=failure)
    _run(training)
    failed = training.outcome
    _run(training)
    return failed, training.outcome


def _run(training: SmallTraining) -> BaseException | None:
    try:
        training.run()
    except BaseException as error:
        return error
    return None


def check_resumes(make: MakeHandler, *, ignore: Collection[str] = ()) -> None:
    """Check that a run that is stopped at any moment ends the same: in the same objects, and in new ones.

    Raises:
        ContractError: weights, rates, records or the handler's state are other ones in the end.
    """
    whole = SmallTraining(make).run()
    _check_stop(make, whole, "before the first iteration", Events.STARTED, ignore)
    for iteration in range(1, whole.engine.state.iteration + 1):
        event = Events.ITERATION_COMPLETED(once=iteration)
        _check_stop(make, whole, f"after iteration {iteration}", event, ignore)
    _check_stop(make, whole, "between two epochs", Events.EPOCH_COMPLETED, ignore)


def _check_stop(make: MakeHandler, whole: SmallTraining, when: str, event: EventLike, ignore: Collection[str]) -> None:
    stopped = SmallTraining(make).stop_at(event).run()
    samples, recorded = stopped.samples.copy(), stopped.recorded.copy()
    saved = through_a_file(stopped.saved(), stopped.handler)
    what = f"{stopped.handler!r}: a run stopped {when} and taken up again in"
    _check_end(f"{what} the same objects ends with another", whole, stopped.run(), ignore)
    resumed = SmallTraining(make, seed=1).load(saved)
    at = resumed.engine.state.iteration
    resumed.samples.extend(samples)
    resumed.recorded.extend(recorded)
    ended_at_once = (
        resumed.run().engine.state.iteration == at
    )  # by the handler, before a batch takes up the random state
    left_out = ("random state",) if ended_at_once else ()
    _check_end(f"{what} new objects ends with another", whole, resumed, ignore, left_out)


def _check_end(
    what: str, wanted: SmallTraining, got: SmallTraining, ignore: Collection[str], left_out: Collection[str] = ()
) -> None:
    compare(f"{what} state_dict()", wanted.state(), got.state(), ignore)
    compare(f"{what} series of records", wanted.series(ignore), got.series(ignore))
    compare(f"{what} outcome", wanted.outcome, got.outcome, left_out)


def check_inner_runs(make: MakeHandler, *, changes_training: bool = False, ignore: Collection[str] = ()) -> None:
    """Check that runs of other engines inside the run change nothing of it, nor of what the handler makes of it.

    With the handler attached to the inner engine as well (with ``changes_training`` a second one; a handler may refuse
    it with one of pellucid's errors) the outer run is still the same.

    Raises:
        ContractError: something is another.
    """
    alone = SmallTraining(make).run()
    watched = SmallTraining(make).evaluate_every_iteration().run()
    what = f"{watched.handler!r}: with inner runs in every iteration the run ends with another"
    _check_end(what, alone, watched, ignore)
    inner = SmallTraining()
    second = make(inner.engine)
    outer = SmallTraining(make)
    try:
        (second if changes_training else outer.handler).attach(inner.engine)
    except PellucidError:
        return
    outer.train_every_iteration(inner).run()
    what = f"{outer.handler!r}: with it attached to the engine of inner runs too, the outer run ends with another"
    compare(f"{what} outcome", alone.outcome, outer.outcome)


def check_looking_changes_nothing(make: MakeHandler) -> None:
    """Check that a training with the handler ends as one without it, to the bit.

    Raises:
        ContractError: it changes weights, the order of samples, or the random state.
    """
    without, with_it = SmallTraining().run(), SmallTraining(make).run()
    what = f"{with_it.handler!r}: a training with it does not end as one without it"
    compare(what, without.outcome, with_it.outcome)
