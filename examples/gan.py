"""Train a small GAN to write handwritten digits, 8 x 8 like the scans that come with scikit-learn: no download.

    .venv/bin/python examples/gan.py
    .venv/bin/python examples/gan.py --epochs 100 --seed 1 --device cpu --output runs/gan

Two models, two optimizers: the generator turns noise and a digit into an image, and the critic tells such images from
scans. In the end a reader that has only seen scans must find, in the images, the digits that were asked for; and the
images must be neither copies of scans nor all alike.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from ignite.metrics import Average
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from pellucid.engine import Engine, SingleDevice
from pellucid.handlers import EMA, ProgressBar

NOISE = 32  # numbers that an image is made of, besides its digit
PROMISES = {"read as asked for": 0.85, "far from scans": 0.8, "far from each other": 0.6}


class Generator(nn.Module):
    """Noise of shape (n, 32) and digits of shape (n,) to images of shape (n, 64), from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NOISE + 10, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.BatchNorm1d(256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.Tanh(),
        )

    def forward(self, noise: Tensor, digits: Tensor) -> Tensor:
        images: Tensor = self.layers(torch.cat([noise, F.one_hot(digits, 10)], dim=1))
        return images


class Critic(nn.Module):
    """Images of shape (n, 64) and their digits to the logits of being a scan, of shape (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64 + 10, 256),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(256, 256),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(256, 1),
        )

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([images, F.one_hot(digits, 10)], dim=1))
        return logits.squeeze(1)


def train_step(engine: Engine, batch: Any) -> dict[str, Tensor]:
    scans, digits = batch
    generator, critic = engine.model["generator"], engine.model["critic"]
    images = generator(torch.randn(len(scans), NOISE, device=engine.device), digits)

    critic_loss = (F.softplus(-critic(scans, digits)) + F.softplus(critic(images.detach(), digits))).mean()
    engine.backward(critic_loss, optimizer="critic")
    engine.update("critic")

    generator_loss = F.softplus(-critic(images, digits)).mean()
    engine.backward(generator_loss, optimizer="generator")  # the loss goes through the critic, but does not train it
    engine.update("generator")
    return {"critic": critic_loss, "generator": generator_loss}


def make_adam(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=5e-4, betas=(0.5, 0.99))


def load_scans() -> tuple[Tensor, Tensor]:
    scans = load_digits()
    return torch.tensor(scans.data, dtype=torch.float32) / 8 - 1, torch.tensor(scans.target)


@torch.no_grad()
def write(generator: nn.Module, digits: Tensor, device: torch.device) -> Tensor:
    """Return an image of each digit."""
    generator.eval()
    images: Tensor = generator(torch.randn(len(digits), NOISE, device=device), digits.to(device))
    return images.cpu()


def judge(images: Tensor, asked_for: Tensor, scans: Tensor, digits: Tensor) -> dict[str, float]:
    """Return how many images are read right, and their mean distances beside those that scans have."""
    reader = KNeighborsClassifier(n_neighbors=1).fit(scans.numpy(), digits.numpy())
    between_scans = torch.cdist(scans, scans).fill_diagonal_(torch.inf)
    return {
        "read as asked for": float(reader.score(images.numpy(), asked_for.numpy())),
        "far from scans": float(torch.cdist(images, scans).amin(1).mean() / between_scans.amin(1).mean()),
        "far from each other": float(mean_distance(images, asked_for) / mean_distance(scans, digits)),
    }


def mean_distance(images: Tensor, digits: Tensor) -> Tensor:
    """Return the mean distance of two images of the same digit."""
    return torch.stack([torch.pdist(images[digits == digit]).mean() for digit in range(10)]).mean()


def save_samples(images: Tensor, file: Path) -> None:
    rows = images[:100].view(10, 10, 8, 8).permute(0, 2, 1, 3).reshape(80, 80)  # each with the digits from 0 to 9
    file.parent.mkdir(parents=True, exist_ok=True)
    plt.imsave(file, rows.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy(), cmap="gray", vmin=-1, vmax=1)


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # so small nets gain nothing from more
    scans, digits = load_scans()
    loader = DataLoader(TensorDataset(scans, digits), batch_size=64, shuffle=True, drop_last=True)
    models = {"generator": Generator(), "critic": Critic()}

    trainer = Engine(
        train_step,
        models,
        optimizer={name: make_adam for name in models},
        strategy=SingleDevice(args.device),
        metrics={name: Average(lambda output, name=name: output[name]) for name in models},
        name="gan",
    )
    ema = EMA(decay=0.995, model=models["generator"]).attach(trainer)
    ProgressBar().attach(trainer)
    trainer.run(loader, max_epochs=args.epochs)

    asked_for = torch.arange(1000) % 10
    with ema.applied():  # averaged weights write best
        images = write(models["generator"], asked_for, trainer.device)
    save_samples(images, args.output / "samples.png")

    print(f"Updates: {dict(trainer.state.updates_by_optimizer)}. A hundred of the images: {args.output}/samples.png\n")
    found = judge(images, asked_for, scans, digits)
    for name, value in found.items():
        print(f"{name:20}{value:7.3f}   (promised: {PROMISES[name]})")
    if broken := [name for name, value in found.items() if value < PROMISES[name]]:
        sys.exit(f"Below what was promised: {', '.join(broken)}.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="(default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and sample order (default: 0)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: the accelerator, if there is one)")
    parser.add_argument("--output", type=Path, default=Path("runs/gan"), help="a folder (default: runs/gan)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
