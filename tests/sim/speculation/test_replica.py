"""Tests of replicas that speculate: leaps equal steps, closed forms, and the places where tokens appear."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.speculating import SpeculatingWorld, ToyProposer
from experiments.conformance.worlds import Ask
from policies.batching.sglang import Sglang
from policies.caching.paged import Paged
from policies.prediction.oracles import OracleWithNoise
from policies.scheduling.shortest_job import ShortestRemaining
from sim import simulate
from sim.speculation.acceptance.iid import Iid
from tests.worlds.speculating import draw_speculating

TICK_S = 0.125


@given(data=st.data())
def test_leap_equals_step(data, worlds):
    assert_leap_equals_step(data.draw(draw_speculating(worlds)))


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


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_a_horizon_in_tokens_is_shorter_in_passes(rate):
    """shortest_remaining decides anew when an output has used up its prediction, after fewer passes."""
    asks = (Ask(0.0, 1, 41), Ask(0.0, 3, 29), Ask(0.0, 1, 19), Ask(0.0, 9, 28))
    assert_leap_equals_step(
        SpeculatingWorld(
            asks=asks,
            batching=Sglang(max_num_batched_tokens=62, max_prefill_tokens=60, schedule_conservativeness=0.1),
            scheduling=ShortestRemaining(min_gain_tokens=5),
            prediction=OracleWithNoise(error=0.7),
            caching=Paged(block_size=3),
            num_blocks=11,
            num_users=2,
            think_s=0.4375,
            max_model_len=90,
            acceptance=Iid(rate=rate),
            proposer=ToyProposer(num_speculative_tokens=2),
        )
    )
