"""Reads hardware counters of the kernels that have a target, with Nsight Compute (`ncu`) if it is installed.

`python -m experiments.gpu.counters CASE` runs one case, with the profiler on during its last call only; the
part starts it under ncu for each case.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.record import Record, UnavailableError
from experiments.gpu.speed_cases import targeted

CASE_LIMIT_S = 60.0
WARM_CALLS = 2
METRICS: Mapping[str, str] = {
    "gpu__time_duration.sum": "time_ns",
    "dram__bytes.sum": "dram_bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "active_warps_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "launch__registers_per_thread": "registers",
}
"""Counters with the names of our fields, in the base units of ncu."""


def run(record: Record) -> None:
    """Adds a row per case, with the counters of each of its kernels."""
    for case, _ in targeted(record.quick):
        record.measure(case.name, partial(_counted, record, case.name), least_s=10.0)


def _counted(record: Record, name: str) -> dict[str, Any]:
    tool = shutil.which("ncu")
    if tool is None:
        raise UnavailableError("ncu is not installed here")
    log = record.folder / "counters.ncu.log"
    command = [tool, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS), "--log-file", str(log), "-f"]
    command += [sys.executable, "-m", "experiments.gpu.counters", name]
    limit_s = max(1.0, min(CASE_LIMIT_S, record.left_s - 2))
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    kernels = kernels_of(log) if log.exists() else []
    if not kernels:
        raise UnavailableError(f"ncu read no counters: {_reason(log, done.stderr)}")
    return {"kernels": kernels, "said": "; ".join(map(_in_words, kernels))}


def kernels_of(log: Path) -> list[dict[str, Any]]:
    """Returns the counters of each kernel from ncu's CSV, in which the second line has the units."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    found = []
    for row in rows:
        values = {ours: _number(row.get(theirs)) for theirs, ours in METRICS.items()}
        known = {name: value for name, value in values.items() if value is not None}
        found.append({"kernel": row.get("Kernel Name", ""), **known})
    return found


def _in_words(kernel: Mapping[str, Any]) -> str:
    shares = (
        f"{unit} {kernel[key]:.0f} %"
        for unit, key in (("DRAM", "dram_percent"), ("SM", "sm_percent"))
        if key in kernel
    )
    return f"{kernel['kernel']}: {', '.join(shares)}"


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _reason(log: Path, stderr: str) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [line for line in [*lines, *stderr.splitlines()] if "error" in line.lower()]
    return errors[-1][:200] if errors else "it printed no reason"


def main(name: str) -> int:
    """Runs a case, its last call with the profiler on; it is called by ncu."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = {case.name: case for case, _ in targeted(os.environ.get("TRITON_INTERPRET") == "1")}
    call = cases[name].make(device)
    for _ in range(WARM_CALLS):
        call()
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
