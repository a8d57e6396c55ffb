"""What a newcomer runs first: the demo, as ``make demo`` runs it, and the example of the README."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pellucid.engine import list_checkpoints

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "examples" / "digits.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_python(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning:torch.jit._script"]  # as in setup.cfg
    command = [sys.executable, *warnings, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


# ---- the demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo with its default settings, in an empty folder."""
    folder = tmp_path_factory.mktemp("demo")
    return run_python(DIGITS, cwd=folder), folder


def test_the_demo_reads_digits_it_has_never_seen(demo):
    done, _ = demo
    assert done.returncode == 0, done.stderr
    row = re.search(r"^test +300 +\d\.\d+ +(\d\.\d+)$", done.stdout, flags=re.MULTILINE)
    assert row is not None, done.stdout
    assert float(row[1]) >= 0.97


def test_the_demo_runs_unchanged_on_two_ranks(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = subprocess.run(
        [sys.executable, *map(str, torchrun), str(DIGITS), "--epochs", "12"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(train|val|test) +(\d+) +\d\.\d+ +\d\.\d+$", done.stdout, flags=re.MULTILINE)
    assert rows == [("train", "1197"), ("val", "300"), ("test", "300")], "printed once, by rank 0"
    bars = re.findall(r"train epoch \d+/12: 100% (\d+)/(\d+) ", done.stderr)
    assert set(bars) == {("9", "9")}, "of the 19 batches each rank takes 9, and one bar shows them"


def test_the_demo_shows_every_epoch_with_its_validation(demo):
    done, _ = demo
    (epochs,) = re.findall(r"weights of epoch \d+ of (\d+)", done.stdout)
    bars = [line for line in done.stderr.splitlines() if re.match(r"train epoch \d+/30: 100%.*val/accuracy=", line)]
    assert len(bars) == int(epochs)


def test_the_demo_saves_curves_and_checkpoint_and_nothing_else(demo):
    _, folder = demo
    output = folder / "runs" / "digits"
    files = {path.relative_to(output) for path in folder.rglob("*") if path.is_file()}
    checkpoints = {path.parts[1] for path in files if path.parts[0] == "checkpoints"}
    assert files == {Path("curves.png")} | {
        Path("checkpoints", name, file)
        for name in checkpoints
        for file in ("manifest.json", "model.safetensors", "training.pt")
    }
    assert len(checkpoints) == 2, "the best and the newest"
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_with_resume_the_demo_goes_on_to_the_bit(run_demo, tmp_path):
    wanted = run_demo(epochs=2)
    shutil.rmtree(tmp_path / "checkpoints")
    run_demo(epochs=1)
    assert weights_are_equal(run_demo(epochs=2, resume=True), wanted)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(run_demo):
    weights = run_demo(seed=3)
    assert weights_are_equal(weights, run_demo(seed=3))
    assert not weights_are_equal(weights, run_demo(seed=4))


def weights_are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


def test_the_demo_fails_where_the_accuracy_misses(run_demo):
    with pytest.raises(SystemExit, match=r"test accuracy is 0\.\d+, below the 1\.01"):
        run_demo(promised_accuracy=1.01)


@pytest.fixture
def digits() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_demo(digits, tmp_path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Run the example in this process, too short to keep its promise, and return the weights it saved last."""

    def run(
        *, epochs: int = 1, seed: int = 0, promised_accuracy: float = 0.0, resume: bool = False
    ) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(digits, "PROMISED_ACCURACY", promised_accuracy)
        options = {"--epochs": epochs, "--seed": seed, "--device": "cpu", "--output": tmp_path}
        arguments = [str(part) for option in options.items() for part in option]
        monkeypatch.setattr(sys, "argv", ["digits.py", *arguments, *(["--resume"] if resume else [])])
        digits.main()
        return load_file(list_checkpoints(tmp_path / "checkpoints")[0].path / "model.safetensors")

    return run


# ---- the README


def test_the_example_of_the_readme_runs(tmp_path):
    source, *_ = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(source.splitlines()) <= 50, "it no longer fits a screen"
    script = tmp_path / "example.py"
    script.write_text(source, encoding="utf-8")
    done = run_python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reason, accuracy, best = done.stdout.splitlines()[-1].split()
    assert reason in ("completed", "terminated")
    assert float(accuracy) > 0.8 and float(best) > 0.9


def test_what_the_readme_names_is_there():
    paths = set(re.findall(r"\]\((?!https?:)([^)#]+)\)|`((?:tests|benchmarks|examples|docs)/[\w./]+)`", README))
    missing = [path for pair in paths for path in pair if path and not (ROOT / path).exists()]
    assert missing == []
