"""How far cells stand for a whole cluster: `python -m experiments.bench.cells`.

A fleet too large for one process is cut into cells: each a part of the replicas behind a router of its own,
and the same part of the system prompts with all their conversations, as they are in the traffic of all. Cells
know nothing of each other, so each is a process, and a sample of them may do.

    all      replica 0 ... R - 1                      system prompts 0, 1, 2, 3, ...
    cell k   R / N replicas with a router             system prompts k, k + N, k + 2 N, ...

What is lost: a router chooses among R / N replicas, and finds what was computed in its cell. Printed are
figures of the whole run, of all cells together, and of a sample of them, with their distance from the whole
run; and of the sample its 95 % interval, from the differences between its cells.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from experiments.bench.cluster import config
from policies.core.request import Request
from sim.settings.scenario import build_scenario
from sim.workload.base import Arrival, Source


@dataclass(kw_only=True)
class CellSource:
    """Of a traffic of conversations those of one cell; they are numbered from 0."""

    source: Source
    cell: int
    num_cells: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def arrivals(self) -> Iterator[Arrival]:
        """Those behind a system prompt of the cell's."""
        for arrival in self.source.arrivals():
            system_prompt, _ = arrival.request.prompt.segments[0]
            if system_prompt % self.num_cells == self.cell:
                yield arrival

    def follow_up(self, request: Request, now: float, num_output_tokens: int) -> Arrival | None:
        """The next turn."""
        return self.source.follow_up(request, now, num_output_tokens)


class Cell(NamedTuple):
    """What one process has found."""

    requests: pd.DataFrame  # latencies and tokens of each
    num_replicas: int
    busy_s: float  # of all its GPUs
    cpu_s: float
    peak_mib: float


FIGURES = (
    "requests/replica",
    "hit share",
    "TTFT mean ms",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "TPOT mean ms",
    "TPOT p99 ms",
    "E2E mean s",
    "E2E p99 s",
    "GPU s a request",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a figure."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.cells", description=__doc__)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--cells", type=int, default=8, help="must divide the replicas")
    parser.add_argument("--sample", type=int, default=2, help="cells that are to stand for all; at least 2")
    parser.add_argument("--routing", default="prefix_affinity", help="a choice of routing")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated")
    parser.add_argument("--rate", type=float, default=2.0, help="conversations a second and replica")
    parser.set_defaults(replica_seconds=0)
    parser.add_argument("--processes", type=int, default=2, help="at once")
    options = parser.parse_args(arguments)
    if options.replicas % options.cells or not 2 <= options.sample <= options.cells:
        parser.error(
            f"--replicas={options.replicas} --cells={options.cells} --sample={options.sample}: cells must "
            "divide the replicas, and a sample has 2 cells or more"
        )
    with ProcessPoolExecutor(options.processes, get_context("spawn"), max_tasks_per_child=1) as processes:
        whole_run = processes.submit(simulated, options, 0, 1)
        runs = [processes.submit(simulated, options, k, options.cells) for k in range(options.cells)]
        whole, cells = whole_run.result(), [run.result() for run in runs]
    truth, together = figures([whole]), figures(cells)
    sample = cells[: options.sample]
    estimate, each = figures(sample), [figures([cell]) for cell in sample]
    factor = student_t.ppf(0.975, len(sample) - 1) / math.sqrt(len(sample))
    print(
        f"{'':18}{'whole run':>12}{f'{len(cells)} cells':>12}{'':>9}{f'{len(sample)} cells':>12}{'':>9}"
        f"{'95 % interval':>15}"
    )
    for name in FIGURES:
        half = factor * float(np.std([one[name] for one in each], ddof=1))
        print(
            f"{name:18}{truth[name]:12,.5g}{together[name]:12,.5g}{_off(together[name], truth[name])}"
            f"{estimate[name]:12,.5g}{_off(estimate[name], truth[name])}"
            f"{f'+- {half / estimate[name]:.2%}':>15}"
        )
    print(
        f"CPU s {whole.cpu_s:.1f} whole, {sum(cell.cpu_s for cell in cells):.1f} in cells, "
        f"{max(cell.cpu_s for cell in cells):.1f} the longest; peak MiB {whole.peak_mib:,.0f} whole, "
        f"{max(cell.peak_mib for cell in cells):,.0f} a cell"
    )


def simulated(options: argparse.Namespace, cell: int, num_cells: int) -> Cell:
    """One cell of so many; the only one is the whole run."""
    cfg = config(options, options.routing, options.replicas)
    cfg.replicas = options.replicas // num_cells
    scenario = build_scenario(cfg)
    start_s = time.process_time()
    source = scenario.source()
    result = scenario.run(CellSource(source=source, cell=cell, num_cells=num_cells))
    return Cell(
        result.requests[["prompt_tokens", "cached_tokens", "ttft_s", "tpot_s", "e2e_s"]],
        cfg.replicas,
        result.summary["gpu_busy"] * result.summary["simulated_s"] * cfg.replicas,
        time.process_time() - start_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def figures(cells: Sequence[Cell]) -> dict[str, float]:
    """Of all their requests."""
    requests = pd.concat([cell.requests for cell in cells])
    ttft, tpot, e2e = (requests[f"{name}_s"].dropna().to_numpy() for name in ("ttft", "tpot", "e2e"))
    values = (
        len(requests) / sum(cell.num_replicas for cell in cells),
        requests["cached_tokens"].sum() / requests["prompt_tokens"].sum(),
        1e3 * ttft.mean(),
        1e3 * np.percentile(ttft, 50),
        1e3 * np.percentile(ttft, 99),
        1e3 * tpot.mean(),
        1e3 * np.percentile(tpot, 99),
        e2e.mean(),
        np.percentile(e2e, 99),
        sum(cell.busy_s for cell in cells) / len(requests),
    )
    return dict(zip(FIGURES, map(float, values), strict=True))


def _off(value: float, truth: float) -> str:
    return f"{value / truth - 1:+9.2%}"


if __name__ == "__main__":
    main()
