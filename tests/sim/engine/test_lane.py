"""A replica that keeps to the lane leaves the records of one that never does, to the last bit."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.worlds import World
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from sim.engine import lane_replica
from tests.worlds.clusters import draw_clusters, draw_crashes


@st.composite
def draw_common(draw: st.DrawFn, worlds: st.SearchStrategy[World]) -> World:
    """Strategy: worlds that a lane suits, at least until something comes that it does not know."""
    world = draw(worlds)
    tokens, size = draw(st.sampled_from([8, 16, 64, 400])), world.caching.block_size
    watermark = draw(st.sampled_from([0.0, 0.0, 0.2]))
    asks, every = world.asks, draw(st.sampled_from([1, 1, 1, 4]))  # most without contents
    asks = tuple(
        ask._replace(contents=(), answer_id=None) if place % every == 0 else ask
        for place, ask in enumerate(asks)
    )
    return replace(
        world,
        asks=asks,
        batching=Chunked(max_num_batched_tokens=tokens, enable_chunked_prefill=draw(st.booleans())),
        scheduling=draw(st.sampled_from([Fcfs(), Fcfs(), Priority()])),
        caching=draw(
            st.sampled_from(
                [
                    Paged(block_size=size, watermark=watermark),
                    PrefixCaching(block_size=size, watermark=watermark),
                ]
            )
        ),
        prediction=None,
        num_blocks=world.num_blocks * draw(st.sampled_from([1, 2, 10])),
        max_num_seqs=draw(st.sampled_from([2, 8, 8])),
        engine=EngineCore,
    )


def simulated(world: World, monkeypatch: pytest.MonkeyPatch, *, in_lane: bool) -> Any:
    """A run, with the number of replicas that began in the lane and that have left it before the end."""
    with monkeypatch.context() as patch:
        if not in_lane:
            patch.setattr(lane_replica, "suits", lambda core: False)
        return world.simulate()


def assert_lane_is_general(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = simulated(world, monkeypatch, in_lane=True)
    general = simulated(world, monkeypatch, in_lane=False)
    one, other = lane.records, general.records
    for table in ("requests", "iterations", "events", "own_gaps"):
        of_lane, of_general = getattr(one, table), getattr(other, table)
        assert of_lane.equals(of_general), f"{table}:\n{_differing(of_lane, of_general)}"
    for field in fields(one):
        if field.name.startswith("gap_"):
            assert getattr(one, field.name).tolist() == getattr(other, field.name).tolist()
        elif field.name not in ("requests", "iterations", "events", "own_gaps", "unfilled", "adapters"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert lane.source.ends == general.source.ends


def _differing(one: Any, other: Any) -> Any:
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} rows\n{one}\n{other}"
    names = [name for name in one if not one[name].equals(other[name])]
    return one[names].compare(other[names])


@given(world=draw_common(draw_worlds()))
def test_any_world(world, monkeypatch_session):
    assert_lane_is_general(world, monkeypatch_session)


@given(world=draw_common(draw_clusters() | draw_crashes()))
def test_any_cluster(world, monkeypatch_session):
    assert_lane_is_general(world, monkeypatch_session)


@pytest.fixture(scope="session")
def monkeypatch_session():
    with pytest.MonkeyPatch.context() as patch:
        yield patch
