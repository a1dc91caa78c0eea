"""Speed of the simulator: `python -m experiments.bench.sim [case ...]` (or `make bench`).

Prints the start-up time of the commands, the CPU time and peak memory of each case (each in a process of its
own), and the times of studies and of an update of the dashboard. The time of a case covers making the
traffic, simulating, and building the tables of requests, iterations and gaps in memory; it does not cover
imports, figures, files and the report. Machines differ and are noisy, so a loop of bare SimPy timeouts is
timed beside every repetition: `timeouts/request` is the median CPU time per request in such timeouts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import simpy

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench.commands import DASHBOARD, STUDIES, time_dashboard, time_starts, time_study
from experiments.bench.memory import peak_mib
from sim.records.run import RunRecords
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario

SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
TRACES = {
    "workload=azure_csv": "azure_2023_conv.csv.gz",
    "workload=mooncake_jsonl": "mooncake_conversation.jsonl.gz",
}
"""Override of a workload that replays a trace -> the trace's file."""

ON_H100 = ("model=llama3_1_8b", "hardware=h100_sxm")
VLLM = ("engine=vllm", *ON_H100)
"""Overrides for vLLM's scheduler with its prefix cache on."""


def poisson(num_requests: int, replicas: int = 1, routing: str = "round_robin") -> tuple[str, ...]:
    """Returns overrides for 8 requests/s per replica, with 512 prompt and 256 output tokens each."""
    return (
        *VLLM,
        "workload=poisson",
        f"workload.num_requests={num_requests}",
        f"workload.arrivals.rate_per_s={8 * replicas}",
        f"replicas={replicas}",
        f"routing={routing}",
    )


OVERLOADED = {
    "lpm": ("longest_prefix, radix cache", ("scheduling=longest_prefix", "caching=radix")),
    "slack": ("least_slack", ("scheduling=least_slack",)),
    "prefills": ("partial_prefills", ("batching=partial_prefills", "scheduling=priority")),
    "lora": (
        "exchange of 1,000 adapters",
        ("workload=lora", "adapters=exchange", "workload.of.arrivals.rate_per_s=100"),
    ),
}
"""Policies that look at waiting requests: case -> name, overrides."""


def overloaded(overrides: tuple[str, ...], num_requests: int) -> tuple[str, ...]:
    """Returns overrides for 100 requests/s on one replica, several times what it serves."""
    if "workload=lora" in overrides:
        return (*ON_H100, *overrides, f"workload.of.num_requests={num_requests}")
    return (*poisson(num_requests), "workload.arrivals.rate_per_s=100", *overrides)


CASES = {
    "a": ("10,000 Poisson requests, 8/s, 512 prompt and 256 output tokens, one replica", poisson(10_000)),
    "b": ("the Azure conversation trace, one replica", (*VLLM, "workload=azure_csv")),
    "c": ("100,000 Poisson requests, 80/s, ten replicas", poisson(100_000, 10)),
    "d": (
        "2,000 conversations with shared prefixes, 1/s, one replica",
        (*VLLM, "workload=conversation", "workload.num_conversations=2000", "workload.arrivals.rate_per_s=1"),
    ),
    "e": (
        "the Mooncake conversation trace at a tenth of its load, one replica",
        (*VLLM, "workload=mooncake_jsonl", "load=0.1"),
    ),
    "r16": ("20,000 Poisson requests, 16 replicas, round robin", poisson(20_000, 16)),
    "r256": ("51,200 Poisson requests, 256 replicas, round robin", poisson(51_200, 256)),
    "l16": (
        "20,000 Poisson requests, 16 replicas, least outstanding",
        poisson(20_000, 16, "least_outstanding"),
    ),
    "l256": (
        "51,200 Poisson requests, 256 replicas, least outstanding",
        poisson(51_200, 256, "least_outstanding"),
    ),
    **{
        f"{case}{num_requests // 1000}": (
            f"{num_requests:,} requests in overload, {name}",
            overloaded(overrides, num_requests),
        )
        for case, (name, overrides) in OVERLOADED.items()
        for num_requests in (2_000, 8_000)
    },
    "million": (
        "100 prompts of a million tokens, radix cache",
        (
            *poisson(100),
            "model=llama4_scout",
            "hardware=b200_sxm",
            "tensor_parallel_size=8",
            "caching=radix",
            "workload.arrivals.rate_per_s=0.01",
            "workload.lengths.prompt_tokens.value=1000000",
        ),
    ),
}
COLUMNS = {
    "CPU s": 7,
    "us/request": 11,
    "us/output token": 16,
    "timeouts/request": 17,
    "us/hashed block": 16,
    "peak MiB": 9,
}
"""Columns of the table of cases: heading -> width in characters."""

NUM_TIMEOUTS = 100_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Times the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ["start", *CASES, *STUDIES, DASHBOARD]
    parser.add_argument(
        "cases", nargs="*", choices=[*names, []], metavar="case", help=f"{', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="repetitions, of which the fastest counts; studies run once"
    )
    parser.add_argument("--traces", type=Path, default=SHARED_TRACES, help="folder with the traces")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        _measure(options.cases[0], options.repeat, options.traces)
        return
    wanted = options.cases or names
    if "start" in wanted:
        time_starts(options.repeat)
    cases = [case for case in wanted if case in CASES]
    if cases:
        print("".join(f"{heading:>{width}}" for heading, width in COLUMNS.items()) + "  case", flush=True)
    for case in cases:
        command = [sys.executable, "-m", "experiments.bench.sim", case, "--in-process"]
        subprocess.run([*command, f"--repeat={options.repeat}", f"--traces={options.traces}"], check=True)
    for study in STUDIES:
        if study in wanted:
            time_study(study)
    if DASHBOARD in wanted:
        time_dashboard(options.repeat)


def with_trace(overrides: tuple[str, ...], traces: Path) -> tuple[str, ...] | None:
    """Returns overrides with the path of the trace that their workload replays; None: it is not there."""
    for workload, file in TRACES.items():
        if workload in overrides:
            return (*overrides, f"workload.path={traces / file}") if (traces / file).exists() else None
    return overrides


def _measure(case: str, repeat: int, traces: Path) -> None:
    """Measures a case and prints one line."""
    name, overrides = CASES[case][0], with_trace(CASES[case][1], traces)
    if overrides is None:
        print(f"{name}: not measured, there is no trace in {traces}; name its folder with --traces=DIR")
        return
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(overrides))
    best_s, most_mib, in_timeouts = float("inf"), 0.0, []
    for _ in range(repeat):
        scenario, _ = build_run(cfg)
        before_s = timeout_s()
        start_s = time.process_time()
        records = scenario.simulate(scenario.source())
        cpu_s = time.process_time() - start_s
        best_s = min(best_s, cpu_s)
        # The peak of the first repetition: later ones include memory that the allocator has not returned.
        most_mib = most_mib or peak_mib()
        in_timeouts.append(2 * cpu_s / (before_s + timeout_s()))
        num_requests, num_tokens = len(records.requests), int(records.requests["output_tokens"].sum())
        num_blocks = _num_hashed_blocks(scenario, records)
        del records
    print(
        f"{best_s:7.2f}{best_s / num_requests * 1e6:11.1f}{best_s / num_tokens * 1e6:16.3f}"
        f"{median(in_timeouts) / num_requests:17.0f}{best_s / num_blocks * 1e6:16.2f}{most_mib:9.0f}  {name}"
    )


def _num_hashed_blocks(scenario: Scenario, records: RunRecords) -> int:
    """Returns the number of full blocks of prompts and outputs, each of which a prefix cache hashes."""
    requests = records.requests
    return int(((requests["prompt_tokens"] + requests["output_tokens"]) // scenario.caching.block_size).sum())


def timeout_s() -> float:
    """Measures the CPU seconds of one SimPy timeout, the yardstick for the machine's speed."""

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
