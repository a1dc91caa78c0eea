"""Strategies of hypothesis that draw worlds: any world, and worlds with a given policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from experiments.conformance.policy_draws import draw_batching, draw_caching, draw_routing, draw_scheduling
from experiments.conformance.toys import TICK_S, UNEVEN_S, ToyModel
from experiments.conformance.worlds import Ask, World
from policies.batching import supports_mixed_role
from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.prediction.histogram import RunningHistogram
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.s3 import S3
from policies.scheduling.shortest_job import ShortestJobFirst, ShortestRemaining
from sim.engine.replica_pool import Links


@st.composite
def draw_worlds(draw: st.DrawFn, schedulings: st.SearchStrategy[Any] | None = None) -> World:
    """Draws a world under pressure: small caches and budgets, coinciding arrivals, impatient clients.

    Half of the worlds are storms: many outputs outgrow a cache that had room for the prompts.
    schedulings: strategy of the scheduling policy; None: any.
    """
    storm = draw(st.booleans())
    tick_s = draw(st.sampled_from([TICK_S, UNEVEN_S]))
    half_ticks = draw(st.sampled_from([0, 40, 200]))
    ask = st.builds(
        Ask,
        st.integers(0, half_ticks).map(lambda n: n * tick_s / 2),
        st.integers(1, 9) if storm else st.integers(1, 9) | st.integers(1, 80),
        st.integers(8, 60) if storm else st.integers(1, 9) | st.integers(1, 60),
        st.integers(0, 2),
        st.none() if storm else st.none() | st.none() | st.integers(1, 60),
        st.lists(st.tuples(st.integers(0, 1), st.sampled_from([4, 8, 8, 13, 32])), max_size=3).map(tuple),
        st.none() | st.integers(0, 1),
        st.sampled_from(["", "a", "b"]),
        st.none() | st.none() | st.integers(0, 400).map(lambda n: n * tick_s / 2),
        branching=st.none(),
        sample_tokens=st.just(()),
        adapter=st.none(),
    )
    num_asks = draw(st.sampled_from([6, 10] if storm else [1, 6]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    num_blocks = draw(st.integers(5, max(5, 64 // block_size)) if storm else st.integers(5, 40))
    num_replicas = draw(st.sampled_from([1, 1, 1, 2] if storm else [1, 2, 3]))
    return World(
        asks=tuple(draw(st.lists(ask, min_size=num_asks, max_size=14))),
        batching=draw(draw_batching(tick_s)),
        scheduling=draw(draw_scheduling(tick_s) if schedulings is None else schedulings),
        num_swap_blocks=draw(st.sampled_from([0, 4, 1000])),
        links=partial(
            Links,
            bytes_per_token=1.0,
            host_bytes_per_s=draw(st.sampled_from([1.0, 3.7, 16.0])) / tick_s,
            overlapped=draw(st.booleans()),
        ),
        caching=draw(draw_caching(block_size)),
        prediction=OracleWithNoise(error=0.7),
        num_blocks=num_blocks,
        max_num_seqs=draw(st.integers(2 if storm else 1, 8)),
        max_model_len=draw(st.sampled_from([4096, 4096, 90, 30])),
        num_replicas=num_replicas,
        routing=draw(draw_routing(num_replicas, tick_s)),
        signal_age_s=draw(st.sampled_from([0.0, 0.5, 2.0, 7.3])) * tick_s,
        model=ToyModel(tick_s, flat=draw(st.booleans())),
        num_users=draw(st.none() | st.integers(1, 6)),
        think_s=draw(st.integers(0, 8)) * tick_s / 2,
        patience_s=draw(st.none() | st.none() | st.integers(1, 60).map(lambda n: n * tick_s / 2)),
        until_s=draw(st.none() | st.none() | st.integers(1, 300).map(lambda n: n * tick_s / 2)),
        frontend_s=draw(st.just(0.0) | st.integers(0, 5).map(lambda n: n * tick_s / 2)),
        plans_ahead=draw(st.booleans()),
        recv_interval=draw(st.sampled_from([1, 1, 1, 4])),
    )


def draw_varied(
    policy: Any, field: str, values: st.SearchStrategy[Any], fixed: Collection[str]
) -> st.SearchStrategy[Any]:
    """Draws a value of a setting of the policy, if the policy has the setting and accepts the value."""
    names = {f.name for f in fields(policy) if f.init} if is_dataclass(policy) else set()
    if field not in names - set(fixed):
        return st.just(policy)

    def varied(value: object) -> Any:
        try:
            return replace(policy, **{field: value})
        except ValueError:
            return policy

    return values.map(varied)


VARIED: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "batching": {"max_num_batched_tokens": st.integers(1, 64)},
    "scheduling": {"preemption_mode": st.sampled_from(["recompute", "swap"])},
    "caching": {"block_size": st.sampled_from([1, 2, 3, 4, 8, 16])},
    "admission": {"max_outstanding": st.integers(1, 8), "burst": st.sampled_from([1.0, 2.5, 20.0])},
}
"""Family -> settings that worlds vary, because their defaults are too large for a few requests."""


@st.composite
def draw_worlds_with(
    draw: st.DrawFn,
    family: str,
    policy: Any,
    fixed: Collection[str] = (),
    others_in_order: bool = False,
) -> World:
    """Draws a world with the policy, which runs until all requests have ended.

    The settings in `VARIED` are varied, except those named in `fixed`. others_in_order: the other policies
    keep the order of arrival. The run of a policy of one role (see `supports_mixed_role`) ends at a time.
    """
    world = draw(draw_worlds())
    tick_s = world.model.tick_s
    mine = policy
    for name, values in VARIED.get(family, {}).items():
        mine = draw(draw_varied(mine, name, values, fixed))
    changes: dict[str, Any] = {family: mine, "until_s": None}
    if not supports_mixed_role(policy):
        changes["until_s"] = draw(st.integers(1, 300)) * tick_s / 2
    if family == "routing":
        changes["num_replicas"] = draw(st.integers(2, 4))
    if family == "prediction":
        changes["scheduling"] = draw(st.sampled_from([ShortestJobFirst(), ShortestRemaining(), S3()]))
    else:
        changes["prediction"] = RunningHistogram(min_observations=1, initial_tokens=8)
    if others_in_order and family != "batching":
        changes["batching"] = Chunked(max_num_batched_tokens=draw(st.integers(1, 64)))
    if others_in_order and family != "scheduling":
        changes["scheduling"] = Fcfs()
    world = replace(world, **changes)
    try:
        world.caching.pool(KvMemory(world.num_blocks, 1.0, max_model_len=world.max_model_len))
    except ValueError:  # the settings do not fit the memory
        reject()
    return world
