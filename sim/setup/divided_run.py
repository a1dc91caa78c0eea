"""Runs a divided fleet in this process: shards one after the other, or parts window after window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.routing.static import reads_only_signals
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.replica_pool import ReplicaPool
from sim.records.run import RunRecords
from sim.shards.whole_run import run_all
from sim.shards.windows import part_bounds, run_windows
from sim.workload.base import Source, is_open_loop


def run_divided(
    source: Source,
    new_source: Callable[[], Source],
    pools: Sequence[ReplicaPool],
    cluster: ClusterSettings,
    sim: SimSettings,
    report: Callable[[float, int], None] | None = None,
) -> RunRecords:
    """Runs the parts that sim.shards, which is set, asks for; returns the records of the whole run.

    Arguments and errors: see `run_all`. Raises ValueError for traffic that cannot be divided.
    """
    check_traffic(source, sim)
    if reads_only_signals(cluster.routing):
        assert sim.shards is not None
        bounds = part_bounds(sim.shards, sum(pool.replicas for pool in pools))
        return run_windows(source, new_source, pools, bounds, cluster, sim, report)
    return run_all(source, new_source, pools, cluster, sim, report)


def check_traffic(source: Source, sim: SimSettings) -> None:
    """Raises ValueError for traffic in which the end of a request decides on later ones."""
    if sim.shards is not None and not is_open_loop(source):
        raise ValueError(
            f"sim.shards={sim.shards}: the requests of this workload follow the ends of others; choose "
            f"open-loop arrivals or a trace, or set sim.shards=null"
        )
