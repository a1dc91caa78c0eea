"""The paged cache: counts, watermark, and physical ids without leaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.paged import BlockPool, Paged
from policies.decode_set import DecodeSet
from policies.request import Prompt, Request
from policies.sequence import FinishReason, Sequence

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def make_sequence(request_id):
    request = Request(request_id, 0.0, Prompt(4))
    return Sequence(request, (0.0,), DecodeSet(8, BLOCK_SIZE), 100, FinishReason.length)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 16)), max_size=40))
def test_no_block_is_leaked_or_owned_twice(wishes):
    """Four sequences grow by a few tokens at a time, or give all back if that does not fit."""
    pool = Paged(block_size=BLOCK_SIZE).pool(NUM_BLOCKS)
    seqs = [make_sequence(number) for number in range(4)]
    num_tokens, ids = [0] * 4, [[], [], [], []]
    for number, more in wishes:
        seq = seqs[number]
        owned = pool.blocks_for(num_tokens[number])
        wanted = pool.blocks_for(num_tokens[number] + more)
        if more == 0 or wanted - owned > pool.num_free:
            pool.give_back(seq, owned)
            num_tokens[number], ids[number] = 0, []
        else:
            pool.take(wanted - owned)
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
    """A tenth of 25 blocks is 2.5: two blocks stay free, so 23 x 4 = 92 tokens can be admitted."""
    pool = Paged(block_size=4, watermark=0.1).pool(25)
    assert pool.max_tokens_per_seq == 92
    assert pool.can_admit(92)
    assert not pool.can_admit(93)
    pool.take(24)
    assert not pool.can_admit(1)
    pool.take(1)
    assert pool.num_free == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size=0: must be >= 1 token"),
        ({"watermark": 1.0}, "watermark=1.0: must be >= 0 and < 1"),
        ({"watermark": -0.1}, "watermark=-0.1: must be >= 0 and < 1"),
        ({"watermark": float("nan")}, "watermark=nan: must be >= 0 and < 1"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Paged(**settings)


def test_rejects_an_empty_pool():
    with pytest.raises(ValueError, match="num_blocks=0: must be >= 1"):
        Paged().pool(0)
