"""CPU time of this checkout and of another one: `python -m experiments.bench.paired OTHER_CHECKOUT`.

Each run is a whole `windtunnel simulate` in its own process, without report and tables; its CPU seconds
are those of the process and its children, user and system. In each round both checkouts run once, in turns
first, so that a change of the machine's speed meets both. Prints the median and the minimum of each, the
ratio of the minima (below 1: this checkout is faster), and whether both wrote the same summary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from experiments.bench.commands import run_in
from experiments.bench.sim import CASES, ON_H100, SHARED_TRACES, VLLM, poisson, with_trace

HERE = Path(__file__).resolve().parents[2]
TALKS = (*VLLM, "workload=conversation", "workload.arrivals.rate_per_s=4", "workload.think_time_s.mean=5")
TWO_POOLS = (
    *(text for text in poisson(6000, 3) if not text.startswith("replicas=")),
    "pools=disaggregated",
    "pools.prefill.replicas=2",
    "pools.decode.replicas=2",
)
LORA = (*ON_H100, "workload=lora", "workload.of.num_requests=4000", "workload.of.arrivals.rate_per_s=20")
SHORT_OF_KV = ("workload.arrivals.rate_per_s=25", "engine.num_kv_blocks=2500")
DRAFTS = (*poisson(4000), "speculation=eagle3")

RUNS: dict[str, tuple[str, ...]] = {
    "start": (*VLLM, "workload=poisson", "workload.num_requests=10"),
    "W1": CASES["a"][1],
    "W3": CASES["b"][1],
    "W4": CASES["c"][1],
    "tiers": (*TALKS, "workload.num_conversations=600", "caching=tiered", "engine.num_kv_blocks=4096"),
    "prefixes": (*TALKS, "workload.num_conversations=1200"),
    "failures": (
        *poisson(8000, 4),
        "failures=random_crashes",
        "failures.events.0.mtbf_s=60",
        "failures.events.0.mttr_s=5",
        "recovery=tokens",
    ),
    "disaggregation": TWO_POOLS,
    "adapters": (*LORA, "adapters=fixed_slots"),
    "sampling": (*poisson(1500), "caching=paged", "workload.branching.width=4"),
    "autoscaling": (
        *poisson(8000, 4, "least_outstanding"),
        "scaling=queue_length",
        "cold_start=in_memory",
    ),
    "patience": (*poisson(6000), "workload.arrivals.rate_per_s=80", "workload.patience_s=5"),
    "preemptions": (*poisson(3000), *SHORT_OF_KV),
    "swaps": (*poisson(3000), *SHORT_OF_KV, "scheduling.preemption_mode=swap", "engine.swap_space_gib=64"),
    "pipeline": (*poisson(4000), "pipeline_parallel_size=2"),
    "static": ("engine=static", *poisson(6000)[1:]),
    "drafts": (*DRAFTS, "draft_length=fixed"),
    "adaptive_drafts": (*DRAFTS, "draft_length=adaptive"),
}
"""Name of a run -> overrides of `windtunnel simulate`. `start` is what every other run contains."""

QUIET = ("output.report=false", "output.tables=false", "output.progress=false")


class Times(NamedTuple):
    """The CPU seconds of a run in one checkout, one per round, and the summary of the last."""

    cpu_s: list[float]
    summary: list[Any]


class FailedError(Exception):
    """A command that ends with an error."""


def cpu_s_of(checkout: Path, overrides: Sequence[str]) -> tuple[float, Any]:
    """Simulates in a checkout; returns the CPU seconds and the summary. Raises FailedError."""
    with TemporaryDirectory() as folder:
        words = ("simulate", *overrides, *QUIET, f"hydra.run.dir={folder}/run")
        took = run_in(checkout, words)
        if took.error is not None:
            raise FailedError(f"in {checkout}: {took.error}")
        return took.cpu_s, json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))


def measure(checkouts: Sequence[Path], overrides: Sequence[str], rounds: int) -> list[Times]:
    """Runs alternately in all checkouts. Raises FailedError."""
    found = [Times([], []) for _ in checkouts]
    for number in range(rounds):
        pairs = list(zip(checkouts, found, strict=True))
        for checkout, times in pairs if number % 2 == 0 else reversed(pairs):
            cpu_s, summary = cpu_s_of(checkout, overrides)
            times.cpu_s.append(cpu_s)
            times.summary[:] = [summary]
    return found


def line_of(mine: Times, others: Times) -> str:
    """Returns the figures of a run as a line of the table."""
    figures = (median(mine.cpu_s), min(mine.cpu_s), median(others.cpu_s), min(others.cpu_s))
    ratio = min(mine.cpu_s) / min(others.cpu_s)
    same = "same" if mine.summary == others.summary else "DIFFERS"
    return "".join(f"{seconds:9.2f}" for seconds in figures) + f"{ratio:9.2f}  {same:8}"


def print_runs(checkouts: Sequence[Path], runs: Mapping[str, Sequence[str]], rounds: int) -> bool:
    """Prints a line per run; returns whether all have run."""
    columns = f"{'median':>9}{'min':>9}"
    print(f"{'this':>18}{'other':>18}\n{columns}{columns}{'ratio':>9}  summary   run")
    done = True
    for name, overrides in runs.items():
        try:
            mine, others = measure(checkouts, overrides, rounds)
        except FailedError as error:
            done = False
            print(f"{name} fails {error}", flush=True)
        else:
            print(f"{line_of(mine, others)}  {name}", flush=True)
    return done


def add_options(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Adds the options that `chosen_runs` reads. names: the runs that are measured by default."""
    parser.add_argument("--runs", default=",".join(names), help="names, with commas between; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each program runs")
    parser.add_argument("--traces", type=Path, default=SHARED_TRACES, help="folder with the traces")


def chosen_runs(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Returns the overrides of the chosen runs by name; says which cannot be measured. Exits for a mistake.

    names: the runs that there are.
    """
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds}: must be >= 1")
    runs = {}
    for name in options.runs.split(","):
        if name not in names:
            parser.error(f"--runs={options.runs}: {name!r} is none of {', '.join(names)}")
        overrides = with_trace(RUNS[name], options.traces)
        if overrides is None:
            where = f"{options.traces}; name its folder with --traces=DIR"
            print(f"{name}: not measured, there is no trace in {where}")
        else:
            runs[name] = overrides
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the runs named on the command line; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.paired",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT", help="root of the other checkout")
    add_options(parser, RUNS)
    options = parser.parse_args(arguments)
    other = options.other.resolve()
    if not Path(other, "experiments", "app", "cli.py").is_file():
        parser.error(f"{options.other}: is no checkout of windtunnel, as it has no experiments/app/cli.py")
    runs = chosen_runs(parser, options, RUNS)
    return 0 if print_runs((HERE, other), runs, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
