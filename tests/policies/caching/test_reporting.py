"""Compares what caches report to a listener with what they hold; reporting changes no decision."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import Tiered
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from tests.policies.cores import async_core

CACHES = {
    "prefix": PrefixCaching(block_size=4),
    "radix": Radix(),
    "radix of pages": Radix(block_size=4),
    "tiers": Tiered(block_size=4, host_gib=1e-6, write="through"),
    "tiers, written when evicted": Tiered(block_size=4, host_gib=1e-6),
}


class Index:
    """The blocks that are stored, as a router knows them: each by its tokens and all before them.

    A token is (content, position in it); what is equal in two requests has equal tokens.
    """

    def __init__(self, block_size):
        self.block_size = block_size
        self.requests = {}
        self.keys = {}
        self.below = {}  # by tier

    def tokens(self, request_id, num_tokens):
        request = self.requests[request_id]
        whole = [*request.prompt.segments, Segment(request.answer_id, num_tokens)]
        return [(content_id, i) for content_id, n in whole for i in range(n)][:num_tokens]

    def stored(self, request_id, first, names):
        for number, name in enumerate(names, first):
            assert name not in self.keys, "a block was stored twice"
            self.keys[name] = tuple(self.tokens(request_id, (number + 1) * self.block_size))

    def removed(self, names):
        for name in names:
            del self.keys[name]

    def stored_below(self, tier, names):
        for name in names:
            assert name not in self.below.setdefault(tier, set()), "a block was stored twice"
            self.below[tier].add(name)

    def removed_below(self, tier, names):
        for name in names:
            self.below[tier].remove(name)

    def num_found(self, tokens):
        """Counts the tokens of the longest prefix, as a router would."""
        known, size = set(self.keys.values()), self.block_size
        ends = range(size, len(tokens), size)
        return next((end - size for end in ends if tuple(tokens[:end]) not in known), len(ends) * size)


def make_engine(caching, num_blocks, kind=EngineCore):
    return kind(
        batching=Chunked(max_num_batched_tokens=24),
        scheduling=Fcfs(),
        block_pool=caching.pool(KvMemory(num_blocks * 4 // caching.block_size, bytes_per_token=1.0)),
        max_num_seqs=4,
        max_model_len=200,
    )


def steps(core, requests, on_plan):
    """Serves requests that come one per step; yields what each step decides."""
    left = list(requests)
    while left or core.unfinished:
        if left:
            core.add(*left.pop(0))
        plan = core.plan(0.0)
        if plan is None:
            for request_id in list(core.loading):
                core.loaded(request_id)
            core.transfers.take()
            continue
        on_plan()
        yield plan.tokens_by_request, [(seq.request_id, seq.num_found) for seq in plan.admitted]
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()


def quoted(asks):
    """Returns requests with their numbers of output tokens; some prompts continue an earlier answer."""
    requests = []
    for pieces, num_output, quotes in asks:
        segments = [Segment(content, num_tokens) for content, num_tokens in pieces]
        if quotes is not None and quotes < len(requests):
            earlier, num_earlier = requests[quotes]
            segments = [*earlier.prompt.segments, Segment(earlier.answer_id, num_earlier), *segments]
        num_tokens = sum(segment.num_tokens for segment in segments)
        if num_tokens + num_output > 90:
            continue
        prompt = Prompt(num_tokens, tuple(segments))
        requests.append((Request(len(requests), 0.0, prompt, answer_id=1000 + len(requests)), num_output))
    return requests


pieces = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 13)), min_size=1, max_size=3)
asked = st.lists(st.tuples(pieces, st.integers(1, 20), st.none() | st.integers(0, 8)), min_size=1, max_size=9)


@pytest.mark.parametrize("caching", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", [EngineCore, async_core])
@given(asks=asked, num_blocks=st.integers(26, 60))
def test_an_index_of_what_is_reported_finds_what_the_cache_finds(caching, kind, asks, num_blocks):
    requests = quoted(asks)
    core = make_engine(caching, num_blocks, kind)
    index = Index(caching.block_size)
    assert core.block_pool.report_to(index)
    index.requests = {request.request_id: request for request, _ in requests}

    def compare():
        core.block_pool.report_delayed(core.running.values())
        for request, num_output in requests:
            whole = (*request.prompt.segments, Segment(request.answer_id, num_output))
            num_tokens = request.prompt.num_tokens + num_output
            probe = Request(999, 0.0, Prompt(num_tokens, whole))
            assert core.block_pool.peek(probe) == index.num_found(
                index.tokens(request.request_id, num_tokens)
            )

    decided = list(steps(core, requests, compare))
    assert decided == list(steps(make_engine(caching, num_blocks, kind), requests, lambda: None))


def test_a_cache_without_contents_has_nothing_to_report():
    assert not make_engine(Paged(), 10).block_pool.report_to(Index(16))
