"""Thinned fleets: one in n of the replicas of a run, with one in n of its requests (`sim.thin`).

Which metrics of the thinned fleet equal those of the whole one:

- Replicas that are chosen at random (routing=random): all means, percentiles and rates, without bias.
- In turn (round_robin, weighted): the requests of a replica arrive slightly less regularly than in the whole
fleet; their coefficient of variation is higher by about the root of n / replicas.
- By the router's own counts (least_outstanding, power_of_two): a router that compares fewer replicas balances
slightly worse, which matters for small numbers; below `MIN_REPLICAS` it is rejected. Routers that read
signals are rejected: with join_shortest_kv, 128 of 640 replicas gave a mean TTFT that was 1 to 3 % too low. -
By prefix: families of prompts stay whole, so there must be many of them.
- Maxima and peaks are smaller than those of the whole fleet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from policies.routing import RoutingTraits, reads_replicas
from policies.user_code import name_of, traits_of
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario
from sim.workload.thinned import ThinnedWorkload

Pool = TypeVar("Pool", bound=PoolSettings)

MIN_REPLICAS = 16
"""Minimum number of replicas of a thinned fleet with a router that compares replicas."""
MIN_CLUSTERS = 2
"""Minimum number of replicas of a thinned fleet, because its intervals come from differences between
replicas.
"""


def thinned(scenario: Scenario) -> Scenario:
    """Returns the scenario of the thinned fleet. Raises ValueError if its metrics would be wrong."""
    n = scenario.sim.thin
    _check_parts(scenario)
    pools = {name: _fewer_replicas(pool, f"pools.{name}.", n) for name, pool in scenario.pools.items()}
    keeps_together = traits_of(scenario.routing, RoutingTraits).keeps_together
    is_scattered = keeps_together not in ("prefix", "session") and any(
        map(_finds_kv, scenario.pools_by_name.values())
    )
    workload = ThinnedWorkload(
        of=scenario.workload,
        keeps_one_in=n,
        by_family=keeps_together == "prefix",
        scattered_by=name_of(scenario.routing) if is_scattered else None,
    )
    whole = scenario if pools else _fewer_replicas(scenario, "", n)
    return replace(whole, pools=pools, workload=workload)


def _finds_kv(pool: PoolSettings) -> bool:
    """Returns whether the caches of a pool keep the KV of prompts for later ones."""
    memory = pool.kv_memory(pool.plan_memory().num_blocks, FutureUses(()))
    return pool_of(pool.caching, memory).finds_kv


def _fewer_replicas(pool: Pool, where: str, n: int) -> Pool:
    if pool.replicas % n:
        raise ValueError(f"sim.thin={n}, {where}replicas={pool.replicas}: thin must divide the replicas")
    return replace(pool, replicas=pool.replicas // n)


def _check_parts(scenario: Scenario) -> None:
    """Raises ValueError for parts of a fleet that do not scale with its size."""
    key, n = f"sim.thin={scenario.sim.thin}", scenario.sim.thin
    num_left = scenario.num_replicas // n
    fewest = MIN_REPLICAS if reads_replicas(scenario.routing) else MIN_CLUSTERS
    if num_left < fewest and scenario.num_replicas % n == 0:
        largest = scenario.num_replicas // fewest
        advice = f"choose sim.thin={largest} or less" if largest > 1 else "choose sim.thin=1"
        raise ValueError(
            f"{key}, replicas={scenario.num_replicas}: leaves {num_left}, and "
            f"routing={name_of(scenario.routing)} needs at least {fewest} to act as in the whole fleet; "
            f"{advice}"
        )
