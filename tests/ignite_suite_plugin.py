"""A pytest plugin: under it, Ignite's own tests see our loop as ``ignite.engine.Engine``.

tests/test_ignite_suite.py runs pytest with it in a process of its own. In that process only, and before any test module
is imported, the two names under which Ignite exports its engine are bound to ``IgniteLoop``. The outcome of each test
goes, as JSON, to the file that IGNITE_SUITE_REPORT names. IGNITE_SUITE_ENGINE=ignite leaves Ignite's engine in place:
that tells a fault of ours from one of the suite itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import ignite.engine
import ignite.engine.engine
import pytest

outcomes: dict[str, str] = {}
complaints: dict[str, str] = {}


def pytest_configure() -> None:
    if os.environ.get("IGNITE_SUITE_ENGINE") == "ignite":
        return
    from pellucid.engine._loop import IgniteLoop

    ignite.engine.Engine = IgniteLoop
    ignite.engine.engine.Engine = IgniteLoop


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = "failed" if report.failed else report.outcome
    if report.failed:
        complaints[report.nodeid] = report.longreprtext


def pytest_sessionfinish() -> None:
    report = {"outcomes": outcomes, "complaints": complaints}
    Path(os.environ["IGNITE_SUITE_REPORT"]).write_text(json.dumps(report))
