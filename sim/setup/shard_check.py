"""Checks that the replicas of a run do not influence each other, so that shards can be simulated apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policies.admission.none import AdmitAll
from policies.core.policy_names import name_of
from policies.routing import RoutingTraits
from policies.routing.static import reads_only_signals, reads_replicas
from policies.user_code.traits import traits_of
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.setup.pool import PoolSettings
from sim.workload.base import Source, is_open_loop

STATIC = (
    "routing=round_robin, random, weighted, dedicated, session_affinity with routing.max_load=inf, or "
    "join_shortest_kv with routing.ties=index"
)
"""Choices of routing that read no replica, or only signals."""
ONE_PROCESS = "or set sim.shards=null"


def check_shards(cluster: ClusterSettings, pools: Mapping[str, PoolSettings], sim: SimSettings) -> None:
    """Raises ValueError if a run cannot be divided into shards as sim.shards, which is set, says."""
    key = f"sim.shards={sim.shards}"
    num_replicas = sum(pool.replicas for pool in pools.values())
    if isinstance(sim.shards, int) and sim.shards > num_replicas:
        left = "" if sim.thin == 1 else f" that sim.thin={sim.thin} leaves"
        raise ValueError(f"{key}: must be <= {num_replicas}, the number of replicas{left}, or auto")
    for found, instead in (*_of_routing(cluster), *_of_cluster(cluster), *_of_sim(sim), *_of_pools(pools)):
        raise ValueError(f"{key}, {found}; {instead}, {ONE_PROCESS}")


def check_traffic(source: Source, sim: SimSettings) -> None:
    """Raises ValueError for traffic in which the end of a request decides on later ones."""
    if sim.shards is not None and not is_open_loop(source):
        raise ValueError(
            f"sim.shards={sim.shards}: the requests of this workload follow the ends of others; choose "
            f"open-loop arrivals or a trace, {ONE_PROCESS}"
        )


def _of_routing(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Yields why the router may not be static, and what can be used instead."""
    routing = cluster.routing
    name = f"routing={name_of(routing)}"
    if reads_only_signals(routing):
        if not cluster.signal_age_s:
            yield f"{name}, signal_age_s=0: parts run ahead for that time only", "set signal_age_s=0.05"
    elif reads_replicas(routing):
        yield f"{name}: it reads the state of replicas, which shards do not share", f"choose {STATIC}"
    traits = traits_of(routing, RoutingTraits)
    for method in ("on_first_token", "on_end", "on_predicted"):
        if getattr(traits, method) is not None:
            yield (
                f"{name}: its {method} learns from all replicas, which shards do not share",
                (f"choose {STATIC}"),
            )


def _of_cluster(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Yields the settings of the cluster by which replicas influence each other."""
    if type(cluster.admission) is not AdmitAll:
        yield (
            f"admission={name_of(cluster.admission)}: it admits by the load of all replicas",
            ("choose admission=none"),
        )
    if cluster.retries.max_attempts > 1:
        yield (
            f"retries.max_attempts={cluster.retries.max_attempts}: a retry is routed again, when its replica "
            "has failed it",
            "choose retries=none",
        )
    if cluster.failures.events:
        yield "failures: the requests of a crashed replica go to others", "choose failures=none"
    if cluster.recovery.every_tokens is not None:
        yield "recovery=kv: KV is copied to other replicas over one network", "choose recovery=scratch"
    if cluster.encoders.replicas:
        yield (
            f"encoders.replicas={cluster.encoders.replicas}: all replicas share them",
            ("set encoders.replicas=0"),
        )
    if cluster.turns.sleep_level is not None:
        yield (
            f"turns.sleep_level={cluster.turns.sleep_level}: pools take turns on the same GPUs",
            ("set turns.sleep_level=null"),
        )


def _of_sim(sim: SimSettings) -> Iterator[tuple[str, str]]:
    """Yields the settings that end a run by what all replicas do."""
    for name in ("stop_overloaded", "stop_missed"):
        if getattr(sim, name):
            yield f"sim.{name}=true: it looks at the requests of all replicas", f"set sim.{name}=false"


def _of_pools(pools: Mapping[str, PoolSettings]) -> Iterator[tuple[str, str]]:
    """Yields the settings of pools by which replicas influence each other."""
    for name, pool in pools.items():
        where = f"pools.{name}." if name else ""
        if pool.scaling is not None:
            yield (
                f"{where}scaling={name_of(pool.scaling)}: it counts the requests of all replicas",
                (f"choose {where}scaling=none"),
            )
        if pool.role != "mixed":
            yield f"{where}role={pool.role}: KV goes from replica to replica", f"set {where}role=mixed"
