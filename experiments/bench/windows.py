"""Runs with routing by signals in one process and in windows: `python -m experiments.bench.windows`.

Llama-3.1-8B on H100s, routing=join_shortest_kv with routing.ties=index, 8 requests/s per replica, lognormal
lengths. Printed is the wall time of the run without its metrics, and the ratio. Both have the same records.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from time import perf_counter

from rich.console import Console

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.resolve import resolved
from experiments.simulate.windowed_run import WindowedRun
from experiments.study.launchers.local import Local
from sim.settings.scenario import build_run

WORLD = ("workload=poisson", "workload/lengths=lognormal", "routing=join_shortest_kv", "routing.ties=index")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per number of replicas."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.windows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 256, 1000], help="fleets")
    parser.add_argument("--requests", type=int, default=100, help="requests per replica")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes beside the gateway")
    options = parser.parse_args(arguments)
    for replicas in options.replicas:
        own = [
            *WORLD,
            f"replicas={replicas}",
            f"workload.num_requests={options.requests * replicas}",
            f"workload.arrivals.rate_per_s={8 * replicas}",
        ]
        whole = _seconds([*own, "sim.shards=null"], options.processes)
        windows = _seconds([*own, f"sim.shards={options.processes}"], options.processes)
        print(
            f"{replicas:6} replicas: {whole:7.2f} s in one process, {windows:7.2f} s in windows, "
            f"ratio {whole / windows:.2f}",
            flush=True,
        )


def _seconds(settings: list[str], num_processes: int) -> float:
    """Returns the wall time of a run without its metrics, s."""
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    config = resolved(composed(source, settings))
    scenario, traffic = build_run(config)
    begin_s = perf_counter()
    if scenario.sim.shards is None:
        scenario.simulate(traffic)
    else:
        launcher = Local(jobs=num_processes)
        WindowedRun(scenario=scenario, source=traffic, config=config, launcher=launcher).records(Console())
    return perf_counter() - begin_s


if __name__ == "__main__":
    main()
