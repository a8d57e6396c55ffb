"""What an optimizer keeps comes back to the bit, whatever its dtype, and into an optimizer that is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resuming import differences
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adam, AdamW, NAdam, Optimizer, RMSprop, SparseAdam

from pellucid.engine import CheckpointError, Engine, Events, resume, save_checkpoint


class WithMaster(Optimizer):
    """Keeps weights of full precision, and things that are no tensor, for parameters of half."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(
                        master=parameter.detach().float().clone(), seen=torch.zeros(3, dtype=torch.bool), count=0
                    )
                    state.update(signs=torch.zeros_like(parameter, dtype=torch.int8), note=("plain", ["text", None]))
                state["master"].sub_(group["lr"] * parameter.grad.float())
                state["signs"].copy_(parameter.grad.sign())
                state["seen"][state["count"] % 3] = True
                state["count"] += 1
                parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "NAdam": NAdam,
    "ASGD": lambda params: ASGD(params, t0=2),
    "Adam, amsgrad": lambda params: Adam(params, amsgrad=True),
    "RMSprop": lambda params: RMSprop(params, momentum=0.9, centered=True),
    "with master weights": WithMaster,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_come_back_with_the_dtype_they_had(tmp_path, name, dtype):
    def make() -> Engine:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(dtype)

        def step(engine: Engine, batch: Tensor) -> None:
            engine.backward(engine.model(batch).pow(2).mean())
            engine.update()

        return Engine(step, model, optimizer=OPTIMIZERS[name])

    batches = list(torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1)).to(dtype))
    whole = make()
    whole.run(batches)
    stopped = make()
    stopped.run(batches, max_iters=3)
    save_checkpoint(stopped, tmp_path)
    again = make()
    resume(again, tmp_path)
    for there, here in zip(stopped.optimizer.state.values(), again.optimizer.state.values(), strict=True):
        assert list(differences(there, here)) == []
        for key, value in there.items():
            assert type(here[key]) is type(value) and getattr(here[key], "dtype", 0) == getattr(value, "dtype", 0)
    again.run(batches, max_epochs=1)
    assert list(differences(whole.model.state_dict(), again.model.state_dict())) == []


def engine_with(make: Callable[[nn.Module], Optimizer], dtype: Any = None) -> Engine:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)

    def step(engine: Engine, batch: Any) -> None:
        engine.backward(engine.model(torch.ones(2, dtype=dtype)).sum())
        engine.update()

    return Engine(step, model, optimizer=make(model), gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("make", "dtype", "says"),
    [
        (lambda model: Adam(model.parameters()), None, "is of the class AdamW, and this engine's is a Adam:"),
        (lambda model: SGD(model.parameters(), 0.1), None, "make it as it was; load_weights"),
        (
            lambda model: AdamW(reversed(list(model.parameters()))),
            None,
            "has the parameter '0.weight' at place 0, and this engine's has '1.bias' there: give it the parameters in",
        ),
        (lambda model: AdamW(model.parameters()), torch.float64, "'0.bias' is torch.float32 there and torch.float64"),
    ],
)
def test_what_is_built_otherwise_is_refused(tmp_path, make, dtype, says):
    engine = engine_with(lambda model: AdamW(model.parameters()))
    engine.run([0, 1, 2, 3])
    save_checkpoint(engine, tmp_path)
    other = engine_with(make, dtype)
    before = repr([other.model.state_dict(), other.optimizer.state_dict(), other.state_dict()])
    with pytest.raises(CheckpointError, match=says):
        resume(other, tmp_path)
    assert repr([other.model.state_dict(), other.optimizer.state_dict(), other.state_dict()]) == before


def test_a_lazy_model_takes_the_gradients_of_its_window(tmp_path):
    def make() -> Engine:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))

        def step(engine: Engine, batch: Tensor) -> None:
            engine.backward(engine.model(batch).pow(2).mean())
            engine.update()

        return Engine(step, model, optimizer=lambda params: SGD(params, 0.1), gradient_accumulation_steps=3)

    batches = list(torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1)))
    whole = make()
    whole.run(batches)
    stopped = make()
    stopped.run(batches, max_iters=2)
    save_checkpoint(stopped, tmp_path)
    again = make()
    resume(again, tmp_path)
    again.run(batches, max_epochs=1)
    assert list(differences(whole.model.state_dict(), again.model.state_dict())) == []


class Refuses(nn.Module):
    """Does not take the state it gave."""

    def __init__(self, where: str = "") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2))
        self.where = where
        self.note = "as it was"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        if self.where == "the model" and state != "as it was":
            raise KeyError("the model")
        self.note = state


class Handler:
    """Takes its state, or refuses it half-way."""

    def __init__(self, refuses: bool) -> None:
        self.first = self.second = 0
        self.refuses = refuses

    def count(self, engine: Engine, batch: Any) -> None:
        self.first += 1
        self.second += 1

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["first"]
        if self.refuses and state["second"]:
            raise KeyError("a handler")
        self.second = state["second"]


class OwnSGD(SGD):
    """Refuses a state that has a note."""

    refuses = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.refuses and state_dict["state"]:
            raise KeyError("the optimizer")


@pytest.mark.parametrize("where", ["a handler", "the optimizer", "the model"])
def test_a_resume_that_fails_anywhere_leaves_everything_as_it_was(tmp_path, where):
    def make(where: str = "") -> tuple[Engine, Handler, Handler]:
        models = {"one": nn.Linear(2, 1), "two": Refuses(where)}
        optimizer = OwnSGD([p for model in models.values() for p in model.parameters()], lr=0.1, momentum=0.9)
        optimizer.refuses = where == "the optimizer"

        def step(engine: Engine, batch: Any) -> None:
            engine.backward(engine.model["one"](engine.model["two"].weight * batch).sum())
            engine.update()
            engine.model["two"].note = "trained"

        engine = Engine(step, models, optimizer=optimizer, state={"note": 0})
        handlers = Handler(refuses=False), Handler(refuses=where == "a handler")
        for handler in handlers:
            engine.add_event_handler(Events.ITERATION_COMPLETED, handler.count)
        return engine, *handlers

    engine, *_ = make()
    engine.run([1.0, 2.0])
    engine.state.note = 5
    save_checkpoint(engine, tmp_path)
    other, *handlers = make(where)

    def all_of_it() -> str:
        states = [model.state_dict() for model in other.model.values()]
        states += [other.optimizer.state_dict(), other.state_dict(), *(one.state_dict() for one in handlers)]
        return repr(states)

    before = copy.copy(all_of_it())
    with pytest.raises(CheckpointError, match=f"cannot be loaded .KeyError: '{where}'"):
        resume(other, tmp_path)
    assert all_of_it() == before


def test_sparse_states_come_back(tmp_path):
    model = nn.Embedding(4, 2, sparse=True)

    def step(engine: Engine, batch: Any) -> None:
        engine.backward(engine.model(torch.tensor([batch])).sum())
        engine.update()

    engine = Engine(step, model, optimizer=SparseAdam(model.parameters()))
    engine.run([0, 1, 2])
    save_checkpoint(engine, tmp_path)
    other = Engine(step, copy.deepcopy(model), optimizer=lambda params: SparseAdam(params))
    resume(other, tmp_path)
    for one, two in zip(engine.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert list(differences(one, two)) == []
