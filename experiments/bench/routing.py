"""CPU time of routers in the simulator: `python -m experiments.bench.routing [routing ...]`.

The workload is conversations on a small model with prefix caching, with the same number of requests and the
same load per replica for every fleet size. Printed are the CPU time per request of the router's choice alone
and of the whole simulation, and the ratio of both between the largest fleet and one replica. The fastest
repetition counts, because other programs on the machine slow single repetitions down.

The choice of a router that reads O(1) replicas should take the same time in every fleet. The column `reads`
says what a router reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.core.request import Request
from policies.routing import ReplicaView, Routing
from sim.settings.scenario import build_scenario

FLEETS = (1, 16, 256)
WORLD = (
    "model=smollm2_135m",
    "hardware=l4",
    "slo=none",
    "workload=conversation",
    "caching=prefix",
    "engine.num_kv_blocks=4096",
)
RATE_PER_REPLICA = 0.5  # conversations per second
READS = {  # choice of `routing` -> the state of the fleet that a decision reads
    "round_robin": "nothing",
    "random": "nothing",
    "weighted": "nothing",
    "power_of_two": "2 replicas",
    "least_outstanding": "one count per replica",
    "least_outstanding_tokens": "one count per replica",
    "session_affinity": "one count per replica",
    "prefix_affinity": "one count per replica",
    "slo_aware": "one count per replica",
    "cost_aware": "one count per replica",
    "join_shortest_kv": "signals of every replica",
    "freest": "signals of every replica",
    "prefix_index": "caches of every replica",
    "weighted_score": "signals and caches of every replica",
    "length_aware": "2 replicas",
    "adapter_affinity": "one count per replica",
    "dedicated": "nothing",
}
NEEDS = {"length_aware": ("prediction=histogram",)}  # overrides in addition to WORLD


@dataclass(kw_only=True)
class Timed:
    """A router whose choices are timed; it forwards all other calls."""

    routing: Routing
    seconds: float = 0.0
    num_choices: int = 0

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "routing":
            raise AttributeError(name)
        return getattr(self.routing, name)

    def __deepcopy__(self, memo: dict[int, object]) -> Timed:
        return self

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the router's choice and adds its CPU time."""
        start_s = time.thread_time()
        index = self.routing.choose(request, replicas, now)
        self.seconds += time.thread_time() - start_s
        self.num_choices += 1
        return index


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one line per router."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.routing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "routings",
        nargs="*",
        choices=[*READS, []],
        metavar="routing",
        help=f"{', '.join(READS)}; default: all",
    )
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; the fastest counts")
    parser.add_argument("--conversations", type=int, default=600, help="number of conversations")
    options = parser.parse_args(arguments)
    fleets = "".join(f"{count:>9,}" for count in FLEETS)
    print(f"{'us/request':26}{'choice:':>8}{fleets}{'ratio':>7}{'all:':>8}{fleets}{'ratio':>7}  reads")
    for name in options.routings or READS:
        pairs = [_measured(name, count, options.conversations, options.repeat) for count in FLEETS]
        columns = []
        for values in zip(*pairs, strict=True):
            columns.append(
                "".join(f"{1e6 * value:9.1f}" for value in values) + f"{values[-1] / values[0]:7.2f}"
            )
        print(f"{name:26}{'':8}{columns[0]}{'':8}{columns[1]}  {READS[name]}", flush=True)


def _measured(name: str, num_replicas: int, num_conversations: int, repeat: int) -> tuple[float, float]:
    """Returns the CPU seconds per request of the router's choice and of the whole simulation."""
    overrides = [
        *WORLD,
        *NEEDS.get(name, ()),
        f"routing={name}",
        f"replicas={num_replicas}",
        f"workload.num_conversations={num_conversations}",
        f"workload.arrivals.rate_per_s={RATE_PER_REPLICA * num_replicas}",
    ]
    if name == "power_of_two":
        overrides.append(f"routing.num_choices={min(2, num_replicas)}")
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides)
    choice_s, all_s = [], []
    for _ in range(repeat):
        scenario = build_scenario(cfg)
        timed = Timed(routing=scenario.routing)
        start_s = time.process_time()
        replace(scenario, routing=timed).simulate(scenario.source())
        all_s.append((time.process_time() - start_s) / timed.num_choices)
        choice_s.append(timed.seconds / timed.num_choices)
    return min(choice_s), min(all_s)


if __name__ == "__main__":
    main()
