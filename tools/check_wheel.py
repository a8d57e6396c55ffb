"""Check that what users install is whole: build a wheel, install it into a new environment, import and run it there.

The source archive is built first and the wheel out of it, from a copy of the tree, so that nothing is left behind and
nothing left behind before gets in. The new environment borrows torch and the rest from the environment that runs this
script. It borrows the packages only, through a path file: the editable install of pellucid there is a hook that another
path file sets up, and path files in a borrowed folder are not read.

Usage: .venv/bin/python tools/check_wheel.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"pellucid/engine": ROOT / "engine", "pellucid/handlers": ROOT / "handlers"}

TRIAL = """
import pathlib, sys
from importlib.metadata import version

import pellucid.engine, pellucid.handlers

for package in (pellucid.engine, pellucid.handlers):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), f"{package.__file__} is outside {sys.prefix}"

engine = pellucid.engine.Engine(lambda engine, batch: 2 * batch)
result = engine.run([1, 2, 3], max_epochs=2)
assert (result.epoch, result.iteration) == (2, 6), result

print(f"pellucid {version('pellucid')}: the installed wheel imports and runs")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch))
        check_contents(wheel)
        python = make_environment(Path(scratch) / "environment", wheel)
        elsewhere = Path(scratch) / "elsewhere"
        elsewhere.mkdir()
        subprocess.run([python, "-I", "-c", TRIAL], check=True, cwd=elsewhere)


def build_wheel(scratch: Path) -> Path:
    """Build with the backend that is installed here: no environment is made for the build, nothing is fetched."""
    source = scratch / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist"))
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(scratch / "dist"), str(source)]
    done = subprocess.run(build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe wheel does not build")
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """The wheel holds every module and type marker of the two folders, the licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        has_licence = any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    wanted = {f"{package}/{path}" for package, folder in PACKAGES.items() for path in shipped_files(folder)}
    if names != wanted:
        sys.exit(f"{wheel.name} lacks {sorted(wanted - names)} and holds what it should not: {sorted(names - wanted)}")
    if not has_licence:
        sys.exit(f"{wheel.name} does not hold the LICENSE file")


def shipped_files(folder: Path) -> Iterable[str]:
    for path in folder.rglob("*"):
        if path.suffix == ".py" or path.name == "py.typed":
            yield path.relative_to(folder).as_posix()


def make_environment(folder: Path, wheel: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    lib = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(lib, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, "check"], check=True)
    return python


if __name__ == "__main__":
    main()
