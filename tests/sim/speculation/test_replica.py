"""Tests of replicas that speculate: leaps equal steps, closed forms, and the places where tokens appear."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.worlds import Ask
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.speculation import SlotRules
from policies.speculation.fixed import Fixed
from policies.speculation.tree import TokenTree
from sim import simulate
from sim.speculation.acceptance.iid import Iid

TICK_S = 0.125


@st.composite
def proposers(draw):
    tree = draw(st.sampled_from([None, None, TokenTree.of_widths([2, 1]), TokenTree.of_widths([3, 2])]))
    num_tokens = draw(st.integers(1, 6)) if tree is None else tree.num_nodes
    rules = SlotRules(draw(st.booleans()), draw(st.integers(0, 1)), draw(st.booleans()))
    return ToyProposer(num_speculative_tokens=num_tokens, tree=tree, rules=rules)


def speculating(world, **settings):
    """Returns a world in which the replicas of another one speculate."""
    given_ = {
        each.name: getattr(world, each.name) for each in fields(SpeculatingWorld) if hasattr(world, each.name)
    }
    del given_["engine"]
    return SpeculatingWorld(**(given_ | settings))


@given(data=st.data())
def test_leap_equals_step(data, worlds):
    world = data.draw(worlds)
    proposer = data.draw(proposers())
    budgets = ("max_num_batched_tokens", "max_num_scheduled_tokens")
    limits = [getattr(world.batching, name, None) or 99 for name in budgets]
    assume(min(limits) > proposer.num_speculative_tokens + 1)  # configurations with less are refused
    caching = data.draw(
        st.sampled_from([Paged(block_size=1), Paged(block_size=4), PrefixCaching(block_size=4)])
    )
    acceptance = Iid(rate=data.draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])))
    draft_length = Fixed(num_tokens=data.draw(st.sampled_from([None, 0, 2])))
    assert_leap_equals_step(
        speculating(
            world, proposer=proposer, caching=caching, acceptance=acceptance, draft_length=draft_length
        )
    )


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_bursts_end_where_the_answer_ends(plans_ahead):
    """10 tokens with 3 drafts that are always right: the first alone, then bursts of 4, 4 and 1."""
    world = SpeculatingWorld(asks=(Ask(0.0, 4, 10),), acceptance=Iid(rate=1.0), plans_ahead=plans_ahead)
    run = assert_leap_equals_step(world)
    assert run.records.requests.finished_s.tolist() == [4 * TICK_S]
    assert run.records.requests.output_tokens.tolist() == [10]


@pytest.mark.parametrize(
    ("rate", "num_drafts", "num_tokens"), [(0.3, 1, 60_001), (0.8, 4, 200_001), (0.9, 7, 600_001)]
)
def test_the_mean_speed_is_that_of_the_closed_form(rate, num_drafts, num_tokens):
    """Leviathan et al., equation 1: (1 - a^(K + 1)) / (1 - a) tokens a pass, at constant prices."""
    world = SpeculatingWorld(
        asks=(Ask(0.0, 4, num_tokens),),
        acceptance=Iid(rate=rate),
        proposer=ToyProposer(num_speculative_tokens=num_drafts),
        max_model_len=1_000_000,
        num_blocks=300_000,
    )
    run = world.simulate()
    passes = run.records.requests.finished_s.item() / TICK_S - 1
    expected = (1 - rate ** (num_drafts + 1)) / (1 - rate)
    assert (num_tokens - 1) / passes == pytest.approx(expected, rel=0.005)


def test_the_table_of_iterations_counts_draft_tokens():
    run = SpeculatingWorld(asks=(Ask(0.0, 4, 10), Ask(0.0, 4, 10)), acceptance=Iid(rate=1.0)).simulate()
    table = run.records.iterations
    assert table.draft_tokens.tolist() == [0, 6, 6, 6]
    assert table.accepted_tokens.tolist() == [0, 6, 6, 6]
    assert table.drafted_tokens.tolist() == [6, 6, 6, 6]
    assert table.sampled_seqs.tolist() == [2, 8, 8, 8]
    assert np.all(table.kv_tokens_used <= table.kv_blocks_used * 4)


@pytest.mark.parametrize(("tree", "num_steps"), [("chain", 3), ("eagle_26", 5)])
def test_drafting_takes_a_step_for_each_level(tree, num_steps):
    """The 25 nodes of EAGLE's tree are drafted in five steps, one per level."""
    result = simulate(
        f"speculation/tree={tree}", model="llama3_1_8b", speculation="eagle", workload__num_requests=3
    )
    assert result.iterations["draft_steps"].max() == num_steps
