"""CPU time per iteration with and without drafts: `python -m experiments.bench.speculation [--rounds N]`.

Llama-3.1-8B on an H100 with and without EAGLE-3, the same Poisson requests of 512 tokens in and 256 out.
The two runs of a load alternate, and the fastest of the rounds counts; the time covers traffic, simulation
and tables. A batch is the mean number of decoding sequences per iteration.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

WORLD = ("engine=vllm", "model=llama3_1_8b", "hardware=h100_sxm", "slo=none", "workload=poisson")
CHOICES = {"without": (), "with": ("speculation=eagle3", "acceptance.rate=0.7")}
LOADS = {3.2: 1000, 23.0: 3000, 37.0: 5000}
"""Requests per second -> number of requests."""


class Cost(NamedTuple):
    """The CPU time of one run."""

    seconds: float
    num_iterations: int
    batch: float


def cost(choice: str, rate_per_s: float, num_requests: int) -> Cost:
    """Simulates one run."""
    traffic = (f"workload.arrivals.rate_per_s={rate_per_s}", f"workload.num_requests={num_requests}")
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(
        [*WORLD, *traffic, *CHOICES[choice]]
    )
    scenario, source = build_run(cfg)
    start_s = time.process_time()
    records = scenario.simulate(source)
    taken_s = time.process_time() - start_s
    iterations = records.iterations
    return Cost(taken_s, len(iterations), float(iterations["decode_seqs"].mean()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints two lines per load."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the fastest counts")
    options = parser.parse_args(arguments)
    columns = f"{'without':>10}{'with':>8}{'ratio':>7}"
    print(f"{'':28}{'us per iteration':>25}{'us per request':>25}")
    print(f"{'requests/s (batches)':28}{columns}{columns}")
    for rate_per_s, num_requests in LOADS.items():
        best: dict[str, Cost] = {}
        for _ in range(options.rounds):
            for choice in CHOICES:
                found = cost(choice, rate_per_s, num_requests)
                best[choice] = min(found, best.get(choice, found))
        runs = [best[choice] for choice in CHOICES]
        label = f"{rate_per_s:g} ({runs[0].batch:.0f}, {runs[1].batch:.0f})"
        each = [1e6 * run.seconds / run.num_iterations for run in runs]
        whole = [1e6 * run.seconds / num_requests for run in runs]
        figures = "".join(f"{a:10.1f}{b:8.1f}{b / a:7.2f}" for a, b in (each, whole))
        print(f"{label:28}{figures}", flush=True)


if __name__ == "__main__":
    main()
