"""Train a small convolutional net to read handwritten digits: 8 x 8 scans that come with scikit-learn, no download.

    make demo
    .venv/bin/python examples/digits.py --epochs 50 --seed 1 --device cpu --output runs/digits
    .venv/bin/python examples/digits.py --resume
    .venv/bin/torchrun --standalone --nproc-per-node 2 examples/digits.py

With torchrun each process trains on batches of its own, and evaluates a part of the images. Every epoch ends with a
validation, and three in a row that bring nothing better end the run. The best weights are then tested on images that
were never looked at before. Learning curves and the best and the newest checkpoint go to the output folder: however a
run was stopped, with --resume the next one goes on from there and ends as it would have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from ignite.metrics import Accuracy, Average, Loss
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from pellucid.engine import CheckpointInfo, Engine, Events, SingleDevice, load_weights, resume, seed_everything
from pellucid.handlers import Checkpoint, EarlyStopping, History, Preemption, ProgressBar, Validate

SIZES = {"train": 1197, "val": 300, "test": 300}  # images
PROMISED_ACCURACY = 0.97


def train_step(engine: Engine, batch: Any) -> dict[str, Tensor]:
    images, digits = batch  # on engine.device already
    loss = F.cross_entropy(engine.model(images), digits)
    engine.backward(loss)
    engine.update()
    return {"loss": loss}


def eval_step(engine: Engine, batch: Any) -> tuple[Tensor, Tensor]:
    images, digits = batch
    return engine.model(images), digits


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def make_loaders() -> dict[str, DataLoader[Any]]:
    """Split the images at random, but in the same way for every seed."""
    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16  # 17 shades of grey, to 0..1
    dataset = TensorDataset(images, torch.tensor(scans.target))
    train, val, test = random_split(dataset, [*SIZES.values()], torch.Generator().manual_seed(0))
    return {
        "train": DataLoader(train, batch_size=64, shuffle=True),
        "val": DataLoader(val, batch_size=100),
        "test": DataLoader(test, batch_size=100),
    }


def make_engines(device: str | None) -> tuple[Engine, Engine]:
    """Return the engine that trains, and the one that evaluates the same model."""
    model = make_model()
    trainer = Engine(
        train_step,
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        strategy="auto" if device is None else SingleDevice(device),
        metrics={"train/loss": Average(lambda output: output["loss"])},
        name="train",
    )
    metrics = {"loss": Loss(F.cross_entropy), "accuracy": Accuracy()}
    evaluator = Engine(eval_step, model, mode="eval", metrics=metrics, name="evaluate")
    return trainer, evaluator


def main() -> None:
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # so small a net gains nothing from more
    seed_everything(args.seed)
    loaders = make_loaders()
    trainer, evaluator = make_engines(args.device)

    Validate(evaluator, loaders["val"], every=Events.EPOCH_COMPLETED, prefix="val/").attach(trainer)
    EarlyStopping("val/loss", mode="min", patience=3).attach(trainer)
    history = History().attach(trainer)
    ProgressBar().attach(trainer)

    checkpoint = Checkpoint(args.output / "checkpoints", monitor="val/loss", mode="min").attach(trainer)
    preemption = Preemption().attach(trainer)

    if args.resume:
        resume(trainer, checkpoint.directory)
    trainer.run(loaders["train"], max_epochs=args.epochs)
    if preemption.received is not None:
        sys.exit(preemption.exit_code)

    best = checkpoint.best
    assert best is not None, "every epoch has a finite loss"
    load_weights(trainer.model, best.path)
    results = {name: evaluator.run(loader).metrics for name, loader in loaders.items()}
    if trainer.state.rank == 0:
        history.plot(x="epoch", title="Handwritten digits").savefig(args.output / "curves.png")
        report(trainer, best, results, args.output)

    if results["test"]["accuracy"] < PROMISED_ACCURACY:
        sys.exit(f"The test accuracy is {results['test']['accuracy']:.4f}, below the {PROMISED_ACCURACY} promised.")


def report(trainer: Engine, best: CheckpointInfo, results: dict[str, Any], output: Path) -> None:
    print(f"\nThe weights of epoch {best.epoch} of {trainer.state.epoch}:\n")
    print(f"{'':8}{'images':>8}{'loss':>10}{'accuracy':>11}")
    for name, metrics in results.items():
        print(f"{name:8}{SIZES[name]:8}{metrics['loss']:10.4f}{metrics['accuracy']:11.4f}")
    print(f"\nLearning curves and checkpoint: {output / 'curves.png'}, {best.path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="the most epochs to train for (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, sample order and dropout (default: 0)")
    parser.add_argument("--device", help="such as cpu or cuda:1, in one process (default: what there is)")
    parser.add_argument("--output", type=Path, default=Path("runs/digits"), help="a folder (default: runs/digits)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the output folder")
    return parser.parse_args()


if __name__ == "__main__":
    main()
