"""Worlds whose requests name LoRA adapters, more than fit on the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.worlds import World
from policies.adapters.exchange import Exchange
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.merged import Merged
from policies.adapters.serving import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.prediction.histogram import RunningHistogram
from sim.engine.replica_pool import Links

W = TypeVar("W", bound=World)


def draw_adapter_serving(tick_s: float) -> st.SearchStrategy[Any]:
    """Draws a policy that serves adapters, with settings that matter to a few requests."""
    eviction, few = st.sampled_from(["lru", "lfu"]), st.integers(0, 3)
    host = st.none() | st.integers(4, 5)
    ticks = st.integers(1, 60).map(lambda n: n * tick_s / 2)
    slots = st.integers(1, 4)
    return (
        st.builds(FixedSlots, max_loras=slots, eviction=eviction, max_cpu_loras=host, prefetch=few)
        | st.builds(FixedSlots, max_loras=st.integers(2, 4), pinned=st.just(("a",)), prefetch=few)
        | st.builds(UnifiedPaging, eviction=eviction, max_cpu_loras=host, prefetch=few)
        | st.builds(UnifiedPaging, eviction=eviction, prefetch=few)
        | slots.flatmap(
            lambda num: st.builds(
                Exchange,
                max_loras=st.just(num),
                max_active_adapters=st.integers(1, num),
                cycle_time_s=ticks,
                eviction=eviction,
            )
        )
        | st.builds(Merged, max_serve_s=st.none() | ticks)
    )


@st.composite
def draw_adapter_worlds(draw: st.DrawFn, serving: Any = None) -> World:
    """Draws a world whose requests name some of six adapters, which load slowly.

    serving: the adapters policy, in a world that runs until all requests have ended; None: any policy, and
    the world may end earlier.
    """
    world = draw_adapters(draw, draw(draw_worlds()), serving)
    if serving is not None:
        histogram = RunningHistogram(min_observations=1, initial_tokens=8)
        world = replace(world, until_s=None, prediction=histogram)
    return world


def draw_adapters(draw: st.DrawFn, world: W, serving: Any = None) -> W:
    """Adds adapters to a world; serving: the adapters policy, None: any."""
    tick_s = world.model.tick_s
    names = draw(st.sampled_from(["ab", "abcdef"]))
    served = tuple(Adapter(name=name, rank=draw(st.sampled_from([1, 3, 8, 16]))) for name in names)
    chosen = st.none() | st.sampled_from(names)
    links = partial(
        Links,
        bytes_per_token=1.0,
        host_bytes_per_s=draw(st.sampled_from([1.0, 3.7, 16.0])) / tick_s,
        disk_bytes_per_s=draw(st.sampled_from([0.7, 16.0])) / tick_s,
        overlapped=draw(st.booleans()),
        merge_s=draw(st.integers(0, 6)) * tick_s / 2,
    )
    asks = tuple(ask._replace(adapter=draw(chosen)) for ask in world.asks)
    adapters = draw(draw_adapter_serving(tick_s)) if serving is None else serving
    world = replace(world, asks=asks, served=served, adapters=adapters, links=links)
    if isinstance(adapters, UnifiedPaging):
        pool = world.caching.pool(KvMemory(world.num_blocks, 1.0, max_model_len=world.max_model_len))
        if not pool.can_fork:
            world = replace(world, caching=Paged(block_size=world.caching.block_size))
    return world
