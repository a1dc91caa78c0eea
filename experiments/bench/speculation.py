"""CPU time per iteration with and without drafts: `python -m experiments.bench.speculation [--rounds N]`.

Llama-3.1-8B on an H100 with and without EAGLE-3, the same Poisson requests of 512 tokens in and 256 out. Both are
simulated on the general engine and on the lane of simple runs. The four runs of a load alternate, and the
fastest of the rounds counts; the time covers traffic, simulation and tables. Printed is the CPU time per
iteration and per request. A batch is the mean number of decoding sequences per iteration.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from unittest.mock import patch

from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

WORLD = ("engine=vllm", "model=llama3_1_8b", "hardware=h100_sxm", "slo=none", "workload=poisson")
CHOICES = {"without": (), "with": ("speculation=eagle3", "acceptance.rate=0.7")}
LOADS = {2.7: 1500, 17.0: 6000, 33.0: 12000}
"""Requests per second -> number of requests."""
ENGINES = ("general", "lane")


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Lets all replicas that are built within be of one engine."""
    if name == "lane":
        yield
        return
    with (
        patch("sim.engine.lane_replica.suits", lambda _core: False),
        patch("sim.speculation.replica.suits", lambda _core: False),
    ):
        yield


def cost(choice: str, name: str, rate_per_s: float, num_requests: int) -> tuple[float, float]:
    """Simulates one run; returns CPU microseconds per iteration, and the mean batch."""
    traffic = (f"workload.arrivals.rate_per_s={rate_per_s}", f"workload.num_requests={num_requests}")
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(
        [*WORLD, *traffic, *CHOICES[choice]]
    )
    scenario, source = build_run(cfg)
    start_s = time.process_time()
    with engine(name):
        records = scenario.simulate(source)
    taken_s = time.process_time() - start_s
    iterations = records.iterations
    return 1e6 * taken_s / len(iterations), float(iterations["decode_seqs"].mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per load."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the fastest counts")
    options = parser.parse_args(arguments)
    print("us per iteration at requests/s (batch without, with drafts)   without, with drafts, ratio")
    for rate_per_s, num_requests in LOADS.items():
        cells = [(choice, name) for name in ENGINES for choice in CHOICES]
        best: dict[tuple[str, str], float] = {}
        batches: dict[str, float] = {}
        for _ in range(options.rounds):
            for choice, name in cells:
                taken_us, batches[choice] = cost(choice, name, rate_per_s, num_requests)
                best[choice, name] = min(taken_us, best.get((choice, name), inf))
        batch = f"{batches['without']:.1f}, {batches['with']:.1f}"
        for name in ENGINES:
            without, with_drafts = best["without", name], best["with", name]
            print(
                f"{rate_per_s:4g}/s ({batch:>12}) {name:8}{without:8.1f}{with_drafts:8.1f}"
                f"{with_drafts / without:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
