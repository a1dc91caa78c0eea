"""A pytest plugin that writes one JSON line per test, as it ends, to the file named in GPU_RUN_ROWS."""

from __future__ import annotations

import json
import os

import pytest

_is_writer = False


def pytest_configure(config: pytest.Config) -> None:
    """Lets only the controller of pytest-xdist write, not its workers."""
    global _is_writer
    _is_writer = not hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes one line per test: when it has run, or when its setup or teardown has failed."""
    if not _is_writer or (report.when != "call" and report.passed):
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
