"""One contract that any handler can be held to, yours too: ``check_handler(lambda engine: MyHandler())``.

Each check trains a small net in objects of its own and says with a :class:`ContractError` what was not kept. It needs
no test framework: call it in a test of whichever you use.
"""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ..engine import Engine, Events

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

MakeHandler = Callable[[Engine], Any]

_EPOCHS = 2


class ContractError(AssertionError):
    """A handler does not keep a part of the contract."""


class _ErrorOfTheUsersError(Exception):
    """What a step or another handler raises in a check."""


def check_handler(make: MakeHandler, *, changes_training: bool = False, ignore: Collection[str] = ()) -> None:
    """Hold a handler to the whole contract. Takes about a second.

    Args:
        make: given the training engine that it is going to be attached to, returns a new handler, not yet attached. The
            engine records ``"loss"`` in every iteration and ``"score"`` at each epoch's end, and its output is
            ``{"loss": tensor}``. What the handler needs, such as a folder, must be new each time too.
        changes_training: the handler is there to change weights, rates or the course of the training.
        ignore: keys of its ``state_dict()`` that differ from run to run, such as times.

    Raises:
        ContractError: it does not keep a part; the message says which.
    """
    check_comes_off(make)
    check_state_is_plain(make, ignore=ignore)
    check_keeps_nothing_alive(make)
    check_copes_with_errors(make)
    check_resumes(make, ignore=ignore)
    check_inner_runs(make, ignore=ignore)
    if not changes_training:
        check_looking_changes_nothing(make)


def check_comes_off(make: MakeHandler) -> None:
    """Check that ``detach`` takes back what ``attach`` has done, before a run and after one.

    Raises:
        ContractError: it does not.
    """
    training = _Training()
    handler = make(training.engine)
    before = str(training.engine.describe())
    for _ in range(2):
        if handler.attach(training.engine) is not handler:
            raise ContractError(f"{handler!r}: attach() must return the handler itself, so that it can be chained")
        if str(training.engine.describe()) == before:
            raise ContractError(f"{handler!r}: attach() has attached nothing to the engine")
        training.run()
        handler.detach(training.engine)
        if str(training.engine.describe()) != before:
            raise ContractError(f"{handler!r}: detach() leaves handlers behind:\n{training.engine.describe()}")


def check_state_is_plain(make: MakeHandler, *, ignore: Collection[str] = ()) -> None:
    """Check that its state can be saved, loaded by a safe loader, and taken up by a new handler.

    Raises:
        ContractError: it cannot.
    """
    training = _Training(make).run()
    if not _has_state(training.handler):
        return
    state = training.handler.state_dict()
    try:
        loaded = _through_a_file(state)
    except Exception as error:
        raise ContractError(
            f"{training.handler!r}: state_dict() has what a weights-only loader does not read: keep tensors, numbers, "
            f"texts, lists and dicts in it ({error})"
        ) from error
    other = _Training(make)
    other.handler.load_state_dict(loaded)
    _compare(f"{other.handler!r}: load_state_dict() takes up another state", state, other.handler.state_dict(), ignore)


def check_keeps_nothing_alive(make: MakeHandler) -> None:
    """Check that engine, model, batches and outputs are let go of at once, without the cycle collector.

    Raises:
        ContractError: it keeps one of them.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        training = _Training(make)
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


def check_copes_with_errors(make: MakeHandler) -> None:
    """Check that an error, or Ctrl-C, in the step or in another handler leaves the run, and that the next run goes on.

    Raises:
        ContractError: another error leaves the run, or none, or the next run fails.
    """
    for error in (_ErrorOfTheUsersError, KeyboardInterrupt):
        for place in ("step", Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.STARTED):
            training = _Training(make)
            training.fail_at(place, error)
            try:
                training.run()
            except BaseException as raised:
                if type(raised) is not error:
                    raise ContractError(
                        f"{training.handler!r}: after a {error.__name__} in {place} another error leaves the run: "
                        f"{raised!r}"
                    ) from raised
            else:
                raise ContractError(f"{training.handler!r}: a {error.__name__} in {place} does not leave the run")
            try:
                training.run()
            except Exception as later:
                raise ContractError(
                    f"{training.handler!r}: the run after a {error.__name__} in {place} fails: {later!r}"
                ) from later


def check_resumes(make: MakeHandler, *, ignore: Collection[str] = ()) -> None:
    """Check that a run that is stopped after any iteration ends the same: in the same objects, and in new ones.

    Raises:
        ContractError: weights, records, rates or the handler's state are other ones in the end.
    """
    whole = _Training(make).run()
    for iteration in range(1, whole.engine.state.iteration):
        stopped = _Training(make)
        stopped.stop_at(iteration)
        stopped.run()
        resumed = _Training(make, seed=1)
        resumed.load(_through_a_file(stopped.saved()))
        for name, training in (("the same objects", stopped), ("new objects", resumed)):
            training.run()
            what = f"{training.handler!r}: a run stopped after iteration {iteration} and taken up again in {name} ends "
            _compare(what + "with another outcome", whole.outcome(), training.outcome())
            _compare(what + "with another state_dict()", whole.state(), training.state(), ignore)
            _compare(what + "with other records", whole.recorded[-1:], training.recorded[-1:])


def check_inner_runs(make: MakeHandler, *, ignore: Collection[str] = ()) -> None:
    """Check that runs of other engines inside the run change nothing of it, nor of what the handler makes of it.

    Raises:
        ContractError: something is another.
    """
    alone, watched = _Training(make).run(), _Training(make)
    watched.look_every_iteration()
    watched.run()
    what = f"{watched.handler!r}: with inner runs in every iteration the run ends"
    _compare(f"{what} with another outcome", alone.outcome(), watched.outcome())
    _compare(f"{what} with another state_dict()", alone.state(), watched.state(), ignore)
    _compare(f"{what} with other records", alone.recorded, watched.recorded)


def check_looking_changes_nothing(make: MakeHandler) -> None:
    """Check that a training with the handler ends as one without it, to the bit.

    Raises:
        ContractError: it changes weights, the order of samples, or the random state.
    """
    with_it = _Training(make).run()
    what = f"{with_it.handler!r}: a training with it does not end as one without it"
    _compare(what, _Training().run().outcome(), with_it.outcome())


class _Training:
    """A small training: shuffled batches, dropout, momentum, batch statistics; with the handler, if one is made."""

    def __init__(self, make: MakeHandler | None = None, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.recorded: list[Any] = []
        self.seen: list[Tensor] = []
        recorded, seen = self.recorded, self.seen  # not self: what is attached keeps no training alive
        self._failures: dict[Any, type[BaseException]] = {}
        failures = self._failures

        def step(engine: Engine, batch: Any) -> dict[str, Tensor]:
            if engine.state.iteration == 3 and "step" in failures:
                raise failures.pop("step")
            inputs, classes = batch
            seen.append(inputs.clone())
            loss = F.cross_entropy(engine.model(inputs), classes)
            engine.backward(loss)
            engine.update()
            engine.record({"loss": loss})
            return {"loss": loss}

        def record_score(engine: Engine, batch: Any) -> None:
            engine.record({"score": 1.0 / engine.state.epoch})

        def note(engine: Engine, batch: Any) -> None:
            record = engine.state.last_record
            if record is not None and not {"loss", "score"}.isdisjoint(record.values):
                recorded.append((record.iteration, dict(record.values)))

        self.engine = Engine(step, self.model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(11, 4, generator=generator), torch.randint(0, 2, (11,), generator=generator))
        self.loader = DataLoader(data, 4, shuffle=True)
        self.handler: Any = None if make is None else make(self.engine)
        if self.handler is not None:
            self.handler.attach(self.engine)
        self.engine.add_event_handler(Events.EPOCH_COMPLETED, record_score)
        self.engine.add_event_handler(Events.METRICS_RECORDED, note)

    def run(self) -> _Training:
        self.engine.run(self.loader, max_epochs=_EPOCHS)
        return self

    def stop_at(self, iteration: int) -> None:
        self.engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=iteration), lambda engine, batch: engine.terminate()
        )

    def fail_at(self, place: Any, error: type[BaseException]) -> None:
        failures = self._failures
        failures[place] = error

        def fail(engine: Engine, batch: Any) -> None:
            if place in failures:
                raise failures.pop(place)

        if place != "step":
            self.engine.add_event_handler(place, fail)

    def look_every_iteration(self) -> None:
        model, loader = self.model, self.loader
        evaluator = Engine(lambda engine, batch: model(batch[0]) + torch.rand(()), model, mode="eval", name="inner")
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: evaluator.run(loader))

    def saved(self) -> dict[str, Any]:
        return {
            "handler": self.handler.state_dict() if _has_state(self.handler) else None,
            "engine": self.engine.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
            "model": self.model.state_dict(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        if _has_state(self.handler):
            self.handler.load_state_dict(saved["handler"])
        self.engine.load_state_dict(saved["engine"])
        self.engine.optimizer.load_state_dict(saved["optimizer"])
        self.model.load_state_dict(saved["model"])

    def outcome(self) -> dict[str, Any]:
        optimizer = self.engine.optimizer
        return {
            "weights": {name: value.clone() for name, value in self.model.state_dict().items()},
            "momentum": [optimizer.state[parameter].get("momentum_buffer") for parameter in self.model.parameters()],
            "rates": [group["lr"] for group in optimizer.param_groups],
            "counts": [self.engine.state.epoch, self.engine.state.iteration, self.engine.state.updates],
            "last samples": self.seen[-1:],
            "random state": torch.get_rng_state(),
        }

    def state(self) -> Any:
        return self.handler.state_dict() if _has_state(self.handler) else None


def _has_state(handler: Any) -> bool:
    return callable(getattr(handler, "state_dict", None)) and callable(getattr(handler, "load_state_dict", None))


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _compare(what: str, one: Any, other: Any, ignore: Collection[str] = ()) -> None:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one = {key: value for key, value in one.items() if key not in ignore}
        other = {key: value for key, value in other.items() if key not in ignore}
    difference = next(_differences(one, other, ""), None)
    if difference is not None:
        raise ContractError(f"{what}: {difference}")


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    """Yield the places where two values differ by a bit. NaN equals itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
            yield f"{where or 'it'} is {other} and not {one}"
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            yield f"{where or 'it'} has the keys {sorted(map(str, other))} and not {sorted(map(str, one))}"
        for key in one:
            if key in other:
                yield from _differences(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield f"{where or 'it'} has {len(other)} entries and not {len(one)}"
        for place, pair in enumerate(zip(one, other, strict=False)):
            yield from _differences(*pair, f"{where}[{place}]")
    else:
        equal = False
        with suppress(Exception):
            equal = bool(one == other) or bool(one != one and other != other)
        if not equal:
            yield f"{where or 'it'} is {other!r} and not {one!r}"
