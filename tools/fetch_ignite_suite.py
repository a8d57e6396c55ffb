"""Fetch the tests that PyTorch-Ignite ships in its source archive, for tests/test_ignite_suite.py to run.

The archive is the one of the installed version. Only its ``tests`` folder is unpacked: the ``ignite`` beside it would
be imported in the place of the installed one.

Usage: python tools/fetch_ignite_suite.py FOLDER
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

DISTRIBUTION = "pytorch-ignite"


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        archive = download_source(Path(scratch))
        unpacked = unpack_tests(archive, Path(scratch))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.move(str(unpacked), folder / "tests")


def download_source(into: Path) -> Path:
    """Let pip fetch the source archive; pip knows the user's settings for that, and checks its hash."""
    requirement = f"{DISTRIBUTION}=={version(DISTRIBUTION)}"
    options = ["--quiet", "--no-deps", "--no-binary", DISTRIBUTION, "--dest", str(into)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (archive,) = into.glob("*.tar.gz")
    return archive


def unpack_tests(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].split("/")[0]
        tests = [member for member in tar.getmembers() if member.name.startswith(f"{root}/tests/")]
        if hasattr(tarfile, "data_filter"):  # 3.10.12, 3.11.4, and later
            tar.extractall(into, tests, filter="data")
        else:
            tar.extractall(into, tests)
    return into / root / "tests"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
