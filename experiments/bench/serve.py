"""Latencies of `windtunnel serve` against those of `windtunnel simulate`, on the same requests.

    python -m experiments.bench.serve --rate 10 50 200 --seconds 10 -- replicas=4

The server runs in another process; this one sends the requests as `windtunnel observe` does. Printed are the
mean and p99 of TTFT, TPOT and E2E as a client sees them, their ratio to the simulated ones, the CPU time of
the server per token, and the streams that were open. Server and client need a core each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.app.terminal import plain_table, terminal_console
from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from sim import simulate
from sim.metrics.measured import measure
from sim.metrics.settings import MetricsSettings
from sim.workload.arrivals import Poisson
from sim.workload.distributions import Lognormal
from sim.workload.lengths import Lengths
from sim.workload.synthetic import Synthetic

LATENCIES = ("ttft", "tpot", "e2e")
STARTUP_S = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each rate and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, nargs="*", default=[10.0, 50.0, 200.0], help="requests/s")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the arrivals at each rate")
    parser.add_argument("--prompt", type=float, default=512, help="mean prompt tokens")
    parser.add_argument("--output", type=float, default=64, help="mean output tokens")
    parser.add_argument("overrides", nargs="*", help="settings of the scenario")
    given = parser.parse_args(arguments)
    rows: list[list[str]] = [
        ["requests/s", "streams", "latency", "mean ms", "ratio", "p99 ms", "ratio", "us/token"]
    ]
    for rate in given.rate:
        workload = Synthetic(
            arrivals=Poisson(rate_per_s=rate),
            lengths=Lengths(
                prompt_tokens=Lognormal(mean=given.prompt, cv=0.5),
                output_tokens=Lognormal(mean=given.output, cv=0.5),
            ),
            duration_s=given.seconds,
        )
        rows += compare(workload, given.overrides, f"{rate:g}")
    terminal_console().print(plain_table(rows))


def compare(workload: Synthetic, overrides: Sequence[str], label: str) -> list[list[str]]:
    """Serves and simulates a workload; returns a row per latency."""
    with serving(*overrides) as (url, process):
        before_s = cpu_s(process.pid)
        observed = asyncio.run(observe(ObserveSettings(url=url, workload=workload)))
        used_s = cpu_s(process.pid) - before_s
    found = figures_of(observed)
    summary = simulate(*overrides, workload=workload).summary
    num_tokens = sum(reply.num_tokens for reply in observed.load.replies)
    rows = []
    for name in LATENCIES:
        cells = [label, f"{found['streams']:.0f}", name.upper()]
        for statistic in ("mean_s", "p99_s"):
            seen_s, simulated_s = found[name][statistic], summary[name][statistic]
            cells += [f"{1e3 * seen_s:.2f}", f"{seen_s / simulated_s:.3f}"]
        rows.append([*cells, f"{1e6 * used_s / num_tokens:.1f}"])
    return rows


def figures_of(observed: Observed) -> dict[str, Any]:
    """Returns the latencies that the client has seen, and the mean number of open streams."""
    load = observed.load
    records = records_of(load.replies, load.end_s, interrupted=False)
    measured = measure(records, MetricsSettings(), None)
    return {"streams": measured.table["e2e_s"].sum() / load.end_s, **measured.figures(records, None)}


@contextmanager
def serving(*overrides: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Starts `windtunnel serve` on a free port; yields its URL and its process, which ends afterwards."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.app.cli", "serve", "port=0", "output.report=false"]
        process = subprocess.Popen(
            [*command, *overrides, f"hydra.run.dir={folder}"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0], process
        finally:
            process.terminate()
            process.communicate(timeout=STARTUP_S)


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
