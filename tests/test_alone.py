"""What Ignite sees of the ranks inside a run: all, or this process alone."""

from __future__ import annotations

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.metrics import Accuracy
from ranks import run_on_ranks

from pellucid.engine import Engine, Events, already_sharded
from pellucid.engine.strategies.alone import RanksAsIgniteSees, alone


def _seen() -> list[int]:
    ranks = RanksAsIgniteSees()
    seen = [idist.get_world_size()]
    with alone():
        seen.append(idist.get_world_size())
        with ranks.region():
            seen.append(idist.get_world_size())
        seen.append(idist.get_world_size())
    return [*seen, idist.get_world_size()]


def test_ignite_sees_one_process_in_the_region_and_all_ranks_around_it():
    assert run_on_ranks(_seen, 2) == [[2, 1, 2, 1, 2]] * 2


def test_without_a_group_nothing_is_touched():
    before = idist.utils._model
    with alone():
        assert idist.utils._model is before and idist.get_world_size() == 1


def _in_runs() -> list[int]:
    seen: list[int] = []

    def look(engine: Engine, batch: object) -> None:
        seen.append(idist.get_world_size())

    trainer = Engine(look)  # no model: all ranks
    local = Engine(look, mode="eval", strategy="single")
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: local.run([0]) and None)
    trainer.run(already_sharded([0]))
    return [*seen, idist.get_world_size()]


def test_a_run_of_one_rank_inside_a_run_of_all_sees_itself_alone():
    assert run_on_ranks(_in_runs, 2) == [[2, 1, 2]] * 2


def _made_on_one_rank() -> float | None:
    trainer = Engine(lambda engine, batch: None)
    trainer.run(already_sharded([0]))
    if dist.get_rank() == 1:
        return None
    local = Engine(lambda engine, batch: batch, mode="eval", strategy="single", metrics={"accuracy": Accuracy()})
    return local.run([(torch.tensor([1, 0]), torch.tensor([1, 1]))]).metrics["accuracy"]


def test_a_metric_may_be_made_and_used_on_one_rank_only():
    assert run_on_ranks(_made_on_one_rank, 2, timeout_sec=40) == [0.5, None]
