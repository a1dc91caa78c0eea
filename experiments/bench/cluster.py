"""CPU time of simulating a cluster: `python -m experiments.bench.cluster [replicas ...]`.

The workload is conversations with shared system prompts (configs/workload/conversation.yaml) on Llama 3.1 8B
with prefix caching, one H100 per replica. Two conversations begin per second and replica, which makes 7.7
requests per second and replica after some minutes. The load per replica is the same for every fleet size, and
a run ends with its arrivals. Small fleets are simulated for longer, so that the fixed cost of a run does not
count. There are four equally popular system prompts per replica.

Printed are: CPU time in s and in us per request, from making the traffic to the summary (no report, no
files); the part of it spent on tables and figures after the last event; the CPU time per request relative to
the first fleet size; the same in bare SimPy timeouts, the yardstick for the machine's speed; and the peak
memory. Each run has a process of its own. The fastest repetition counts, because other programs on the
machine slow repetitions down. docs/speed.md draws the conclusions for very large fleets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench.memory import peak_mib
from experiments.bench.sim import timeout_s
from sim.settings.scenario import build_scenario

FLEETS = (1, 4, 16, 64, 100, 256)
PROMPTS_PER_REPLICA = 4  # system prompts; with fewer, a prefix-aware router overloads some replicas
WORLD = (
    "model=llama3_1_8b",
    "hardware=h100_sxm",
    "slo=none",
    "workload=conversation",
    "caching=prefix",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per router and fleet size."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "replicas", nargs="*", type=int, help=f"fleet sizes; default: {' '.join(map(str, FLEETS))}"
    )
    parser.add_argument("--routing", nargs="+", default=["prefix_affinity"], help="choices of routing=")
    parser.add_argument("--seconds", type=float, default=150.0, help="simulated seconds")
    parser.add_argument(
        "--replica-seconds", type=float, default=1500.0, help="least simulated seconds times replicas"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="conversations per second and replica")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; the fastest counts")
    parser.add_argument("--override", nargs="+", default=[], help="settings of simulate, such as seed=1")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        print(json.dumps(measured(config(options, options.routing[0], options.replicas[0]))))
        return
    print(
        f"{'routing':20}{'replicas':>9}{'requests':>11}{'iterations':>12}{'CPU s':>8}{'us/request':>12}"
        f"{'figures':>9}{'ratio':>7}{'timeouts':>10}{'peak MiB':>10}"
    )
    for routing in options.routing:
        base_s = 0.0
        for num_replicas in options.replicas or FLEETS:
            runs = [_in_own_process(options, routing, num_replicas) for _ in range(options.repeat)]
            best = min(runs, key=lambda run: run["run_s"])
            each_s = best["run_s"] / best["requests"]
            base_s = base_s or each_s
            print(
                f"{routing:20}{num_replicas:9,}{best['requests']:11,}{best['iterations']:12,}"
                f"{best['run_s']:8.2f}{1e6 * each_s:12.1f}{1e6 * best['figures_s'] / best['requests']:9.1f}"
                f"{each_s / base_s:7.2f}{each_s / best['timeout_s']:10.0f}"
                f"{max(run['peak_mib'] for run in runs):10,.0f}",
                flush=True,
            )


def measured(cfg: DictConfig) -> dict[str, Any]:
    """Simulates once; returns CPU seconds of the run and of its figures, sizes, and peak memory in MiB."""
    scenario = build_scenario(cfg)
    before_s = timeout_s()
    reported_s = [0.0]

    def report(now: float, num_ended: int) -> None:
        reported_s[0] = time.process_time()  # the last call comes after the last event

    start_s = time.process_time()
    result = scenario.run(scenario.source(), report)
    end_s = time.process_time()
    return {
        "run_s": end_s - start_s,
        "figures_s": end_s - reported_s[0],
        "timeout_s": (before_s + timeout_s()) / 2,
        "requests": len(result.requests),
        "iterations": result.summary["iterations"]["count"],
        "peak_mib": peak_mib(),
    }


def config(options: argparse.Namespace, routing: str, num_replicas: int) -> DictConfig:
    """Returns the config of a run; of `options`, it reads seconds, replica_seconds, rate and override."""
    seconds = max(options.seconds, options.replica_seconds / num_replicas)
    overrides = [
        *WORLD,
        f"routing={routing}",
        f"replicas={num_replicas}",
        f"workload.num_system_prompts={PROMPTS_PER_REPLICA * num_replicas}",
        "workload.system_prompt_skew=0",
        "workload.num_conversations=null",
        f"workload.duration_s={seconds}",
        f"sim.until_s={seconds}",
        f"workload.arrivals.rate_per_s={options.rate * num_replicas}",
    ]
    if routing == "power_of_two":
        overrides.append(f"routing.num_choices={min(2, num_replicas)}")
    overrides += getattr(options, "override", [])
    return ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides)


def _in_own_process(options: argparse.Namespace, routing: str, num_replicas: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.bench.cluster", str(num_replicas), "--in-process"]
    command += [f"--{name}={getattr(options, name)}" for name in ("seconds", "rate")]
    command += [f"--routing={routing}", f"--replica-seconds={options.replica_seconds}"]
    if options.override:
        command += ["--override", *options.override]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
