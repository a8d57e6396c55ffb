"""The GAN of the examples keeps what it promises."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

GAN = Path(__file__).parent.parent / "examples" / "gan.py"


@pytest.fixture
def gan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gan", GAN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_digits_are_read_as_those_that_were_asked_for_and_are_no_copies(tmp_path: Path) -> None:
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning:torch.jit._script"]  # as in setup.cfg
    command = [sys.executable, *warnings, str(GAN), "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Updates: {'generator': 1120, 'critic': 1120}" in done.stdout
    found = {
        name: float(value) for name, value in re.findall(r"^(\w[\w ]+?) +(\d\.\d+) +\(promised", done.stdout, re.M)
    }
    assert len(found) == 3 and found["read as asked for"] > 0.85
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "runs" / "gan" / "samples.png"]


def test_a_generator_that_is_not_trained_breaks_the_promise(
    gan: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gan.py", "--epochs", "1", "--device", "cpu", "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^Below what was promised: read as asked for"):
        gan.main()
    assert "Updates: {'generator': 28, 'critic': 28}" in capsys.readouterr().out
