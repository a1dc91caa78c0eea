"""Worlds with changing fleets, retrying clients and failures, and strategies that draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.policy_draws import draw_routing
from experiments.conformance.recording_core import RecordingCore
from experiments.conformance.toys import TICK_S, ToyModel
from experiments.conformance.worlds import Traffic, World
from policies.admission import AdmitAll
from policies.admission.deadline_feasible import DeadlineFeasible
from policies.admission.queue_bound import QueueBound
from policies.admission.tenant_quotas import TenantQuotas
from policies.admission.token_bucket import TokenBucket
from policies.core.request import Request
from policies.migration import Migration
from policies.scaling.predictive import Predictive
from policies.scaling.reactive import Concurrency, QueueLength, SloAttainment, Utilisation
from policies.scaling.scheduled import Scheduled
from sim.cluster.clients import JITTERS, Retries
from sim.cluster.failures import BadRelease, Failures, Random, Recovery, Scripted
from sim.cluster.simulation import Simulation
from sim.engine.replica_pool import ReplicaPool
from sim.metrics.slo import Slo
from sim.records.run import FailureKind, RunRecords
from sim.transfer.network import NetworkSettings
from sim.workload.base import Arrival

MAX_REPLICAS = 3
"""Of a pool that scales."""


def toy_network(tokens_per_tick: float, tick_s: float = TICK_S, **settings: Any) -> NetworkSettings:
    """Returns a network whose ports pass so many tokens a tick, at one byte per token of KV."""
    usual: dict[str, Any] = {"kind": "infiniband", "latency_s": 0.0, "reached_share": 1.0}
    return NetworkSettings(**(usual | {"bandwidth_bytes_per_s": tokens_per_tick / tick_s} | settings))


class CountedTraffic(Traffic):
    """Traffic that calls on_end with the number of ended requests, whenever one more has ended."""

    def __init__(self, *args: Any, on_end: Callable[[int], None] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._on_end = on_end

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = super().follow_ups(request, now, num_output_tokens)
        if self._on_end is not None:
            self._on_end(len(self.ends))
        return following


@dataclass(frozen=True, kw_only=True)
class WorldPool:
    """Replicas of a kind of their own; a setting of None is the world's."""

    replicas: int = 1
    model: Any = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    scaling: Any = None
    cold_start_s: float = 0.0

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of `World._pool`."""
        core = {"num_blocks": self.num_blocks, "max_num_seqs": self.max_num_seqs}
        return {
            "replicas": self.replicas,
            "scaling": deepcopy(self.scaling),
            "cold_start_s": self.cold_start_s,
            "core": {name: value for name, value in core.items() if value is not None},
            **({} if self.model is None else {"model": self.model}),
        }


@dataclass(frozen=True, kw_only=True)
class Cluster(World):
    """A world with everything above the engines: pools, retries, failures, scaling."""

    pools: tuple[WorldPool, ...] = ()
    """Called a, b, c ...; none: num_replicas of one kind."""
    retries: Retries | None = None
    failures: Failures | None = None
    max_resends: int = 0
    recovery: Recovery | None = None
    migration: Migration | None = None
    """Migration policy; None: requests do not move."""
    network: NetworkSettings = field(default_factory=lambda: toy_network(4))
    """For KV that is replicated."""
    slo: Slo | None = None
    """For autoscalers that look at it."""
    on_end: Callable[[int], None] | None = None
    """Called with the number of requests that have ended, whenever one more has."""
    watch: Callable[[Simulation], None] | None = None
    """Called with every simulation before it runs."""

    def _source(self) -> Traffic:
        usual = {"num_users": self.num_users, "think_s": self.think_s, "patience_s": self.patience_s}
        return CountedTraffic(self.asks, **usual, on_end=self.on_end)

    def _pools(self, cores: list[RecordingCore]) -> list[ReplicaPool]:
        if not self.pools:
            return super()._pools(cores)
        return [
            self._pool(cores, name=chr(ord("a") + place), **pool.settings())
            for place, pool in enumerate(self.pools)
        ]

    def _run(self, simulation: Simulation, report: Callable[[float, int], None] | None) -> RunRecords:
        if self.watch is not None:
            self.watch(simulation)
        return super()._run(simulation, report)


def cluster_of(world: World, **changes: Any) -> Cluster:
    """Returns the world as a cluster, with the given settings that only a cluster has."""
    return Cluster(**{f.name: getattr(world, f.name) for f in fields(world)} | changes)


def draw_admission(tick_s: float) -> st.SearchStrategy[Any]:
    """Returns the strategy for any admission policy, with settings that matter to a few requests."""
    again_s = st.none() | st.integers(0, 9).map(lambda n: n * tick_s)
    few = st.integers(1, 8)
    return (
        st.just(AdmitAll())
        | st.builds(
            TokenBucket,
            rate_per_s=st.sampled_from([0.1, 1.0, 7.0]).map(lambda n: n / tick_s),
            burst=st.sampled_from([1.0, 2.5, 20.0]),
            count=st.sampled_from(["requests", "tokens"]),
            per=st.sampled_from(["service", "tenant"]),
        )
        | st.builds(
            QueueBound,
            max_outstanding=few,
            count=st.sampled_from(["requests", "tokens", "queued_tokens"]),
            per=st.sampled_from(["replica", "fleet"]),
            retry_after_s=again_s,
        )
        | st.builds(TenantQuotas, max_outstanding=few, retry_after_s=again_s)
        | st.builds(
            DeadlineFeasible,
            ttft_s=st.integers(1, 30).map(lambda n: (n * tick_s,)),
            initial_tokens_per_s=st.sampled_from([1.0, 20.0]).map(lambda n: n / tick_s),
        )
    )


def draw_retries(tick_s: float) -> st.SearchStrategy[Retries]:
    """Returns the strategy for clients that try again, at once or later, perhaps with a timeout."""
    return st.builds(
        Retries,
        max_attempts=st.integers(1, 4),
        base_s=st.integers(0, 9).map(lambda n: n * tick_s / 2),
        factor=st.sampled_from([1.0, 2.0]),
        cap_s=st.just(40 * tick_s),
        jitter=st.sampled_from(JITTERS),
        retry_budget=st.sampled_from([None, None, 0.0, 0.5]),
        retry_burst=st.sampled_from([1.0, 10.0]),
        honours_retry_after=st.booleans(),
        timeout_s=st.none() | st.integers(1, 60).map(lambda n: n * tick_s / 2),
        timeout_until=st.sampled_from(["answer", "first_token"]),
    )


@st.composite
def draw_event(draw: st.DrawFn, num_replicas: int, num_pools: int, tick_s: float) -> Any:
    """Draws any failure of limited duration, at some replicas."""

    def time_s(least: int = 1) -> float:
        return draw(st.integers(least, 120)) * tick_s / 2

    target: dict[str, Any] = draw(
        st.just({})
        | st.lists(st.integers(0, num_replicas - 1), min_size=1, unique=True).map(lambda r: {"replicas": r})
        | st.integers(0, num_pools - 1).map(lambda place: {"pool": chr(ord("a") + place)})
    )
    factor = draw(st.sampled_from([1.5, 2.0, 7.0]))
    kind = draw(st.sampled_from(list(FailureKind)))
    how: dict[str, Any] = {"kind": kind, "factor": factor if kind.has_factor else None}
    which = draw(st.sampled_from(["scripted", "scripted", "random", "release"]))
    if which == "scripted":
        return Scripted(at_s=time_s(0), duration_s=time_s(), **how, **target)
    if which == "random":
        together = draw(st.booleans())
        return Random(mtbf_s=time_s(10), mttr_s=time_s(), together=together, **how, **target)
    return BadRelease(
        at_s=time_s(0),
        rolled_back_after_s=time_s(),
        share=draw(st.sampled_from([0.3, 1.0])),
        factor=draw(st.sampled_from([None, factor])),
        crash_after_s=time_s(10),
        restart_s=time_s(),
        **target,
    )


def draw_scaling(tick_s: float) -> st.SearchStrategy[Any]:
    """Returns the strategy for any autoscaler, with short intervals."""
    interval_s = st.integers(1, 24).map(lambda n: n * tick_s / 2)
    a_while_s = st.sampled_from([0.0, 4.0, 20.0]).map(lambda n: n * tick_s)
    bounds = {"min_replicas": st.integers(0, 2), "max_replicas": st.integers(2, MAX_REPLICAS)}
    replicas = st.integers(0, MAX_REPLICAS)
    return (
        st.builds(
            Concurrency,
            interval_s=interval_s,
            target_concurrency=st.sampled_from([1.0, 3.0]),
            stable_window_s=st.just(20 * tick_s),
            panic_window_s=st.just(4 * tick_s),
            **bounds,
        )
        | st.builds(
            QueueLength,
            interval_s=interval_s,
            max_waiting=st.sampled_from([0.5, 2.0]),
            calm_s=a_while_s,
            **bounds,
        )
        | st.builds(
            Utilisation,
            interval_s=interval_s,
            signal=st.sampled_from(["busy", "kv", "running"]),
            stabilisation_s=a_while_s,
            **bounds,
        )
        | st.builds(
            Scheduled,
            interval_s=interval_s,
            entries=st.tuples(*[replicas] * 3).map(_entries),
            day_s=st.just(60 * tick_s),
            min_replicas=st.just(0),
            max_replicas=st.just(MAX_REPLICAS),
        )
        | st.builds(SloAttainment, interval_s=interval_s, calm_s=a_while_s, **bounds)
        | st.builds(
            Predictive,
            interval_s=st.just(4 * tick_s),
            season_s=st.just(40 * tick_s),
            lead_s=st.sampled_from([None, 8 * tick_s]),
            capacity_per_s=st.sampled_from([0.1, 0.5]).map(lambda n: n / tick_s),
            stabilisation_s=a_while_s,
            **bounds,
        )
    )


def _entries(replicas: tuple[int, ...]) -> tuple[dict[str, str | int], ...]:
    """Returns a schedule of three shifts."""
    return tuple(
        {"at": at, "replicas": num} for at, num in zip(("00:00", "08:00", "16:00"), replicas, strict=True)
    )


def draw_pool(tick_s: float) -> st.SearchStrategy[WorldPool]:
    """Returns the strategy for replicas of some kind, fast or slow; half of the pools scale."""
    return st.builds(
        WorldPool,
        replicas=st.integers(1, 2),
        model=st.none() | st.sampled_from([0.5, 1.0, 1.5]).map(lambda n: ToyModel(n * tick_s)),
        max_num_seqs=st.none() | st.integers(2, 8),
        scaling=st.none() | draw_scaling(tick_s),
        cold_start_s=st.integers(0, 40).map(lambda n: n * tick_s / 2),
    )


@st.composite
def draw_clusters(draw: st.DrawFn) -> Cluster:
    """Draws any world with pools, refusals, retries, failures and scaling above the engines."""
    world = draw(draw_worlds())
    tick_s = world.model.tick_s
    pools = tuple(draw(st.lists(draw_pool(tick_s), min_size=1, max_size=3)))
    num_replicas = sum(pool.replicas for pool in pools)
    event = draw_event(num_replicas, len(pools), tick_s)
    return cluster_of(
        world,
        pools=pools,
        num_replicas=num_replicas,
        routing=draw(draw_routing(num_replicas, tick_s)),
        admission=draw(draw_admission(tick_s)),
        retries=draw(st.none() | draw_retries(tick_s)),
        failures=Failures(events=tuple(draw(st.lists(event, max_size=3)))),
        max_resends=draw(st.integers(0, 2)),
        recovery=draw(draw_recovery(keeps_kv=not world.caching.changes_outputs)),
        slo=draw(
            st.sampled_from([None, 3, 20]).map(lambda n: None if n is None else Slo(ttft_ms=n * tick_s * 1e3))
        ),
    )


def draw_recovery(*, keeps_kv: bool = True) -> st.SearchStrategy[Recovery]:
    """Returns the strategy for any recovery after a crash; keeps_kv: the KV can be used elsewhere."""
    ways = st.sampled_from(["scratch", "tokens"]).map(lambda way: Recovery(way=way))
    replicated = st.integers(1, 6).map(lambda every: Recovery(way="kv", every_tokens=every))
    return ways | replicated if keeps_kv else ways


@st.composite
def draw_crashes(draw: st.DrawFn) -> Cluster:
    """Draws any world whose replicas crash while there is work, with wide or narrow links."""
    world = draw(draw_worlds())
    tick_s, num_replicas = world.model.tick_s, draw(st.integers(2, 4))
    links = world.links
    crash = st.builds(
        Scripted,
        kind=st.just(FailureKind.crash),
        at_s=st.integers(1, 120).map(lambda n: n * tick_s / 2),
        duration_s=st.integers(1, 40).map(lambda n: n * tick_s / 2),
        replicas=st.integers(0, num_replicas - 1).map(lambda replica: (replica,)),
    )
    others = draw_event(num_replicas, 1, tick_s)
    return cluster_of(
        world,
        num_replicas=num_replicas,
        routing=draw(draw_routing(num_replicas, tick_s)),
        retries=draw(st.none() | draw_retries(tick_s)),
        failures=Failures(
            events=(
                *draw(st.lists(crash, min_size=1, max_size=4)),
                *draw(st.lists(others, max_size=1)),
            )
        ),
        max_resends=draw(st.integers(1, 3)),
        recovery=draw(draw_recovery(keeps_kv=not world.caching.changes_outputs)),
        links=lambda: replace(links(), bytes_per_token=1.0),
        network=toy_network(
            draw(st.sampled_from([1.0, 8.0, 1000.0])),
            tick_s,
            latency_s=draw(st.sampled_from([0.0, 0.5])) * tick_s,
            max_transfers=draw(st.none() | st.just(1)),
        ),
    )
