"""Worlds in which some requests ask for several answers, for hypothesis."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.worlds import World
from policies.caching.pool import KvMemory
from policies.core.request import Branching

MAX_WIDTH = 4


@st.composite
def draw_branching_worlds(draw: st.DrawFn) -> World:
    """Draws any world whose cache can fork; half of its requests have samples, beam searches or trees."""
    world = draw(draw_worlds().filter(_can_branch))
    asks = []
    for ask in world.asks:
        width = draw(st.integers(1, min(MAX_WIDTH, world.max_num_seqs)))
        every = draw(st.sampled_from([None, None, 1, 1, 2, 5]))
        lengths = draw(st.lists(st.integers(1, 30), min_size=width, max_size=width))
        is_sampled = every is None and draw(st.booleans())
        if draw(st.booleans()):
            ask = ask._replace(
                branching=Branching(width, every), sample_tokens=tuple(lengths) if is_sampled else ()
            )
        asks.append(ask)
    return replace(world, asks=tuple(asks))


def _can_branch(world: World) -> bool:
    """Tests whether the cache can share blocks and every budget has room for all branches at once."""
    budget = getattr(world.batching, "max_num_batched_tokens", MAX_WIDTH)
    pool = world.caching.pool(KvMemory(world.num_blocks, 1.0, max_model_len=world.max_model_len))
    return pool.can_fork and budget >= MAX_WIDTH
