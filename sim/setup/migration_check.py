"""Checks that running requests can move between the replicas of a run, as its migration policy wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.batching.static import Static
from policies.caching.pool import BlockPool
from policies.caching.settings import pool_of
from policies.core.policy_names import name_of
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.setup.pool import PoolSettings

ANY_NUM_BLOCKS = 2**20
"""Blocks of the pool that is made to see of which kind it is."""


def check_migration(cluster: ClusterSettings, pools: Mapping[str, PoolSettings], sim: SimSettings) -> None:
    """Raises ValueError for settings with which live migration cannot work, or was not modelled."""
    if cluster.migration.interval_s is None:
        return
    key = f"migration={name_of(cluster.migration)}"
    for found, instead in (*_of_run(cluster, sim), *_of_pools(pools)):
        raise ValueError(f"{key}, {found}; {instead}, or choose migration=none")
    for pool in pools.values():
        cluster.network.check(pool.hardware)


def _of_run(cluster: ClusterSettings, sim: SimSettings) -> Iterator[tuple[str, str]]:
    """Yields what a run has that excludes migration, and what can be set instead."""
    if sim.shards is not None:
        yield f"sim.shards={sim.shards}: requests move between replicas of different shards", "set it to null"
    if sim.thin > 1:
        yield f"sim.thin={sim.thin}: a part of a fleet has fewer replicas to choose from", "set it to 1"
    if cluster.failures.events:
        yield "failures: a crash during a migration is not modelled", "choose failures=none"
    if cluster.recovery.every_tokens is not None:
        yield "recovery=kv: copies of KV of requests that move are not modelled", "choose recovery=scratch"
    if cluster.turns.sleep_level is not None:
        yield (
            f"turns.sleep_level={cluster.turns.sleep_level}: no two replicas of a model are awake at a time",
            "set it to null",
        )


def _of_pools(pools: Mapping[str, PoolSettings]) -> Iterator[tuple[str, str]]:
    """Yields settings of pools that exclude migration, and what can be set instead."""
    for name, pool in pools.items():
        where = f"pools.{name}." if name else ""
        if pool.role != "mixed":
            yield (
                f"{where}role={pool.role}: requests of such pools move once, after their prefill",
                f"set {where}role=mixed",
            )
        if isinstance(pool.batching, Static):
            yield (
                f"{where}batching={name_of(pool.batching)}: takes no request into a batch that runs",
                f"choose {where}batching=chunked",
            )
        if pool.speculation is not None:
            yield f"{where}speculation: its draft tokens do not move", f"choose {where}speculation=none"
        if pool.adapters is not None:
            yield (
                f"{where}adapters={name_of(pool.adapters)}: they do not move",
                f"choose {where}adapters=none",
            )
        if type(pool_of(pool.caching, pool.kv_memory(ANY_NUM_BLOCKS))).growth is not BlockPool.growth:
            yield (
                f"{where}caching={name_of(pool.caching)}: gives a sequence its memory other than block by "
                "block, or drops a part of it",
                f"choose {where}caching=paged, prefix or radix",
            )
    if all(pool.replicas == 1 and pool.scaling is None for pool in pools.values()):
        yield "replicas=1: no pool has another replica to which a request could move", "set replicas >= 2"
