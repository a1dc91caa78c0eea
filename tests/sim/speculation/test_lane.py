"""A replica that speculates in a lane leaves the records of one that never does, to the last bit."""

import inspect
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from experiments.conformance.speculating import ToyProposer
from experiments.conformance.worlds import Ask
from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.speculation import SlotRules
from policies.speculation.adaptive import Adaptive
from policies.speculation.engine.core import SpeculativeCore
from policies.speculation.fixed import Fixed
from sim.speculation import replica
from sim.speculation.acceptance.iid import Iid
from sim.speculation.replica import SpeculativeReplica
from tests.sim.engine.test_lane import GAPS, NOT_COMPARED, TABLES, draw_lane_worlds
from tests.worlds.clusters import draw_clusters, draw_crashes
from tests.worlds.speculating import Patchy, SpeculatingCluster, draw_acceptances, draw_proposers, speculating


@st.composite
def draw_draft_lanes(draw, worlds):
    """Draws worlds that a lane with drafts suits, most of them until an event that it does not handle."""
    world = draw(draw_lane_worlds(worlds))
    proposer = draw(draw_proposers())
    least = 1 + proposer.num_speculative_tokens + proposer.rules.num_input_slots
    budget = max(world.batching.max_num_batched_tokens, least)
    return speculating(
        replace(
            world,
            batching=replace(world.batching, max_num_batched_tokens=budget),
            num_blocks=world.num_blocks + draw(st.sampled_from([0, 10, 100])),
            max_model_len=draw(st.sampled_from([world.max_model_len, 10_000])),
        ),
        proposer=proposer,
        acceptance=draw(draw_acceptances()),
        draft_length=draw(st.builds(Fixed, num_tokens=st.sampled_from([None, None, None, 0, 1]))),
        engine=SpeculativeCore,
    )


def assert_lane_is_general(world):
    """Simulates the world with and without lanes, and compares all that the runs leave."""
    in_lane = world.simulate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "suits", lambda core: False)
        general = world.simulate()
    one, other = in_lane.records, general.records
    for name in TABLES:
        assert getattr(one, name).equals(getattr(other, name)), f"{name} differ"
    for name in GAPS:
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    for field in fields(one.speculation):
        ours, theirs = getattr(one.speculation, field.name), getattr(other.speculation, field.name)
        assert ours.equals(theirs), f"{field.name} differ"
    for field in fields(one):
        if field.name not in (*NOT_COMPARED, "speculation"):
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert in_lane.source.ends == general.source.ends


@given(draw_draft_lanes(draw_worlds()))
def test_lane_is_general(world):
    assert_lane_is_general(world)


@given(draw_draft_lanes(draw_clusters() | draw_crashes()))
def test_lane_is_general_in_a_cluster(world):
    """Replicas crash, slow down and come, clients give up and try again."""
    assert_lane_is_general(world)


@pytest.fixture
def left_at(monkeypatch):
    """Returns a list that grows by (time, running sequences) with every lane that ends before its run."""
    left = []
    leave_lane = SpeculativeReplica.leave_lane
    if not inspect.isfunction(leave_lane):
        pytest.skip("compiled code calls its own method, not one that replaces it")

    def note(replica):
        if replica._draft_loop is not None:
            left.append((replica._clock.now, len(replica._draft_loop.lane.sequences)))
        leave_lane(replica)

    monkeypatch.setattr(SpeculativeReplica, "leave_lane", note)
    return left


def world_of(*asks, **settings):
    usual = {"caching": PrefixCaching(block_size=4), "engine": SpeculativeCore, "num_blocks": 100}
    return SpeculatingCluster(asks=asks, **usual | settings)


A, B = Ask(0.0, 10, 30), Ask(0.5, 12, 20)


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_run_without_surprises_keeps_to_the_lane(left_at, plans_ahead):
    world = world_of(A, B, plans_ahead=plans_ahead)
    run = world.simulate()
    ((time_s, num_sequences),) = left_at
    assert time_s >= run.records.end_s
    assert num_sequences == 0
    assert_lane_is_general(world)


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        pytest.param({"num_blocks": 16}, (A, B), id="memory runs out"),
        pytest.param({}, (A, Ask(0.5, 12, 20, contents=((1, 8),))), id="contents are named"),
        pytest.param({}, (A, Ask(0.5, 1, 20)), id="a prompt of one token"),
        pytest.param({"patience_s": 1.0}, (A, B), id="a client gives up"),
        pytest.param({"until_s": 1.0}, (A, B), id="the run is over"),
        pytest.param(
            {"batching": Chunked(max_num_batched_tokens=11)},
            3 * (Ask(0.0, 10, 90),),
            id="no budget for drafts",
        ),
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
        {"draft_length": Adaptive()},
        {"proposer": ToyProposer(rules=SlotRules(prefill_lookahead=3))},
    ],
)
def test_an_engine_that_does_not_suit_is_whole_from_the_beginning(settings, left_at):
    world_of(A, B, **settings).simulate()
    assert left_at == []


def test_a_request_with_shorter_drafts_ends_the_lane(left_at):
    world_of(A, B, acceptance=Patchy(of=Iid(rate=0.6))).simulate()
    assert left_at[0] == (0.0, 0)
