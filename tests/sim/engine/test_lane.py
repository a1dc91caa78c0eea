"""A replica that keeps to a lane leaves the records of one that never does, to the last bit."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.worlds import Ask
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from sim.engine import lane_replica
from sim.engine.lane_replica import LaneReplica
from tests.worlds.clusters import Cluster, draw_clusters, draw_crashes

TABLES = ("requests", "iterations", "events", "own_gaps")
GAPS = ("gap_s", "gap_count", "gap_end_s")
NOT_COMPARED = (*TABLES, *GAPS, "unfilled", "adapters")


@st.composite
def draw_lane_worlds(draw, worlds):
    """Draws worlds that a lane suits, most of them until an event comes that it does not handle."""
    world = draw(worlds)
    block_size = world.caching.block_size
    every = draw(st.sampled_from([1, 1, 1, 4]))  # request in so many names no contents
    asks = tuple(
        ask._replace(contents=(), answer_id=None) if place % every == 0 else ask
        for place, ask in enumerate(world.asks)
    )
    budget = draw(st.sampled_from([8, 16, 64, 400]))
    caching, watermark = draw(st.sampled_from([Paged, PrefixCaching])), draw(st.sampled_from([0.0, 0.0, 0.2]))
    return replace(
        world,
        asks=asks,
        batching=Chunked(max_num_batched_tokens=budget, enable_chunked_prefill=draw(st.booleans())),
        scheduling=draw(st.sampled_from([Fcfs(), Fcfs(), Priority()])),
        caching=caching(block_size=block_size, watermark=watermark),
        routing=draw(st.sampled_from([RoundRobin(), LeastOutstanding(), world.routing])),
        prediction=None,
        num_blocks=world.num_blocks * draw(st.sampled_from([1, 2, 10])),
        max_num_seqs=draw(st.sampled_from([2, 8, 8])),
        engine=EngineCore,
    )


def assert_lane_is_general(world):
    """Simulates the world with and without lanes, and compares all that the runs leave."""
    in_lane = world.simulate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_replica, "suits", lambda core: False)
        general = world.simulate()
    one, other = in_lane.records, general.records
    for name in TABLES:
        assert getattr(one, name).equals(getattr(other, name)), f"{name} differ"
    for name in GAPS:
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    for field in fields(one):
        if field.name not in NOT_COMPARED:
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert in_lane.source.ends == general.source.ends


@given(draw_lane_worlds(draw_worlds()))
def test_lane_is_general(world):
    assert_lane_is_general(world)


@given(draw_lane_worlds(draw_clusters() | draw_crashes()))
def test_lane_is_general_in_a_cluster(world):
    """Replicas crash, slow down and come, clients give up and try again."""
    assert_lane_is_general(world)


@pytest.fixture
def left_at(monkeypatch):
    """Returns a list that grows by (time, running sequences) with every lane that ends before its run."""
    left = []
    leave_lane = LaneReplica.leave_lane

    def note(replica):
        if replica._loop is not None:
            left.append((replica._clock.now, len(replica._loop.lane.sequences)))
        leave_lane(replica)

    monkeypatch.setattr(LaneReplica, "leave_lane", note)
    return left


def world_of(*asks, **settings):
    usual = {"caching": PrefixCaching(block_size=4), "engine": EngineCore}
    return Cluster(asks=asks, **usual | settings)


A, B = Ask(0.0, 10, 30), Ask(0.5, 12, 20)


def test_a_run_without_surprises_keeps_to_the_lane(left_at):
    run = world_of(A, B).simulate()
    (end,) = left_at
    assert end == (run.records.end_s, 0)


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        pytest.param({"num_blocks": 14}, (A, B), id="memory runs out"),
        pytest.param({}, (A, Ask(0.5, 12, 20, contents=((1, 8),))), id="contents are named"),
        pytest.param({}, (A, Ask(0.5, 12, 20, answer_id=7)), id="an answer is named"),
        pytest.param({"patience_s": 2.0}, (A, B), id="a client gives up"),
        pytest.param({"until_s": 1.0}, (A, B), id="the run is over"),
    ],
)
def test_a_surprise_ends_the_lane_in_the_middle(settings, asks, left_at):
    world = world_of(*asks, **settings)
    assert_lane_is_general(world)
    time_s, num_sequences = left_at[0]
    assert time_s > 0
    assert num_sequences


@pytest.mark.parametrize(
    "settings",
    [
        {"batching": Chunked(long_prefill_token_threshold=8)},
        {"caching": Paged(block_size=4, presume_cached=True)},
    ],
)
def test_an_engine_that_does_not_suit_is_whole_from_the_beginning(settings, left_at):
    world_of(A, B, **settings).simulate()
    assert left_at == []
