"""Runs all shards of a run in this process, one after the other.

The traffic of a shard is a short run with few events at a time, so this takes less memory at once than the
whole run, and with hundreds of replicas less time as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import ceil

from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.replica_pool import ReplicaPool
from sim.records.run import RunRecords
from sim.shards.assignment import assign
from sim.shards.merge import merged
from sim.shards.shard import ShardRecords, run_shard
from sim.shards.traffic import Bounds, ShardTraffic
from sim.workload.base import Source, is_open_loop

REQUESTS_PER_SHARD = 50_000
"""Requests per shard with `auto`: about 100 MiB of records, and about 3 s."""
SHARDS_PER_PROCESS = 4
"""Minimum number of shards per process with `auto`, so that all processes end at about the same time."""


def shard_bounds(
    shards: int | str, num_replicas: int, num_requests: int | None, num_processes: int | None = None
) -> list[Bounds]:
    """Returns first and end of the replicas of each shard. shards: `SimSettings.shards`.

    num_requests: of the whole run, if known. num_processes: None: one per core.
    """
    if isinstance(shards, str):
        by_cores = SHARDS_PER_PROCESS * (num_processes or os.cpu_count() or 1)
        shards = min(num_replicas, max(by_cores, ceil((num_requests or 0) / REQUESTS_PER_SHARD)))
    return [(i * num_replicas // shards, (i + 1) * num_replicas // shards) for i in range(shards)]


def check_traffic(source: Source, sim: SimSettings) -> None:
    """Raises ValueError for traffic in which later requests depend on the end of earlier ones."""
    if sim.shards is not None and not is_open_loop(source):
        raise ValueError(
            f"sim.shards={sim.shards}: the requests of this workload follow the ends of others; choose "
            f"open-loop arrivals or a trace, or set sim.shards=null"
        )


def run_all(
    source: Source,
    new_source: Callable[[], Source],
    pools: Sequence[ReplicaPool],
    cluster: ClusterSettings,
    sim: SimSettings,
    report: Callable[[float, int], None] | None = None,
) -> RunRecords:
    """Runs the shards configured by sim.shards; returns the records of the whole run.

    source: the traffic, which is read for the notes. new_source: creates the traffic of each shard. report:
    see `Simulation.run`. Raises ValueError: see `check_traffic`; and KeyboardInterrupt after Ctrl-C, because
    parts of a run are no valid result.
    """
    check_traffic(source, sim)
    assignment = assign(source, cluster.for_a_run().routing, pools, sim.until_s)
    num_replicas = sum(pool.replicas for pool in pools)
    assert sim.shards is not None
    shards: list[ShardRecords] = []
    num_ended = 0
    every = shard_bounds(sim.shards, num_replicas, len(assignment.replicas), 1)
    traffic = ShardTraffic(new_source, assignment, every)
    for index, bounds in enumerate(every):
        shard = run_shard(traffic.source(index), assignment, pools, bounds, cluster, sim)
        if shard.records.interrupted:
            raise KeyboardInterrupt
        shards.append(shard)
        num_ended += len(shard.records.requests)
        if report:
            report(shard.records.end_s * len(shards) / len(every), num_ended)
    return merged(shards, sim.until_s)
