"""Evaluation on ranks: every sample once, and the metrics of one process, for any amount of data."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.metrics import (
    Accuracy,
    Average,
    ConfusionMatrix,
    EpochMetric,
    Fbeta,
    Loss,
    Precision,
    Recall,
    RunningAverage,
)
from parallel import Case, equal_to_the_bit, make_data, make_net, make_optimizer, train_step
from ranks import RankError, run_on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from pellucid.engine import Engine, Events, already_sharded
from pellucid.handlers import Validate

SIZES = [1, 2, 3, 7, 8]


def eval_step(engine: Engine, batch: Any) -> Any:
    inputs, classes = batch
    return engine.model(inputs), classes


def _mean_of_all(outputs: torch.Tensor, classes: torch.Tensor) -> float:
    return float(outputs.double().mean()) + len(outputs)


def _metrics() -> dict[str, Any]:
    return {
        "accuracy": Accuracy(),
        "loss": Loss(cross_entropy),
        "confusion": ConfusionMatrix(3),
        "precision": Precision(average=False),
        "all": EpochMetric(_mean_of_all, check_compute_fn=False),
        "of several": Fbeta(1.0),
        "computed": (Precision(average=False) * 2 + Recall(average=False)).mean(),
        "computed from all": EpochMetric(_mean_of_all, check_compute_fn=False) + Accuracy(),
        "torch accuracy": MulticlassAccuracy(3, average="micro"),
        "torch auroc": MulticlassAUROC(3, thresholds=None),
    }


def _evaluate(size: int, batch_size: int) -> dict[str, Any]:
    net = make_net()
    engine = Engine(eval_step, net, mode="eval", metrics=_metrics())
    seen = 0

    @engine.on(Events.ITERATION_COMPLETED)
    def count(engine: Engine, batch: Any) -> None:
        nonlocal seen
        seen += len(batch[0])

    result = engine.run(DataLoader(make_data(size), batch_size=batch_size))
    return {"metrics": dict(result.metrics), "seen": seen, "reason": result.stop_reason}


@pytest.mark.filterwarnings("ignore:.*samples in target:UserWarning")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("size", "batch_size"), [*itertools.product(SIZES, [1]), (7, 2), (8, 3), (3, 8)])
def test_metrics_are_those_of_one_process_whatever_the_size(size, batch_size, world_size):
    alone = _evaluate(size, batch_size)
    ranks = run_on_ranks(_quiet_evaluate, world_size, size, batch_size)
    assert sum(rank["seen"] for rank in ranks) == size
    for rank in ranks:
        assert rank["reason"] == "completed" and rank["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            torch.testing.assert_close(torch.as_tensor(rank["metrics"][name]), torch.as_tensor(value), msg=name)


def _quiet_evaluate(size: int, batch_size: int) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
    return _evaluate(size, batch_size)


def _predict(size: int, batch_size: int) -> list[int]:
    net = nn.Identity()
    mine: list[list[int]] = []
    engine = Engine(lambda engine, batch: engine.model(batch), net, mode="eval")

    @engine.on(Events.ITERATION_COMPLETED)
    def keep(engine: Engine, batch: Any) -> None:
        mine.append(engine.state.output.tolist())

    engine.run(DataLoader(torch.arange(size), batch_size=batch_size))  # type: ignore[arg-type]
    return [number for batch in engine.strategy.gather_batches(mine) for number in batch]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_predictions_are_gathered_in_the_order_of_the_data_each_once(size, world_size):
    assert run_on_ranks(_predict, world_size, size, 2) == [list(range(size))] * world_size
    assert _predict(size, 2) == list(range(size))


class _Numbers(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(torch.arange(float(self.size)))


def _iterable(size: int) -> tuple[float, int]:
    engine = Engine(lambda engine, batch: batch[:, None], nn.Identity(), mode="eval", metrics={"mean": Average()})
    result = engine.run(DataLoader(_Numbers(size), batch_size=2))
    return float(result.metrics["mean"]), result.iteration


@pytest.mark.parametrize("size", SIZES)
def test_an_iterable_data_set_is_evaluated_once(size):
    ranks = run_on_ranks(_iterable, 2, size)
    assert [mean for mean, _ in ranks] == [pytest.approx((size - 1) / 2)] * 2
    assert sum(count for _, count in ranks) == -(-size // 2)


def _own_parts(counts: tuple[int, ...]) -> float:
    mine = [torch.tensor([float(dist.get_rank())])] * counts[dist.get_rank()]
    engine = Engine(lambda engine, batch: batch, nn.Identity(), mode="eval", metrics={"mean": Average()})
    value = engine.run(already_sharded(mine)).metrics["mean"]
    return float(value)


def test_parts_that_were_made_by_the_user_are_evaluated_to_their_ends():
    assert run_on_ranks(_own_parts, 2, (3, 1)) == [0.25, 0.25]
    assert run_on_ranks(_own_parts, 2, (0, 1)) == [1.0, 1.0]


def test_a_rank_without_data_where_another_has_several_batches_is_an_error():
    with pytest.raises(RankError, match=r"\[0, 3\] batches") as error:
        run_on_ranks(_own_parts, 2, (0, 3))
    assert error.value.kind == "DataError" and len(error.value.others) == 1


# ---------------------------------------------------------------------- looking changes nothing, on ranks


def _train(look: str) -> dict[str, Any]:
    net = make_net(batch_norm=True)
    net.append(nn.Dropout(0.2))
    torch.manual_seed(11)
    trainer = Engine(train_step(Case()), net, optimizer=make_optimizer(net), gradient_accumulation_steps=2)
    evaluator = Engine(eval_step, net, mode="eval", metrics={"accuracy": Accuracy()})
    alone = Engine(
        eval_step,
        net,
        mode="eval",
        strategy="single",
        metrics={"accuracy": Accuracy(), "all": EpochMetric(_mean_of_all)},
    )
    uneven = DataLoader(make_data(7), batch_size=2, shuffle=True)
    found: list[Any] = []

    @trainer.on(Events.ITERATION_COMPLETED(every=2) | Events.BACKWARD_COMPLETED(every=3) | Events.EPOCH_COMPLETED)
    def handler(engine: Engine, batch: Any) -> None:
        if look == "all ranks":
            found.append(evaluator.run(uneven).metrics["accuracy"])
        elif look == "one sample":
            found.append(evaluator.run(DataLoader(make_data(1))).metrics["accuracy"])
        elif look == "rank 0 alone" and engine.state.rank == 0:
            assert alone.state.world_size == 1
            found.append(alone.run(uneven).metrics["accuracy"])
        elif look == "rank 1 fails" and engine.state.rank == 1:
            boom = Engine(lambda engine, batch: 1 / 0, net, mode="eval", strategy="single")
            with pytest.raises(ZeroDivisionError):
                boom.run(uneven)

    loader = DataLoader(make_data(42), batch_size=3, shuffle=True)
    trainer.run(loader, max_epochs=2)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    return {"weights": state, "found": found, "iteration": trainer.state.iteration}


@pytest.mark.parametrize("look", ["all ranks", "one sample", "rank 0 alone", "rank 1 fails"])
def test_inner_runs_leave_the_training_on_ranks_bit_identical(look):
    watched, unwatched = run_on_ranks(_train, 2, look), run_on_ranks(_train, 2, "never")
    for one, other in zip(watched, unwatched, strict=True):
        assert equal_to_the_bit(one["weights"], other["weights"]) and one["iteration"] == other["iteration"]
    if look == "all ranks":
        assert watched[0]["found"] == watched[1]["found"] != []


def _inside_the_step(looks: bool) -> dict[str, torch.Tensor]:
    net = make_net(batch_norm=True)

    def step(engine: Engine, batch: Any) -> None:
        if looks:
            evaluator.run(DataLoader(make_data(5), batch_size=2))
        train_step(Case())(engine, batch)
        if looks and engine.state.rank == 1:
            alone.run(DataLoader(make_data(5), batch_size=2))

    trainer = Engine(step, net, optimizer=make_optimizer(net))
    evaluator = Engine(eval_step, net, mode="eval", metrics={"accuracy": Accuracy()})
    alone = Engine(eval_step, net, mode="eval", strategy="single")
    trainer.run(DataLoader(make_data(24), batch_size=3))
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_inner_runs_inside_the_step_leave_it_bit_identical_too():
    watched, unwatched = (run_on_ranks(_inside_the_step, 2, looks) for looks in (True, False))
    assert all(equal_to_the_bit(*pair) for pair in zip(watched, unwatched, strict=True))


def _between_forward_and_backward() -> dict[str, torch.Tensor]:
    net = make_net(batch_norm=True)
    net[1].eval()  # frozen: its backward needs the statistics as they were in the forward

    def step(engine: Engine, batch: Any) -> None:
        loss = cross_entropy(engine.model(batch[0]), batch[1])
        evaluator.run(DataLoader(make_data(5), batch_size=2))
        engine.backward(loss)
        engine.update()

    trainer = Engine(step, net, optimizer=make_optimizer(net))
    evaluator = Engine(eval_step, net, mode="eval", metrics={"accuracy": Accuracy()})
    trainer.run(DataLoader(make_data(12), batch_size=3))
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_an_inner_run_may_stand_between_a_forward_and_its_backward():
    first, second = run_on_ranks(_between_forward_and_backward, 2)
    assert equal_to_the_bit(first, second)


def _validate() -> Any:
    net = make_net()
    trainer = Engine(
        train_step(Case()), net, optimizer=make_optimizer(net), metrics={"loss": Average(lambda output: output["loss"])}
    )
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer.ignite, "running")
    evaluator = Engine(eval_step, net, mode="eval", metrics={"accuracy": Accuracy()})
    Validate(evaluator, DataLoader(make_data(7), batch_size=2)).attach(trainer)
    trainer.run(DataLoader(make_data(24), batch_size=3), max_epochs=2)
    return dict(trainer.state.metrics)


def test_metrics_of_training_and_validation_are_the_same_on_all_ranks():
    first, second = run_on_ranks(_validate, 2)
    assert first == second and first.keys() >= {"loss", "val/accuracy", "running"}


def _running(numbers: list[float], mode: str, epochs: int, of: str) -> list[float]:
    import warnings

    warnings.filterwarnings("ignore", "`epoch_bound` is deprecated", UserWarning)
    source = {"output": lambda: {"output_transform": float}, "metric": lambda: {"src": Average()}}[of]()
    bound = RunningAverage(**source, alpha=0.5, epoch_bound=True)
    metrics = {"value": RunningAverage(**source, alpha=0.5), "bound": bound} if of == "output" else {"value": bound}
    engine = Engine(lambda engine, batch: float(batch), mode=mode, metrics=metrics)
    return list(engine.run(numbers, epochs).metrics.values())


@pytest.mark.parametrize(
    ("numbers", "mode", "epochs", "of", "wanted"),
    [
        ([1.0, 2.0, 3.0], "eval", 1, "output", [2.0, 2.0]),  # rank 0 has 1 and 3, rank 1 has 2
        ([1.0, 2.0, 3.0], "eval", 1, "metric", [2.0]),
        ([1.0], "eval", 1, "output", [1.0, 1.0]),
        ([1.0, 3.0, 5.0, 7.0], "train", 1, "output", [4.0, 4.0]),  # of 2 and 6, as Ignite has it
        ([1.0, 3.0, 5.0, 7.0], "train", 2, "output", [4.5, 4.0]),  # of 2, 6, 2, 6; and of the last two
    ],
)
def test_a_running_average_is_the_mean_over_the_ranks_and_needs_no_batches_of_the_same_number(
    numbers, mode, epochs, of, wanted
):
    assert run_on_ranks(_running, 2, numbers, mode, epochs, of, timeout_sec=20) == [wanted, wanted]


def _local_torchmetrics() -> float:
    if dist.get_rank() == 1:
        return 0.0
    engine = Engine(lambda engine, batch: batch, mode="eval", strategy="single", metrics={"mean": MeanMetric()})
    return float(engine.run([torch.tensor([1.0]), torch.tensor([3.0])]).metrics["mean"])


def test_a_torchmetrics_metric_of_an_engine_on_one_rank_asks_nobody():
    assert run_on_ranks(_local_torchmetrics, 2) == [2.0, 0.0]
