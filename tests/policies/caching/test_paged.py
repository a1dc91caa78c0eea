"""The paged cache: counts, watermark, and physical ids without leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool, KvMemory
from policies.core.decode_set import DecodeSet
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.core.sequence import FinishReason, Sequence

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def make_sequence(request_id, num_prompt_tokens=4):
    request = Request(request_id, 0.0, Prompt(num_prompt_tokens))
    return Sequence(request, DecodeSet(8, BLOCK_SIZE, {}), 100, FinishReason.length, 100)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 16)), max_size=40))
def test_no_block_is_leaked_or_owned_twice(wishes):
    """Four sequences grow by a few tokens at a time, or give all back if that does not fit."""
    pool = Paged(block_size=BLOCK_SIZE).pool(KvMemory(NUM_BLOCKS))
    seqs = [make_sequence(number) for number in range(4)]
    num_tokens, ids = [0] * 4, [[], [], [], []]
    for number, more in wishes:
        seq = seqs[number]
        owned = pool.blocks_for(num_tokens[number])
        wanted = pool.blocks_for(num_tokens[number] + more)
        assert pool.blocks_to_grow(seq, num_tokens[number], num_tokens[number] + more) == wanted - owned
        if more == 0 or wanted - owned > pool.num_free:
            pool.release(seq, num_tokens[number])
            num_tokens[number], ids[number] = 0, []
        else:
            pool.grow(seq, num_tokens[number], num_tokens[number] + more)
            num_tokens[number] += more
            grown = list(pool.block_ids(seq, num_tokens[number]))
            assert grown[:owned] == ids[number], "a block changed its name while it was held"
            ids[number] = grown
        held = [block_id for of_one in ids for block_id in of_one]
        assert len(set(held)) == len(held) == pool.num_used == NUM_BLOCKS - pool.num_free
        assert set(held) <= set(range(1, NUM_BLOCKS + 1)), "block 0 is the null block"


def test_blocks_are_rounded_up():
    pool = BlockPool(num_blocks=10, block_size=4)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_watermark_is_left_free_by_admissions_only():
    """A tenth of 25 blocks is 2.5: two blocks stay free, so 23 x 4 = 92 tokens may come in beside others."""
    pool = Paged(block_size=4, watermark=0.1).pool(KvMemory(25))
    assert pool.can_admit(make_sequence(0, 92), 0, is_alone=False)
    assert not pool.can_admit(make_sequence(0, 93), 0, is_alone=False)
    assert pool.max_tokens_per_seq == 100
    assert pool.can_admit(make_sequence(0, 100), 0, is_alone=True)
    pool.take(24)
    assert not pool.can_admit(make_sequence(0, 1), 0, is_alone=False)
    pool.take(1)
    assert pool.num_free == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size=0: must be >= 1 token"),
        ({"watermark": 1.0}, "watermark=1.0: must be a share, >= 0 and < 1"),
        ({"watermark": -0.1}, "watermark=-0.1: must be a share, >= 0 and < 1"),
        ({"watermark": float("nan")}, "watermark=nan: must be a share, >= 0 and < 1"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Paged(**settings)


def test_rejects_an_empty_pool():
    with pytest.raises(ValueError, match="num_blocks=0: must be >= 1"):
        Paged().pool(KvMemory(0))


# Blocks that are presumed cached


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (100, 96), (101, 100)]
)
def test_every_full_block_of_a_prompt_but_its_last_is_presumed_cached(num_prompt_tokens, num_cached):
    """At least one token is computed, or there would be no first answer token."""
    seq = make_sequence(0, num_prompt_tokens)
    assert Paged(block_size=BLOCK_SIZE, presume_cached=True).pool(KvMemory(99)).num_cached(seq) == num_cached
    assert Paged(block_size=BLOCK_SIZE).pool(KvMemory(99)).num_cached(seq) == 0


def test_only_what_is_not_cached_is_computed_but_all_blocks_are_taken(make_core, make_request, run_step):
    """10 tokens: two full blocks are there, 2 tokens are left; three blocks hold them."""
    core = make_core(presume_cached=True)
    core.add(make_request(0, 10), stop_after=3)
    plan = core.plan(0.0)
    (chunk,) = plan.chunks
    assert (chunk.num_cached, chunk.num_tokens, chunk.completes) == (8, 2, True)
    assert (plan.tokens_by_request, core.block_pool.num_used) == ({0: 2}, 3)
    core.commit(plan, StepOutcome(), 0.0)
    assert core.num_tokens_held == 10
    assert run_step(core)[0] == {0: 1}
    core.check_integrity()


def test_sequences_do_not_share_the_blocks_that_are_presumed(make_core, make_request, run_step):
    core = make_core(presume_cached=True)
    for request_id in range(3):
        core.add(make_request(request_id, 9))
    assert run_step(core)[0] == {0: 1, 1: 1, 2: 1}
    assert core.block_pool.num_used == 3 * 3


def test_a_budget_counts_computed_tokens_only(make_core, make_request, run_step):
    """Prompts of 9 and 11 tokens: 1 and 3 to compute; a budget of 2 gives one to each, then the rest."""
    core = make_core(presume_cached=True, batching=Chunked(max_num_batched_tokens=2))
    core.add(make_request(0, 9), stop_after=1)
    core.add(make_request(1, 11), stop_after=1)
    assert run_step(core)[0] == {0: 1, 1: 1}
    assert run_step(core)[0] == {1: 2}
    assert core.num_unfinished == 0


def test_a_prompt_is_admitted_only_if_all_its_blocks_are_free(make_core, make_request, run_step):
    core = make_core(presume_cached=True, num_blocks=5)
    core.add(make_request(0, 12), stop_after=1)
    core.add(make_request(1, 12), stop_after=1)
    assert run_step(core)[0] == {0: 4}
    assert run_step(core)[0] == {1: 4}


def test_after_a_preemption_the_answer_so_far_is_computed_again_the_prompt_is_not(
    make_core, make_request, run_out
):
    """Four blocks. Each prompt of 5 takes two and has one token to compute. When 0 needs a third block at its
    9th token, 1 has to go: with 9 tokens known, 4 of them presumed cached, it computes 5 to return.
    """
    core = make_core(presume_cached=True, num_blocks=4)
    core.add(make_request(0, 5), stop_after=5)
    core.add(make_request(1, 5), stop_after=5)
    decision_log = run_out(core)
    assert decision_log[0] == ({0: 1, 1: 1}, [], 4)
    assert [tokens for tokens, preempted, _ in decision_log if preempted] == [{0: 1}]
    assert decision_log[-1][0] == {1: 5}
    assert core.block_pool.num_free == 4
