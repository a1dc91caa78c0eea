"""Speculation with every other feature: in worlds of every kind nothing is lost, and a leap equals steps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.draws import draw_worlds
from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.worlds import Ask
from hwmodels.iterations import Jitter
from policies.batching.inflight import InFlight
from policies.batching.sglang import Sglang
from policies.caching.paged import Paged
from policies.core.request import Branching
from policies.speculation import SlotRules
from sim.metrics.output import check_conservation
from tests.worlds.branching import draw_branching_worlds
from tests.worlds.clusters import draw_clusters, draw_crashes
from tests.worlds.services import Service, draw_adapter_services, draw_failing_services, draw_services
from tests.worlds.speculating import draw_speculating

KINDS = {
    "engines": draw_worlds,
    "adapters": draw_adapter_worlds,
    "branches": draw_branching_worlds,
    "clusters": draw_clusters,
    "crashes": draw_crashes,
    "disaggregated": draw_services,
    "disaggregated, failing": draw_failing_services,
    "disaggregated, with adapters": draw_adapter_services,
}


def assert_nothing_is_lost(world, run):
    """Checks that requests, tokens and KV blocks are neither lost nor counted twice."""
    records, requests = run.records, run.records.requests
    counts = check_conservation(records)
    assert len(run.source.ends) == counts["arrived"] - counts["unfinished"]
    assert len({request_id for request_id, _, _ in run.source.ends}) == len(run.source.ends)
    if not isinstance(world, Service):  # there a first token may be computed in vain
        table = records.iterations
        num_tokens = (table.sampled_seqs - table.draft_tokens + table.kept_tokens).sum()
        produced = requests.output_tokens.sum() + requests.lost_tokens.sum()
        assert num_tokens == produced + records.num_discarded_tokens
    if world.until_s is not None:
        return
    assert counts["unfinished"] == 0
    assert requests.request_id.tolist() == list(range(len(world.asks)))
    for replica in run.fleet.replicas:
        pool, residents = replica.core.block_pool, replica.core.residents
        num_kept = getattr(pool, "num_pinned", 0) + (0 if residents is None else residents.num_blocks)
        assert pool.num_used == num_kept, "KV blocks are leaked"
        assert replica.core.num_unfinished == 0
        assert len(replica.core.free_slots) == replica.core.max_num_seqs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=7)
@given(data=st.data())
def test_leap_equals_step_and_nothing_is_lost(kind, data):
    world = data.draw(draw_speculating(KINDS[kind]()))
    assert_nothing_is_lost(world, assert_leap_equals_step(world))


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(data=st.data())
def test_leap_equals_step_and_nothing_is_lost_in_many_worlds(kind, data):
    world = data.draw(draw_speculating(KINDS[kind]()))
    assert_nothing_is_lost(world, assert_leap_equals_step(world))


@settings(max_examples=7)
@given(data=st.data())
def test_leap_equals_step_with_jitter(data):
    world = data.draw(draw_speculating(draw_worlds()))
    jittered = type(world)(**(vars(world) | {"jitter": Jitter(independent_cv=0.2, drift_cv=0.1)}))
    assert_nothing_is_lost(jittered, assert_leap_equals_step(jittered))


@pytest.mark.parametrize("num_blocks", range(7, 15))
def test_leap_equals_step_where_sglang_retracts(num_blocks):
    """Slots that a pass has left behind are counted as held, in a leap and by the policy that retracts."""
    asks = tuple(Ask(0.0, num_tokens, 20 + 7 * num_tokens) for num_tokens in (3, 1, 9, 4))
    world = SpeculatingWorld(
        asks=asks,
        batching=Sglang(schedule_conservativeness=0.1),
        caching=Paged(block_size=8),
        num_blocks=num_blocks,
        max_model_len=60,
        proposer=ToyProposer(num_speculative_tokens=6, rules=SlotRules(keeps_lookahead=True)),
    )
    assert_nothing_is_lost(world, assert_leap_equals_step(world))


@pytest.mark.parametrize("num_prompt_tokens", [63, 64, 65])
def test_a_prompt_of_the_whole_budget_is_split_if_drafting_needs_a_part_of_it(num_prompt_tokens):
    world = SpeculatingWorld(
        asks=(Ask(0.0, num_prompt_tokens, 5),),
        batching=InFlight(max_num_batched_tokens=64, enable_chunked_context=False),
        proposer=ToyProposer(num_speculative_tokens=3, rules=SlotRules(num_input_slots=1)),
    )
    assert_nothing_is_lost(world, assert_leap_equals_step(world))


def test_requests_with_branches_are_rejected_and_the_others_served():
    """vLLM serves each branch as a request of its own; this engine says so and goes on."""
    asks = (Ask(0.0, 4, 5), Ask(0.0, 4, 5, branching=Branching(2)), Ask(0.1, 4, 5))
    requests = SpeculatingWorld(asks=asks).simulate().records.requests
    assert Counter(requests.status) == {"finished": 2, "rejected": 1}
    assert requests.reason[1].startswith("2 branches: an engine that speculates serves one answer")
