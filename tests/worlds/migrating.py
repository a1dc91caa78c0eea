"""Worlds in which running requests move between replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from experiments.conformance.policy_draws import draw_routing
from policies.caching.pool import BlockPool, KvMemory
from policies.migration import Move, ReplicaLoad
from policies.migration.llumnix import Llumnix
from tests.worlds.clusters import Cluster, draw_clusters, toy_network


@dataclass
class Scripted:
    """Makes the given moves, each at the first decision at or after its time in seconds."""

    script: tuple[tuple[float, Move], ...]
    interval_s: float
    last_stage_tokens: int = 3
    max_stages: int = 5
    seen: list[tuple[float, list[ReplicaLoad]]] = field(default_factory=list)

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Returns the moves that are due."""
        due = [move for at_s, move in self.script if at_s <= now]
        self.script = tuple(one for one in self.script if one[0] > now)
        return due


@dataclass
class AnyMoves:
    """Moves requests at random, wherever it may; the choice depends on all that it sees."""

    interval_s: float
    last_stage_tokens: int
    max_stages: int
    seed: int = 0
    num_calls: int = 0

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Returns random pairs of replicas, with a random request of the first of each."""
        self.num_calls += 1
        seen = [
            (
                *(r.index, r.num_free_kv_tokens, r.num_running, r.num_waiting, r.num_preempted),
                *(r.num_waiting_tokens, r.num_first_waiting_tokens, r.is_draining),
                sum(request.num_tokens for request in r.movable),
            )
            for r in replicas
        ]
        rng = np.random.default_rng([self.seed, self.num_calls, hash(tuple(seen)) % 2**32])
        free = [r for r in replicas if not r.is_migrating]
        order = [free[place] for place in rng.permutation(len(free))]
        pairs = [
            (one, other)
            for one, other in zip(order[::2], order[1::2], strict=False)
            if one.pool == other.pool and one.movable and not other.is_draining
        ]
        return [
            Move(one.movable[rng.integers(len(one.movable))].request_id, one.index, other.index)
            for one, other in pairs
        ]


def grows_by_blocks(caching: Any) -> bool:
    """Returns whether a cache gives a sequence its blocks one by one, and keeps all KV."""
    pool = caching.pool(KvMemory(100, 1.0, max_model_len=400))
    return type(pool).growth is BlockPool.growth and not caching.changes_outputs


@st.composite
def draw_migrations(draw: st.DrawFn) -> Cluster:
    """Draws any cluster without failures whose requests move often, over wide or narrow links."""
    world = draw(draw_clusters().filter(lambda world: grows_by_blocks(world.caching)))
    tick_s, links = world.model.tick_s, world.links
    stages = {
        "last_stage_tokens": draw(st.integers(1, 20)),
        "max_stages": draw(st.integers(2, 6)),
        "interval_s": draw(st.integers(1, 12)) * tick_s / 2,
    }
    policy = draw(
        st.builds(AnyMoves, seed=st.integers(0, 99), **{name: st.just(v) for name, v in stages.items()})
        | st.builds(
            Llumnix,
            out_below_tokens=st.sampled_from([2.0, 20.0]),
            in_above_tokens=st.sampled_from([20.0, 40.0]),
            queue=st.sampled_from(["all", "first"]),
            moves_first=st.sampled_from(["last", "shortest", "longest"]),
            urgent_priority=st.none() | st.just(0),
            priority_load_tokens=st.sampled_from([1, 30]),
            **{name: st.just(v) for name, v in stages.items()},
        )
    )
    pools = tuple(replace(pool, replicas=pool.replicas + 1) for pool in world.pools)
    num_replicas = sum(pool.replicas for pool in pools)
    return replace(
        world,
        pools=pools,
        num_replicas=num_replicas,
        routing=draw(draw_routing(num_replicas, tick_s)),
        failures=None,
        recovery=None,
        migration=policy,
        links=lambda: replace(links(), bytes_per_token=1.0),
        network=toy_network(
            draw(st.sampled_from([0.5, 4.0, 30.0, 1000.0])),
            tick_s,
            latency_s=draw(st.sampled_from([0.0, 0.5, 1.3])) * tick_s,
            max_transfers=draw(st.none() | st.just(1)),
        ),
    )
