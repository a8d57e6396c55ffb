"""The loop under our engine is a true Ignite engine: it passes Ignite's own tests in its place.

``make test`` fetches those tests from PyTorch-Ignite's source archive; nothing of them is copied here. The only ones
that may fail are those that assert what we hold to be a fault of Ignite's: ignite_suite_expected_failures.txt has their
names with the reasons, and a test that stands there must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXPECTED_FAILURES = HERE / "ignite_suite_expected_failures.txt"
SUITE = Path(sys.prefix) / "ignite-suite"
MODULES = [
    "test_create_supervised",
    "test_custom_events",
    "test_engine",
    "test_engine_state_dict",
    "test_event_handlers",
    "test_memory_leaks",
]
TIMEOUT_SEC = 400


@dataclass(frozen=True)
class Report:
    outcomes: dict[str, str]
    complaints: dict[str, str]
    output: str

    @property
    def failed(self) -> set[str]:
        return {name for name, outcome in self.outcomes.items() if outcome == "failed"}


def expected_failures() -> dict[str, str]:
    """Test id -> reason. One a line: the id, two spaces, a hash, the reason."""
    lines = EXPECTED_FAILURES.read_text().splitlines()
    entries = [line.partition("  # ") for line in lines if line and not line.startswith("#")]
    return {test_id.strip(): reason.strip() for test_id, _, reason in entries}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    if not (SUITE / "tests").is_dir():
        absent = f"Ignite's tests are not in {SUITE}: `make test` fetches them"
        pytest.fail(absent) if os.environ.get("CI") else pytest.skip(absent)
    return run_suite(tmp_path_factory.mktemp("ignite-suite"))


def run_suite(scratch: Path) -> Report:
    """Run the suite in a process of its own, as its authors do: none of our settings, warnings are not errors."""
    (scratch / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-p",
        "ignite_suite_plugin",
    ]
    command += ["-c", str(scratch / "pytest.ini"), "--rootdir", str(SUITE), "--import-mode=prepend"]
    command += ["-W", "ignore::DeprecationWarning", "-m", "not distributed and not multinode_distributed and not tpu"]
    command += [f"tests/ignite/engine/{module}.py" for module in MODULES]
    environment = os.environ | {"PYTHONPATH": str(HERE), "IGNITE_SUITE_REPORT": str(scratch / "report.json")}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        command,
        cwd=SUITE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SEC,
    )
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pytest.fail(f"the suite did not run to its end (exit status {done.returncode}):\n{done.stdout[-8000:]}")
    return Report(**json.loads((scratch / "report.json").read_text()), output=done.stdout)


def test_the_suite_was_run_whole(report):
    ran = Counter(name.partition("::")[0] for name, outcome in report.outcomes.items() if outcome != "skipped")
    assert {f"tests/ignite/engine/{module}.py" for module in MODULES} == ran.keys(), report.output[-2000:]
    assert ran.total() >= 300


def test_no_test_fails_that_asserts_no_fault_of_ignites(report):
    unexpected = sorted(report.failed - expected_failures().keys())
    told = "\n".join(f"--- {test_id}\n{report.complaints[test_id][-1500:]}" for test_id in unexpected)
    assert not unexpected, f"{len(unexpected)} of Ignite's tests fail on IgniteLoop:\n{told}"


def test_every_test_that_is_listed_as_failing_does_fail(report):
    assert not sorted(expected_failures().keys() - report.failed), "these pass (or are gone): take them off the list"


def test_every_listed_failure_gives_its_reason():
    assert not [test_id for test_id, reason in expected_failures().items() if len(reason) < 20]
