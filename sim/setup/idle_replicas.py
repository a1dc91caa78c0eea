"""Replicas that no request can reach: they cost money, but their engines need not be simulated.

With round robin, request i goes to replica i modulo the number of replicas, so of 100,000 replicas with 50
requests only the first 50 ever work. The others are idle for the whole run, and their records say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from policies.admission.none import AdmitAll
from policies.migration.none import Stay
from policies.routing.round_robin import RoundRobin
from sim.cluster.failures import Failures
from sim.cluster.recovery import Recovery
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.records.run import ReplicaRecord, RunRecords
from sim.setup.pool import PoolSettings
from sim.workload.base import Source


def num_reached(
    cluster: ClusterSettings, pools: Mapping[str, PoolSettings], sim: SimSettings, source: Source
) -> int:
    """Returns the number of replicas, from the first one on, that requests of a run may reach.

    It is that of all replicas unless they are alike, never change, and requests are sent in turn and once.
    """
    count, num_replicas = source.num_requests, sum(pool.replicas for pool in pools.values())
    [pool, *others] = pools.values()
    is_in_turn = type(cluster.routing) is RoundRobin and type(cluster.admission) is AdmitAll
    never_changes = (
        pool.scaling is None and cluster.failures == Failures() and (cluster.recovery == Recovery())
    )
    is_alone = type(cluster.migration) is Stay and not cluster.encoders.replicas
    is_one_pool = not others and cluster.turns.sleep_level is None and pool.adapters is None
    is_sent_once = count is not None and cluster.retries.max_attempts == 1
    if not (is_in_turn and never_changes and is_alone and is_one_pool and is_sent_once):
        return num_replicas
    if sim.shards is not None or sim.thin > 1 or pool.role != "mixed" or pool.caching.needs_future:
        return num_replicas
    return min(num_replicas, max(count or 0, 1))


def with_idle(records: RunRecords, num_replicas: int) -> RunRecords:
    """Returns the records of a run with idle replicas added, up to num_replicas."""
    idle = ReplicaRecord(0, 0.0, records.end_s)
    return replace(records, replicas=records.replicas + (idle,) * (num_replicas - len(records.replicas)))
