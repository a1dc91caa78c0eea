"""Accuracy of simulating a cluster in cells: `python -m experiments.bench.cells`.

A fleet too large for one process is divided into cells. Each cell has its share of the replicas behind a
router of its own, and its share of the system prompts with all their conversations, unchanged from the whole
traffic. Cells are independent, so each runs in a process of its own, and a sample of cells may suffice.

    whole    replicas 0 ... R - 1 with one router     system prompts 0, 1, 2, 3, ...
    cell k   R / N replicas with a router             system prompts k, k + N, k + 2 N, ...

The approximation: a router chooses among R / N replicas, and finds only prefixes computed in its own cell.
Printed are the figures of the whole run, of all cells together and of a sample of cells, each with its
deviation from the whole run, and the 95 % confidence interval of the sample from the variance between cells.
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
    """Conversations of one cell, taken from the source of the whole traffic; cells are numbered from 0."""

    source: Source
    cell: int
    num_cells: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the arrivals whose system prompt belongs to the cell."""
        for arrival in self.source.arrivals():
            system_prompt, _ = arrival.request.prompt.segments[0]
            if system_prompt % self.num_cells == self.cell:
                yield arrival

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the next turn of a conversation; empty if it has ended."""
        return self.source.follow_ups(request, now, num_output_tokens)


class Cell(NamedTuple):
    """Results of one process."""

    requests: pd.DataFrame  # latencies and tokens of each request
    num_replicas: int
    busy_s: float  # GPU seconds, summed over all GPUs
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
    "GPU s/request",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per figure."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, default=64, help="size of the fleet")
    parser.add_argument("--cells", type=int, default=8, help="number of cells; must divide --replicas")
    parser.add_argument("--sample", type=int, default=2, help="number of cells in the sample; at least 2")
    parser.add_argument("--routing", default="prefix_affinity", help="a choice of routing=")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated seconds")
    parser.add_argument("--rate", type=float, default=2.0, help="conversations per second and replica")
    parser.set_defaults(replica_seconds=0)
    parser.add_argument("--processes", type=int, default=2, help="processes that run at once")
    options = parser.parse_args(arguments)
    if options.replicas % options.cells or not 2 <= options.sample <= options.cells:
        parser.error(
            f"--replicas={options.replicas} --cells={options.cells} --sample={options.sample}: --cells must "
            "divide --replicas, and --sample must be from 2 to --cells"
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
        f"CPU s: {whole.cpu_s:.1f} whole run, {sum(cell.cpu_s for cell in cells):.1f} all cells, "
        f"{max(cell.cpu_s for cell in cells):.1f} slowest cell; peak MiB: {whole.peak_mib:,.0f} whole run, "
        f"{max(cell.peak_mib for cell in cells):,.0f} largest cell"
    )


def simulated(options: argparse.Namespace, cell: int, num_cells: int) -> Cell:
    """Simulates one cell; if there is only one cell, it is the whole run."""
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
    """Returns the figures of `FIGURES` over the requests of all the cells."""
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
