"""Stopping changes nothing, on ranks: a run that is stopped and taken up again in new objects ends the same.

What a rank has saved is its own: its random state, its place in its batches, the gradients of a window in progress.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import Case, equal_to_the_bit, make_data, make_net, make_optimizer, train_step
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader

from pellucid.engine import Engine, Events

ITERATIONS = 8  # four in each of two epochs


class Training:
    """Windows of three batches, dropout, batch statistics, momentum, shuffled batches that do not go round."""

    def __init__(self, kind: str) -> None:
        net = make_net(batch_norm=True)
        self.net = net.append(nn.Dropout(0.3))
        self.optimizer = make_optimizer(net)
        self.engine = Engine(
            train_step(Case()),
            net,
            optimizer=self.optimizer,
            gradient_accumulation_steps=3 if kind == "windows" else 1,
        )
        generator = torch.Generator().manual_seed(1) if kind == "own generator" else None
        workers = 1 if kind == "workers" else 0
        data = make_data(26)
        self.loader = DataLoader(data, batch_size=3, shuffle=True, generator=generator, num_workers=workers)

    def run(self) -> None:
        self.engine.run(self.loader, max_epochs=2)

    def parts(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "engine": self.engine}

    def outcome(self) -> Any:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state_dict()["state"].values()]
        named = {f"momentum {number}": value for number, value in enumerate(momenta)}
        return {name: value.clone() for name, value in (self.net.state_dict() | named).items()}


def _whole(kind: str) -> Any:
    torch.manual_seed(50)
    training = Training(kind)
    training.run()
    assert training.engine.state.iteration == ITERATIONS
    return training.outcome()


def _cut(kind: str, iteration: int, how: str) -> Any:
    torch.manual_seed(50)
    first = Training(kind)

    @first.engine.on(Events.ITERATION_COMPLETED(once=iteration))
    def stop(engine: Engine, batch: Any) -> None:
        if how == "error":
            raise KeyError("stop")
        if dist.get_rank() == 1:
            engine.terminate()

    try:
        first.run()
    except KeyError:
        assert how == "error"
    saved = {name: part.state_dict() for name, part in first.parts().items()}
    torch.manual_seed(dist.get_rank() + 99)
    second = Training(kind)
    for name, part in second.parts().items():
        part.load_state_dict(saved[name])
    second.run()
    assert second.engine.state.iteration == ITERATIONS
    return second.outcome()


@pytest.mark.parametrize("kind", ["plain", "windows", "own generator", "workers"])
def test_a_run_on_ranks_that_was_stopped_goes_on_to_the_same_end(kind):
    whole = run_on_ranks(_whole, 2, kind)
    places = [(k, ("terminate", "error")[k % 2]) for k in range(1, 8)]
    if kind == "plain":
        places = [(k, how) for k in range(1, 8) for how in ("terminate", "error")]
    if kind == "workers":
        places = [(3, "error")]
    for iteration, how in places:
        cut = run_on_ranks(_cut, 2, kind, iteration, how)
        assert all(equal_to_the_bit(*pair) for pair in zip(cut, whole, strict=True)), (iteration, how)
