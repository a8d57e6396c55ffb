"""Averaged weights: an exponential moving average of the model over its updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..engine import CheckpointError, Engine, Events, HandlerError, RunError, Strategy
from ._attachable import Attachable, Subscription
from ._monitor import require_number
from ._optimizers import optimizers_of, parameters_of

__all__ = ["EMA"]

Model = nn.Module | Mapping[str, nn.Module]


class EMA(Attachable):
    """Keep an exponential moving average of the weights, made after each real update.

    It starts at the weights the first run begins with. After that ``average = d * average + (1 - d) * weight`` for
    each parameter, after each update of the optimizer that holds it; buffers go with the first optimizer of their
    module. Averaged is what the model's ``state_dict()`` has: floating-point buffers (a BatchNorm's statistics) too,
    while integer ones are copied. The averages have memory of their own, in float32 where the model has less. No
    update waits for the device.

    ``d`` is ``min(decay, (1 + n) / (warmup + n))`` at ``n`` averages made before, so that the first weights are soon
    forgotten; the formula is that of TensorFlow's `ExponentialMovingAverage
    <https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage>`_, where ``warmup`` is 10.

    Args:
        decay: the largest ``d``, at least 0 and below 1.
        warmup: as above, in updates; 0 for a constant ``d``.
        every: average after every n-th update only.
        model: average this part of the engine's model, such as ``models["generator"]``. None: all of it.

    Example:
        >>> ema = EMA(decay=0.99).attach(trainer)
        >>> Validate(evaluator, val_loader, weights=ema).attach(trainer)
        >>> result = trainer.run(loader, max_epochs=2)
        >>> with ema.applied():
        ...     torch.save(model.state_dict(), "averaged.pt")
    """

    def __init__(self, decay: float = 0.999, *, warmup: float = 10, every: int = 1, model: Model | None = None) -> None:
        self._decay: float = require_number("decay", decay, least=0)
        if decay >= 1:
            raise ValueError(f"decay={decay!r}: a number below 1 was wanted, the average would never move")
        self._warmup: float = require_number("warmup", warmup, least=0)
        self._every: int = require_number("every", every, least=1, whole=True)
        self._model = model
        self._parts: dict[str, dict[str, _Slot]] = {}  # of the model, by name and by the model's own keys
        self._slots: dict[str, list[_Slot]] = {}  # each tensor once, by the optimizer that moves it
        self._updates: dict[str, int] = {}  # by optimizer
        self._has_begun = False  # to average: it has been in a run
        self._strategy: Strategy | None = None  # of the model, once it is attached

    @property
    def averages(self) -> int:
        """How many averages have been made (with several optimizers, of the one that made most)."""
        return max(self._updates.values(), default=0) // self._every

    def attach(self, engine: Engine) -> EMA:
        """Average ``engine``'s weights from now on, and return the handler itself.

        Raises:
            HandlerError: the engine makes no updates, has not this model, or has this handler already.
        """
        if not self._is_attached(engine):
            optimizers = optimizers_of(engine)
            model = engine.model if self._model is None else self._model
            if not _overlap(_roots(engine.model), _roots(model)):
                raise HandlerError(f"{self!r} averages a model that this engine does not have")
            self._model, self._strategy = model, engine.strategy
            self._find(optimizers)
            self._updates = dict.fromkeys(optimizers, 0) | self._updates
        return super().attach(engine)

    def subscriptions(self) -> Sequence[Subscription]:
        return ((Events.STARTED, self._begin), (Events.UPDATE_COMPLETED, self._average))

    def _begin(self, engine: Engine, batch: Any) -> None:
        """Look where the tensors are now: the model may have been loaded, or changed, since."""
        self._refuse_training()
        self._find(optimizers_of(engine))
        self._has_begun = True

    def _find(self, optimizers: Mapping[str, Optimizer]) -> None:
        known = self._named() if self._has_begun else {}
        holders: dict[int, str] = {}
        for name, optimizer in optimizers.items():
            holders = dict.fromkeys(map(id, parameters_of(optimizer)), name) | holders
        found: dict[int, _Slot] = {}
        self._parts, self._slots = {}, {name: [] for name in optimizers}
        for part, root in _named_parts(self._model).items():
            default = next((holders[id(p)] for p in root.parameters() if id(p) in holders), next(iter(optimizers)))
            self._parts[part] = {}
            for key, module, attribute in _tensors(root):
                live = getattr(module, attribute)
                if id(live) not in found:
                    found[id(live)] = _Slot(module, attribute, known.get((part, key)))
                    self._slots[holders.get(id(live), default)].append(found[id(live)])
                self._parts[part][key] = found[id(live)]

    def _named(self) -> dict[tuple[str, str], Tensor]:
        return {(part, key): slot.average for part, slots in self._parts.items() for key, slot in slots.items()}

    def _average(self, engine: Engine, batch: Any) -> None:
        self._refuse_training()
        name = str(engine.state.updating)
        slots = self._slots[name]
        self._updates[name] += bool(slots)
        if not slots or self._updates[name] % self._every:
            return
        made = self._updates[name] // self._every - 1
        decay = min(self._decay, (1 + made) / (self._warmup + made)) if self._warmup else self._decay
        blend = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        for blended in _alike([slot for slot in slots if slot.is_blended]):
            blend([slot.average for slot in blended], [slot.live_as_average() for slot in blended], made)
        for slot in slots:
            if not slot.is_blended:
                slot.average.copy_(slot.live())

    def _refuse_training(self) -> None:
        if any(slot.is_applied for slots in self._slots.values() for slot in slots):
            raise RunError("the averaged weights are in the model, and would be trained: leave ema.applied() first")

    @contextmanager
    def applied(self, model: Model | None = None) -> Iterator[None]:
        """Have the averages in the model, in the same parameters and buffers; the weights are put back in the end.

        They are put back to the bit, whatever happens inside. Costs memory for one more copy of the weights, and does
        not wait for the device. Inside another ``applied()`` it changes nothing. Works between a forward pass and its
        backward too.

        Args:
            model: what is to be looked at with the averages: the averaged model, or one that has it inside, or a part.

        Raises:
            HandlerError: ``model`` is not the averaged one, or nothing is averaged yet.
        """
        slots = [slot for slot in self._slots_of(model) if not slot.is_applied]
        try:
            for slot in slots:
                slot.apply()
            yield
        finally:
            _put_back(slots)

    def _slots_of(self, model: Model | None) -> list[_Slot]:
        if not self._parts:
            raise HandlerError(f"{self!r} averages nothing yet: ema.attach(trainer) comes first")
        roots = _named_parts(self._model)
        names = [part for part in self._parts if model is None or _overlap(_roots(model), [roots[part]])]
        if not names:
            raise HandlerError(f"{self!r} averages another model than the {type(model).__name__} it is applied to")
        return list({id(slot): slot for name in names for slot in self._parts[name].values()}.values())

    def weights(self) -> dict[str, Any]:
        """Return a copy of the averages under the model's own keys, for ``load_state_dict`` of a plain model.

        For a mapping of models, one such dictionary for each name. Whole on every rank, also where the model is
        sharded: a collective there, which every rank must call.
        """
        roots = _named_parts(self._model)
        with self.applied():
            assert self._strategy is not None, "what applies averages is attached"
            states = {part: _cloned(self._strategy.full_state_dict(roots[part])) for part in self._parts}
        return states if isinstance(self._model, Mapping) else states[""]

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by part of the model and key, and how many updates were followed, as tensors and numbers.

        The averages of a single model are in ``["weights"]`` under its own keys. Of a sharded model they are
        this rank's shards, as in torch's own state dictionaries.
        """
        weights = {
            part: {key: slot.average.clone() for key, slot in slots.items()} for part, slots in self._parts.items()
        }
        return {
            "updates": dict(self._updates),
            "weights": weights if isinstance(self._model, Mapping) else weights.get("", {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the state of an earlier ``state_dict()``, of a sharded model also with whole averages.

        Raises:
            HandlerError: it is not attached yet, so there is no model to fit.
            CheckpointError: it is of other optimizers, or of a model with other keys or shapes.
        """
        self._slots_of(None)
        if set(state_dict) != {"updates", "weights"} or set(state_dict["updates"]) != set(self._updates):
            raise CheckpointError(f"EMA: the keys updates and weights were wanted, updates of {list(self._updates)}")
        weights = state_dict["weights"] if isinstance(self._model, Mapping) else {"": state_dict["weights"]}
        saved = {(part, key): value for part, values in weights.items() for key, value in values.items()}
        known = self._named()
        unfit = [key for key in {*saved, *known} if key not in saved or key not in known or _unlike(saved, known, key)]
        if unfit:
            raise CheckpointError(f"EMA: the averages are of another model, they differ in {sorted(unfit)[:5]}")
        assert self._strategy is not None, "it has slots, so it is attached"
        for key, average in known.items():
            average.copy_(self._strategy.part_like(saved[key], average))
        self._updates = {name: int(count) for name, count in state_dict["updates"].items()}
        self._has_begun = True

    def __repr__(self) -> str:
        """Show the decay and how far it is."""
        return f"EMA(decay={self._decay}, warmup={self._warmup}, every={self._every}, averages={self.averages})"


class _Slot:
    """One tensor of the model, found by the module that has it, and its average.

    By module and attribute, since modules put new tensors in place of their buffers.
    """

    def __init__(self, module: nn.Module, attribute: str, average: Tensor | None) -> None:
        self.module, self.attribute = module, attribute
        live = self.live()
        self.is_blended = live.is_floating_point() or live.is_complex()
        is_short = live.is_floating_point() and live.element_size() < 4
        self.dtype = torch.float32 if is_short else live.dtype
        if average is None or average.shape != live.shape:
            average = live.to(self.dtype, copy=True)
        self.average = average.to(live.device)
        self.kept: tuple[Tensor, Tensor] | None = None  # while the average is in its place

    def live(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor.detach()

    def live_as_average(self) -> Tensor:
        return self.live().to(self.dtype)

    @property
    def is_applied(self) -> bool:
        return self.kept is not None

    def apply(self) -> None:
        tensor = getattr(self.module, self.attribute)
        self.kept = (tensor, tensor.detach().clone())
        tensor.data.copy_(self.average)  # through .data: a graph that waits for its backward does not mind

    def put_back(self) -> None:
        if self.kept is None:
            return
        tensor, values = self.kept
        tensor.data.copy_(values)
        if getattr(self.module, self.attribute) is not tensor:
            setattr(self.module, self.attribute, tensor)
        self.kept = None


def _alike(slots: Sequence[_Slot]) -> list[list[_Slot]]:
    """Return those together that torch can work on at once: not whole tensors with shards."""
    groups: dict[Any, list[_Slot]] = {}
    for slot in slots:
        groups.setdefault(getattr(slot.average, "device_mesh", None), []).append(slot)
    return list(groups.values())


def _put_back(slots: Sequence[_Slot]) -> None:
    try:
        for slot in slots:
            slot.put_back()
    except KeyboardInterrupt:  # one that comes just now must not leave averages in the model
        for slot in slots:
            slot.put_back()
        raise


def _roots(model: Model | None) -> list[nn.Module]:
    return list(_named_parts(model).values())


def _named_parts(model: Model | None) -> dict[str, nn.Module]:
    if model is None:
        return {}
    return dict(model) if isinstance(model, Mapping) else {"": model}


def _overlap(some: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    inside = {id(module) for root in some for module in root.modules()}
    return any(id(module) in inside for root in others for module in root.modules())


def _tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield key, module and attribute of each tensor that is in ``root.state_dict()``."""
    keys = root.state_dict().keys()
    for path, module in root.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        own |= dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for attribute in own:
            key = f"{path}.{attribute}" if path else attribute
            if key in keys:
                yield key, module, attribute


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _unlike(saved: Mapping[Any, Tensor], known: Mapping[Any, Tensor], key: Any) -> bool:
    return saved[key].shape != known[key].shape
