"""Checkpoints on ranks: resumed to the bit on as many, and with the same weights and place on another number."""

from __future__ import annotations

import contextlib
import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import States, make_data
from ranks import RankError, run_on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from pellucid.engine import CheckpointError, Engine, Events, load_weights, resume
from pellucid.handlers import EMA, Checkpoint, Preemption

NEVER = Events.ITERATION_COMPLETED(once=10**6)
SAMPLES, BATCH = 48, 3


def make_net(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(dropout), nn.Tanh(), nn.Linear(10, 3))


def make_training(
    directory: str, strategy: str, every: Any, seed: int = 0, steps: int = 2, dropout: float = 0.2, shuffle: bool = True
) -> tuple[Engine, EMA, DataLoader[Any]]:
    torch.manual_seed(seed)
    net = make_net(dropout)

    def step(engine: Engine, batch: Any) -> dict[str, Tensor]:
        inputs, classes = batch
        loss = cross_entropy(engine.model(inputs), classes)
        engine.backward(loss)
        engine.update()
        return {"loss": loss}

    engine = Engine(
        step,
        net,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        strategy=strategy,
        gradient_accumulation_steps=steps,
    )
    Checkpoint(directory, every).attach(engine)
    ema = EMA(0.9).attach(engine)
    return engine, ema, DataLoader(make_data(SAMPLES), batch_size=BATCH, shuffle=shuffle)


def outcome(engine: Engine, ema: EMA) -> States:
    found = {**engine.strategy.full_state_dict(engine.model)}
    found |= {f"average of {key}": value for key, value in ema.weights().items()}
    for number, state in engine.strategy.whole(engine.optimizer.state_dict())["state"].items():
        found[f"momentum {number}"] = state["momentum_buffer"]
    found["counts"] = torch.tensor([engine.state.epoch, engine.state.iteration, engine.state.updates])
    found["random"] = torch.get_rng_state()
    return {key: value.clone() for key, value in found.items()}


def undisturbed(directory: str, strategy: str) -> States:
    engine, ema, loader = make_training(directory, strategy, NEVER)
    engine.run(loader, max_epochs=2)
    return outcome(engine, ema)


def stop_and_resume(directory: str, strategy: str, iteration: int, how: str) -> States:
    """Stop in mid-window or at its end; what comes after is lost, and other objects go on."""
    every = Events.ITERATION_COMPLETED(once=iteration)
    engine, ema, loader = make_training(directory, strategy, every)

    @engine.on(Events.ITERATION_COMPLETED(once=iteration + 1))
    def end(engine: Engine, batch: Any) -> None:
        if how == "error":
            raise KeyError("what is not saved is lost")

    if how == "error":
        with contextlib.suppress(KeyError):
            engine.run(loader, max_epochs=2)
    else:
        engine.run(loader, max_iters=iteration)
    engine, ema, loader = make_training(directory, strategy, NEVER, seed=99)
    found = resume(engine, directory)
    assert found is not None and found.iteration == iteration
    engine.run(loader, max_epochs=2)
    return outcome(engine, ema)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("iteration", "how"), [(3, "error"), (8, "limit"), (11, "limit"), (12, "error")])
def test_a_run_that_is_resumed_on_as_many_ranks_ends_the_same_to_the_bit(tmp_path, strategy, iteration, how):
    wanted = run_on_ranks(undisturbed, 2, str(tmp_path / "none"), strategy)
    found = run_on_ranks(stop_and_resume, 2, str(tmp_path), strategy, iteration, how)
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        differing = [key for key in other if not torch.equal(one[key], other[key])]
        # batch statistics are rank 0's wherever they are used, and those of the others are not saved
        assert [key for key in differing if rank == 0 or "running" not in key] == []
    assert not torch.equal(found[0]["random"], found[1]["random"]), "each rank has gone on in its own way"
    assert len([path for path in tmp_path.iterdir() if path.name != "none"]) == 1


# ---------------------------------------------------------------------- another number of ranks


def save(directory: str, strategy: str, iterations: int) -> States:
    engine, ema, loader = make_training(directory, strategy, NEVER, dropout=0.0, shuffle=False, steps=1)
    engine.run(loader, max_iters=iterations)
    return outcome(engine, ema)


def load(directory: str, strategy: str) -> tuple[States, States, list[int]]:
    elsewhere = f"{directory}/next"
    engine, ema, loader = make_training(elsewhere, strategy, NEVER, seed=99, dropout=0.0, shuffle=False, steps=1)
    resume(engine, directory)
    loaded = outcome(engine, ema)
    seen: list[int] = []
    engine.add_event_handler(
        Events.ITERATION_STARTED, lambda engine, batch: seen.append(int(batch[0][0, 0] * 1000)), last=True
    )
    engine.run(loader, max_epochs=1)
    return loaded, outcome(engine, ema), seen


def alone(function: Any, *args: Any) -> list[Any]:
    return [function(*args)]


@pytest.mark.parametrize(
    ("saved_by", "saved_on", "loaded_by", "loaded_on"),
    [
        ("fsdp", 2, "fsdp", 2),
        ("fsdp", 2, "fsdp", 4),
        ("fsdp", 2, "single", 1),
        ("fsdp", 2, "ddp", 4),
        ("ddp", 2, "fsdp", 2),
        ("ddp", 2, "single", 1),
        ("single", 1, "ddp", 2),
        ("single", 1, "fsdp", 2),
    ],
)
def test_weights_optimizer_and_place_load_under_another_strategy_and_number_of_ranks(
    tmp_path, saved_by, saved_on, loaded_by, loaded_on
):
    iterations = 8 // saved_on
    run = alone if saved_on == 1 else lambda *args: run_on_ranks(args[0], saved_on, *args[1:])
    before = run(save, str(tmp_path), saved_by, iterations)[0]
    run = alone if loaded_on == 1 else lambda *args: run_on_ranks(args[0], loaded_on, *args[1:])
    found = run(load, str(tmp_path), loaded_by)
    for loaded, after, seen in found:
        for key in set(before) - {"random", "counts"}:
            assert torch.equal(loaded[key], before[key]), key
        assert len(seen) == 8 // loaded_on, "of 16 batches 8 are left"
        assert not torch.equal(after["0.weight"], before["0.weight"])
    inputs = make_data(SAMPLES).tensors[0]
    left = [int(inputs[place, 0] * 1000) for place in range(24, 48, 3)]
    assert [one for row in zip(*(seen for _, _, seen in found), strict=True) for one in row] == left
    plain = make_net()
    (folder,) = [path for path in tmp_path.iterdir() if "iteration" in path.name]
    load_weights(plain, folder)
    assert torch.equal(plain.state_dict()["0.weight"], before["0.weight"])


def save_in_a_window(directory: str) -> None:
    engine, _, loader = make_training(directory, "ddp", Events.ITERATION_COMPLETED, dropout=0.0, shuffle=False, steps=2)
    engine.run(loader, max_iters=1)


def load_in_a_window(directory: str, strategy: str) -> States:
    engine, _, loader = make_training(directory, strategy, NEVER, seed=99, dropout=0.0, shuffle=False, steps=2)
    resume(engine, directory)
    engine.model.eval()  # no batch statistics, which ranks have for themselves
    for module in engine.model.modules():
        module.eval()
    engine.run(loader, max_iters=2)
    return {key: value.clone() for key, value in engine.strategy.full_state_dict(engine.model).items()}


def test_gradients_of_a_window_in_progress_keep_their_mean(tmp_path):
    run_on_ranks(save_in_a_window, 2, str(tmp_path))
    with tempfile.TemporaryDirectory() as copy:
        import shutil

        shutil.copytree(tmp_path, copy, dirs_exist_ok=True)
        on_two = run_on_ranks(load_in_a_window, 2, copy, "ddp")[0]
    on_four = run_on_ranks(load_in_a_window, 4, str(tmp_path), "ddp")[0]
    assert on_two.keys() == on_four.keys()
    assert not torch.equal(on_two["0.weight"], make_net().state_dict()["0.weight"])


# ---------------------------------------------------------------------- errors and signals


def save_on_a_full_disk(directory: str) -> None:
    engine, _, loader = make_training(directory, "ddp", Events.EPOCH_COMPLETED)

    own = torch.save

    def fail(value: Any, file: Any, **options: Any) -> None:
        if isinstance(file, Path):  # and not memory, in which torch pickles tensors
            raise OSError(errno.ENOSPC, "No space left on device")
        own(value, file, **options)

    torch.save = fail
    try:
        engine.run(loader, max_epochs=1)
    except OSError:
        assert dist.get_rank() == 0
    except CheckpointError as error:
        assert dist.get_rank() == 1 and "rank 0 could not write the checkpoint: OSError" in str(error)
    else:
        raise AssertionError("nothing was said")
    finally:
        torch.save = own


def test_what_rank_0_cannot_write_is_an_error_on_all(tmp_path):
    run_on_ranks(save_on_a_full_disk, 2, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def resume_what_one_cannot_read(directory: str) -> None:
    engine, _, loader = make_training(directory, "ddp", Events.EPOCH_COMPLETED)
    engine.run(loader, max_epochs=1)
    own = torch.load

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the file server is gone")

    if dist.get_rank() == 1:
        torch.load = fail
    try:
        with pytest.raises(CheckpointError, match="cannot be read"):
            resume(engine, directory)
    finally:
        torch.load = own


def test_what_one_rank_cannot_read_is_an_error_on_all(tmp_path):
    run_on_ranks(resume_what_one_cannot_read, 2, str(tmp_path))


def hear_a_signal(directory: str) -> tuple[int, int, str, int]:
    import os
    import signal

    engine, _, loader = make_training(directory, "ddp", NEVER)
    before = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption().attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=3))
    def send(engine: Engine, batch: Any) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    engine.run(loader, max_epochs=4)
    assert signal.getsignal(signal.SIGUSR1) is before
    return engine.state.iteration, preemption.exit_code, engine.state.stop_reason, int(preemption.received or 0)


def test_a_signal_that_one_rank_hears_stops_all_with_a_checkpoint(tmp_path):
    import signal

    first, second = run_on_ranks(hear_a_signal, 2, str(tmp_path))
    assert first == second == (4, 128 + signal.SIGUSR1, "terminated", signal.SIGUSR1)
    assert [path.name for path in tmp_path.iterdir()] == ["0001_epoch_1_iteration_4"], (
        "one after the one it was heard in"
    )


def resume_in_another_model(directory: str) -> None:
    engine, _, loader = make_training(directory, "ddp", Events.EPOCH_COMPLETED)
    engine.run(loader, max_epochs=1)
    other = Engine(lambda engine, batch: None, nn.Linear(1, 1), strategy=engine.strategy)
    resume(other, directory)


def test_what_does_not_fit_is_an_error_on_every_rank(tmp_path):
    with pytest.raises(RankError, match=r"the weights in .* do not fit") as error:
        run_on_ranks(resume_in_another_model, 2, str(tmp_path))
    assert error.value.kind == "CheckpointError"


def test_the_files_of_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    run_on_ranks(save, 2, str(tmp_path), "fsdp", 2)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors", "training.pt"]
