"""A router's look into a cache finds what an admission would find, and leaves no trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.decode_set import DecodeSet
from policies.core.request import Prompt, Request, Segment
from policies.core.sequence import FinishReason, Sequence

pieces = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=4)
prompts = st.tuples(pieces, st.integers(0, 6))  # and tokens without a name


def request_of(request_id, prompt):
    named, num_more = prompt
    num_tokens = max(1, sum(n for _, n in named) + num_more)
    return Request(request_id, 0.0, Prompt(num_tokens, tuple(Segment(*piece) for piece in named)))


def waiting(pool, request):
    num_tokens = request.prompt.num_tokens
    return Sequence(
        request, DecodeSet(1, pool.block_size, {}), num_tokens + 1, FinishReason.stop, num_tokens + 1
    )


def serve(pool, request):
    """Admits, computes and releases a request, if it can be admitted."""
    seq, num_tokens = waiting(pool, request), request.prompt.num_tokens
    num_cached = pool.num_cached(seq)
    if pool.can_admit(seq, num_cached, True):
        pool.admit(seq, num_cached)
        pool.grow(seq, num_cached, num_tokens)
        pool.computed(seq, num_tokens)
        pool.release(seq, num_tokens)


def found_by(caching, served, peeked, requests):
    """Returns (cached tokens, evictions) for each request, in a cache of its own that was peeked at."""
    found = []
    for request in requests:
        pool = caching.pool(KvMemory(40 // caching.block_size))
        for i, prompt in enumerate(served):
            for other in peeked:
                assert pool.peek(other) == pool.peek(other)
            serve(pool, request_of(i, prompt))
        found.append((pool.num_cached(waiting(pool, request)), pool.num_evicted))
    return found


@pytest.mark.parametrize(
    "caching",
    [
        PrefixCaching(block_size=1),
        PrefixCaching(block_size=4),
        Radix(block_size=1),
        Radix(block_size=3),
        Paged(block_size=4),
        Paged(block_size=4, presume_cached=True),
    ],
    ids=str,
)
@given(served=st.lists(prompts, max_size=8), asked=st.lists(prompts, min_size=1, max_size=3))
def test_a_peek_finds_what_an_admission_would_and_changes_nothing(caching, served, asked):
    pool = caching.pool(KvMemory(40 // caching.block_size))
    requests = [request_of(100 + i, prompt) for i, prompt in enumerate(asked)]
    for i, prompt in enumerate(served):
        serve(pool, request_of(i, prompt))
    found = found_by(caching, served, (), requests)
    assert [(pool.peek(request), pool.num_evicted) for request in requests] == found
    assert found_by(caching, served, requests, requests) == found


def test_a_request_that_comes_again_finds_its_tokens_without_a_name():
    pool = PrefixCaching(block_size=4).pool(KvMemory(10))
    request = request_of(7, ([], 9))
    assert pool.peek(request) == 0
    serve(pool, request)
    assert pool.peek(request) == 8
    assert pool.peek(request_of(8, ([], 9))) == 0
