"""FastGen: policies of heads, the tokens that a sequence holds, and the attention that is kept, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.adaptive import FastGen, HeadPolicy
from policies.caching.pool import KvMemory, WeightReads
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs

HALF_FULL = ((0.5, 1.0, 0.0, 0.0, 0.0), (0.5, 0.0, 0.0, 0.0, 0.0))
"""Half of the heads attend to special tokens only, half to all tokens alike."""


def live(caching, num_prompt_tokens, num_output_tokens):
    """Returns (decode context tokens, blocks in use) of every iteration with decodes."""
    core = EngineCore(
        batching=Chunked(),
        scheduling=Fcfs(),
        block_pool=caching.pool(KvMemory(64)),
        max_num_seqs=8,
        max_model_len=1000,
    )
    core.add(Request(0, 0.0, Prompt(num_prompt_tokens)), stop_after=num_output_tokens)
    held = []
    while core.num_unfinished:
        plan = core.plan(0.0)
        if plan.num_decodes:
            held.append((plan.num_decode_context_tokens, core.block_pool.num_used))
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    assert core.block_pool.num_free == 64
    return held


def test_a_head_gets_the_cheapest_policy_that_recovers_its_attention():
    heads = (
        (0.5, 0.95, 0.0, 0.0, 0.05),
        (0.2, 0.5, 0.45, 0.0, 0.0),
        (0.1, 0.5, 0.2, 0.25, 0.0),
        (0.1, 0.5, 0.2, 0.2, 0.05),
        (0.1, 0.5, 0.2, 0.2, 0.04),
    )
    caching = FastGen(recovery=0.95, heads=heads)
    assert [head.policy for head in caching.policies] == [
        "special",
        "punctuation",
        "frequent",
        "local",
        "full",
    ]
    assert caching.kept_attention == pytest.approx(0.9 * 0.95 + 0.1)
    assert caching.weight_reads == WeightReads(decode_share=pytest.approx(0.2), prompt_rows=None)


def test_tokens_of_the_default_profile_match_hand_calculation():
    """1,000 tokens: 0.2 x 1 + 0.1 x 101 + 0.25 x 401 + 0.25 x 701 + 0.2 x 1,000 = 485.8."""
    assert FastGen().num_kept(1000) == 486
    assert FastGen(recovery=1.0).num_kept(1000) == 1000


def test_a_prompt_is_cut_at_its_end_and_every_block_afterwards():
    """1 special token in half of the heads: 31 tokens hold (1 + 31) / 2 = 16, then up to a block more.

    Blocks of 4; the next drop is due at 35 tokens: (1 + 35) / 2 = 18.
    """
    caching = FastGen(heads=HALF_FULL, block_size=4)
    assert caching.policies == (HeadPolicy(0.5, "special", 1.0), HeadPolicy(0.5, "full", 1.0))
    assert live(caching, 31, 7) == [(17, 5), (18, 5), (19, 5), (20, 5), (19, 5), (20, 5)]


@given(st.floats(0.01, 1.0), st.integers(1, 100_000))
def test_more_recovery_keeps_more_tokens_and_at_least_its_share_of_attention(recovery, num_tokens):
    caching, strict = FastGen(recovery=recovery), FastGen(recovery=1.0)
    assert 1 <= caching.num_kept(num_tokens) <= strict.num_kept(num_tokens) == num_tokens
    assert caching.kept_attention >= recovery - 1e-9
    assert all(head.kept_attention >= recovery - 1e-9 for head in caching.policies)


def test_the_note_states_the_proxy():
    assert "they keep 97.4 % of their attention on average and 95 % at least" in FastGen().quality_note


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recovery": 0.0}, "recovery=0.0: must be a share, > 0 and <= 1"),
        ({"num_special_tokens": -1}, "num_special_tokens=-1: must be >= 0"),
        ({"local_share": 1.5}, "local_share=1.5: must be a share, >= 0 and <= 1"),
        ({"heads": [[0.5, 1, 0, 0, 0]]}, "the shares of the heads add up to 0.5; they must add up to 1"),
        (
            {"heads": [[1.0, 0.9, 0.2, 0, 0]]},
            r"heads\[0\]=\[1.0, 0.9, 0.2, 0, 0\]: must be five numbers >= 0",
        ),
        ({"heads": [[1.0, 0.9]]}, r"heads\[0\]=\[1.0, 0.9\]: must be five numbers"),
        ({"watermark": 1.0}, "watermark=1.0: must be a share, >= 0 and < 1"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        FastGen(**settings)
