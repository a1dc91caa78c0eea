"""Physical ids: drawn on demand, the last freed first, without a list of those never used."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.pool import BlockPool
from policies.caching.prefix import PrefixPool


def test_ids_count_from_one_and_the_last_freed_is_the_next_drawn():
    pool = BlockPool(6, 4)
    assert pool.draw(3) == [1, 2, 3]
    pool.take_extra(2)
    pool.free_extra(2, [1, 3])
    assert pool.draw(4) == [3, 1, 4, 5]


def test_no_more_ids_than_blocks():
    pool = BlockPool(2, 4)
    pool.draw(2)
    with pytest.raises(AssertionError, match="more ids were assigned than there are blocks"):
        pool.draw(1)


@given(st.data())
def test_ids_come_as_from_a_stack_of_all_of_them(data):
    """The plain way: a stack with 1 on top, from which ids are drawn and to which they come back."""
    num_blocks = data.draw(st.integers(1, 20))
    pool, stack, drawn = BlockPool(num_blocks, 4), list(range(num_blocks, 0, -1)), []
    for _ in range(data.draw(st.integers(0, 12))):
        num_ids = data.draw(st.integers(-1, len(stack)))  # a holder of too many ids asks for fewer than 0
        expected = [stack.pop() for _ in range(num_ids)]
        assert pool.draw(num_ids) == expected
        drawn += expected
        given_back = data.draw(st.lists(st.sampled_from(drawn), unique=True)) if drawn else []
        drawn = [number for number in drawn if number not in given_back]
        pool.take_extra(len(given_back))
        pool.free_extra(len(given_back), given_back)
        stack += given_back


@pytest.mark.parametrize("kind", [BlockPool, PrefixPool])
def test_a_pool_of_a_billion_blocks_takes_no_memory(kind):
    tracemalloc.start()
    try:
        pool = kind(10**9, 1)
        assert tracemalloc.get_traced_memory()[1] < 100_000
        assert pool.num_free == 10**9
    finally:
        tracemalloc.stop()
