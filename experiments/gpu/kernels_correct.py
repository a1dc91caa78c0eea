"""Checks kernels against their references on the device: tests/kernels, and checks at real models' sizes.

The tests of tests/kernels run on the GPU's tensors (KERNELS_DEVICE) in several processes, while this process
runs the checks of experiments.gpu.kernel_checks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from experiments.gpu.kernel_checks import checks
from experiments.gpu.record import Record

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/kernels"
DRY_RUN = f"{TESTS}/test_norm.py"
MOST_WORKERS = 12


def run(record: Record) -> None:
    """Adds one row per check and one per test; the tests' rows come last."""
    lines = record.folder / "kernels_correct.tests.jsonl"
    lines.unlink(missing_ok=True)
    with (record.folder / "kernels_correct.tests.log").open("w") as log:
        tests = subprocess.Popen(
            _command(record.quick), cwd=ROOT, env=_variables(record, lines), stdout=log, stderr=log
        )
        try:
            for name, check in checks(record.device, record.quick):
                record.measure(name, check)
            failed = sum(row.get("ok") is False or "error" in row for row in record.rows)
            record.add(
                {"name": "checks", "said": f"{len(record.rows)} checks at real sizes, {failed} failed"}
            )
            while tests.poll() is None and record.left_s > 2:
                time.sleep(0.2)
        finally:
            with suppress(ProcessLookupError):
                tests.send_signal(signal.SIGKILL)
            ended = tests.wait()
    _add_tests(record, lines, ended)


def _command(quick: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", DRY_RUN if quick else TESTS]
    command += ["-q", "-m", "not slow", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "experiments.gpu.pytest_rows"]
    workers = min(MOST_WORKERS, (os.cpu_count() or 2) - 2)
    if quick or workers < 2 or importlib.util.find_spec("xdist") is None:
        return command
    return [*command, "-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "24"]


def _variables(record: Record, lines: Path) -> dict[str, str]:
    variables = os.environ | {
        "GPU_RUN_ROWS": str(lines.resolve()),
        "HYPOTHESIS_PROFILE": "new",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic algorithms, which fill memory with NaN
    }
    return variables | ({"KERNELS_DEVICE": "cuda"} if record.device.type == "cuda" else {})


def _add_tests(record: Record, lines: Path, ended: int) -> None:
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    for row in rows:
        record.rows.append(row)
    failed = sum(not row["ok"] for row in rows)
    summary = f"{len(rows)} tests ended, {failed} failed"
    how = {"name": "tests", "said": summary}
    if ended == -signal.SIGKILL:
        how["said"] = f"{summary}; the others ran out of time"
    elif ended not in (0, 1):
        how["error"] = (
            f"pytest ended with exit status {ended}: {_tail(record.folder / 'kernels_correct.tests.log')}"
        )
    record.add(how)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-600:]
