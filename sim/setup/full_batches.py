"""Checks that a run knows when its traffic has ended, if batches wait until they are full."""

from __future__ import annotations

from collections.abc import Mapping

from policies.batching.static import check_traffic_ends
from sim.cluster.settings import SimSettings
from sim.setup.pool import PoolSettings


def check_full_batches(pools: Mapping[str, PoolSettings], sim: SimSettings) -> None:
    """Raises ValueError for full batches in a run with periodic events, which never comes to rest."""
    for pool in pools.values():
        for is_set, driver in (
            (pool.scaling is not None, "a run that is scaled"),
            (sim.stop_overloaded, "a run with sim.stop_overloaded=true"),
            (sim.stop_missed, "a run with sim.stop_missed=true"),
            (sim.shards is not None, "a run in shards"),
        ):
            if is_set:
                check_traffic_ends(pool.batching, driver)
