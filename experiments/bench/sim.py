"""How fast the simulator is: `python -m experiments.bench.sim [case ...]` (or `make bench`).

Prints CPU time a request and an iteration, and the peak memory of each case, each in a process of its own.
Counted: making the traffic, simulating, and the tables of requests, iterations and gaps in memory. Not
counted: imports, figures, files, report. Machines differ and are noisy, so SimPy's own loop of bare timeouts
is timed beside every repetition, and the last column is the cost of a request in such timeouts (median).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import simpy

from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
POISSON = ("workload=poisson", "model=llama3_1_8b", "hardware=h100_sxm", "caching=paged")
CASES = {
    "a": (
        "10,000 Poisson requests, 8/s, 512 in, 256 out, one replica",
        (*POISSON, "workload.num_requests=10000", "workload.arrivals.rate_per_s=8"),
    ),
    "b": ("the Azure conversation trace, one replica", ("workload=azure_csv", "caching=paged")),
    "c": (
        "100,000 Poisson requests, 80/s, 512 in, 256 out, ten replicas",
        (*POISSON, "workload.num_requests=100000", "workload.arrivals.rate_per_s=80", "replicas=10"),
    ),
}
NUM_TIMEOUTS = 100_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.sim", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="a, b, c; all if none is named")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; the fastest counts")
    parser.add_argument("--trace", type=Path, default=SHARED_TRACES / "azure_2023_conv.csv.gz")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        _measure(options.cases[0], options.repeat, options.trace)
        return
    heading = f"{'CPU s':>7} {'us/request':>11} {'us/iteration':>13} {'peak MiB':>9} {'timeouts/request':>17}"
    print(f"{'':4}{heading}  case")
    for case in options.cases or CASES:
        command = [sys.executable, "-m", "experiments.bench.sim", case, "--in-process"]
        subprocess.run([*command, f"--repeat={options.repeat}", f"--trace={options.trace}"], check=True)


def _measure(case: str, repeat: int, trace: Path) -> None:
    """Print one line."""
    name, overrides = CASES[case]
    if "workload=azure_csv" in overrides:
        if not trace.exists():
            print(f"{case:4}not measured: no trace at {trace}; name one with --trace=FILE")
            return
        overrides = (*overrides, f"workload.path={trace}")
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(overrides))
    best_s, peak_mib, in_timeouts = float("inf"), 0.0, []
    for _ in range(repeat):
        scenario, _ = build_run(cfg)
        before_s = timeout_s()
        start_s = time.process_time()
        records = scenario.simulate(scenario.source())
        cpu_s = time.process_time() - start_s
        best_s = min(best_s, cpu_s)
        # Of the first repetition: later ones add what the allocator has not given back.
        peak_mib = peak_mib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        in_timeouts.append(2 * cpu_s / (before_s + timeout_s()))
        num_requests, num_iterations = len(records.requests), len(records.iterations)
        del records
    print(
        f"{case:4}{best_s:7.2f} {best_s / num_requests * 1e6:11.1f} {best_s / num_iterations * 1e6:13.2f} "
        f"{peak_mib:9.0f} {median(in_timeouts) / num_requests:17.0f}  {name}"
    )


def timeout_s() -> float:
    """CPU seconds of one SimPy timeout, the yardstick."""

    def sleep(env: simpy.Environment) -> simpy.events.ProcessGenerator:
        for _ in range(NUM_TIMEOUTS):
            yield env.timeout(1)

    env = simpy.Environment()
    env.process(sleep(env))
    start_s = time.process_time()
    env.run()
    return (time.process_time() - start_s) / NUM_TIMEOUTS


if __name__ == "__main__":
    main()
