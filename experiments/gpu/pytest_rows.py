"""A pytest plugin that writes a JSON line a test as it ends, to the file named in GPU_RUN_ROWS."""

from __future__ import annotations

import json
import os

import pytest

_tells = False


def pytest_configure(config: pytest.Config) -> None:
    """With pytest-xdist, the process that collects what its workers report tells, and no other."""
    global _tells
    _tells = not hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line a test: when it has run, or when it could not."""
    if not _tells or (report.when != "call" and report.passed):
        return
    row = {
        "name": report.nodeid,
        "ok": not report.failed,
        "outcome": report.outcome if report.when == "call" else f"{report.outcome} in {report.when}",
        "test_s": round(report.duration, 2),
        "why": report.longreprtext[-1500:] if report.failed else "",
    }
    with open(os.environ["GPU_RUN_ROWS"], "a") as file:
        file.write(json.dumps(row) + "\n")
