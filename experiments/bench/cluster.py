"""What a cluster costs the simulator: `python -m experiments.bench.cluster [replicas ...]`.

Conversations behind shared system prompts (configs/workload/conversation.yaml) on Llama 3.1 8B, an H100 each,
with prefix caching: two conversations begin a second and replica, which is 7.7 requests after some minutes.
The load of a replica is the same for every size of the fleet, and runs end with the arrivals. Small fleets
are simulated for longer: what a run costs whatever its length should not count. There are four system prompts
for each replica, all as popular.

Printed are CPU s and us a request of all from the traffic to the summary (no report, no files); of that, us a
request for tables and figures after the last event; how many times as much a request costs as with the first
number of replicas; its cost in bare SimPy timeouts, a yardstick for the machine; and the peak memory. Each
run is in a process of its own. Other programs on the machine slow repetitions, so the fastest counts.

What these figures say of very large fleets: see `docs/speed.md`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from experiments.bench.sim import timeout_s
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_scenario

FLEETS = (1, 4, 16, 64, 100, 256)
PROMPTS_PER_REPLICA = 4  # system prompts: of few for a large fleet, a router of prefixes makes hot spots
WORLD = (
    "model=llama3_1_8b",
    "hardware=h100_sxm",
    "slo=none",
    "workload=conversation",
    "caching=prefix",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a router and number of replicas."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.cluster", description=__doc__)
    parser.add_argument("replicas", nargs="*", type=int, help=f"sizes of the fleet; {FLEETS} if none")
    parser.add_argument("--routing", nargs="+", default=["prefix_affinity"], help="choices of routing")
    parser.add_argument("--seconds", type=float, default=150.0, help="simulated")
    parser.add_argument("--replica-seconds", type=float, default=1500.0, help="simulated, at least")
    parser.add_argument("--rate", type=float, default=2.0, help="conversations a second and replica")
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
    """One run: CPU seconds of it and of its figures, sizes, and the peak memory so far."""
    scenario = build_scenario(cfg)
    before_s = timeout_s()
    reported_s = [0.0]

    def report(now: float, num_ended: int) -> None:
        reported_s[0] = time.process_time()  # for the last time when the last event is over

    start_s = time.process_time()
    result = scenario.run(scenario.source(), report)
    end_s = time.process_time()
    return {
        "run_s": end_s - start_s,
        "figures_s": end_s - reported_s[0],
        "timeout_s": (before_s + timeout_s()) / 2,
        "requests": len(result.requests),
        "iterations": result.summary["iterations"]["count"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def config(options: argparse.Namespace, routing: str, num_replicas: int) -> DictConfig:
    """Of that run; options: its seconds, replica_seconds and rate."""
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
