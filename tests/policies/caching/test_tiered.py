"""Tiers below the GPU: what moves down, what is found there, and when a sequence may go on."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.tier import Tier
from policies.caching.tiered import GIB, Tiered
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, Transfer
from policies.core.request import Prompt, Request, Segment
from policies.core.sequence import SequenceState
from policies.scheduling.fcfs import Fcfs

BLOCK_SIZE = 4
BYTES_PER_TOKEN = GIB / (16 * BLOCK_SIZE)  # 16 blocks a GiB


def make_engine(num_blocks=8, host_blocks=8, disk_blocks=0, write="back", min_load_tokens=1):
    caching = Tiered(
        block_size=BLOCK_SIZE,
        host_gib=host_blocks / 16,
        disk_gib=disk_blocks / 16,
        write=write,
        min_load_tokens=min_load_tokens,
    )
    return EngineCore(
        batching=Chunked(),
        scheduling=Fcfs(),
        block_pool=caching.pool(KvMemory(num_blocks, BYTES_PER_TOKEN)),
        max_num_seqs=8,
        max_model_len=4096,
    )


def prompt(content_id, num_tokens=16):
    return Prompt(num_tokens + 1, (Segment(content_id, num_tokens),))


def serve(core, request_id, content_id):
    """Serves a request of one output token with instant loads; returns found tokens and transfers."""
    core.add(Request(request_id, 0.0, prompt(content_id)), stop_after=1)
    transfers, found = [], 0
    while core.num_unfinished:
        plan = core.plan(0.0)
        wanted = core.take_transfers()
        transfers += [(t.source, t.target, t.num_tokens) for t in wanted]
        for transfer in wanted:
            if transfer.seq is not None:
                assert transfer.seq.state is SequenceState.loading
                core.loaded(transfer.seq.request_id)
        if plan is not None:
            found += sum(seq.num_found for seq in plan.admitted)
            core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    return found, transfers


def test_what_was_evicted_is_loaded_from_host_memory():
    """Eight blocks: a prompt takes 5 and leaves 4 with content; serving two more evicts the first's."""
    core = make_engine(host_blocks=100)
    assert serve(core, 0, 0) == (0, [])
    assert serve(core, 1, 1) == (0, [("gpu", "host", 4)])  # 4 without content, and the last of A's
    assert serve(core, 2, 2)[0] == 0
    found, transfers = serve(core, 3, 0)
    assert found == 16
    assert ("host", "gpu", 16) in transfers


def test_a_hit_goes_on_below_where_it_ends_on_the_gpu():
    """The last of the first prompt's four blocks is evicted: three are found on the GPU, one on the host."""
    core = make_engine(host_blocks=100)
    serve(core, 0, 0)
    serve(core, 1, 1)
    found, transfers = serve(core, 2, 0)
    assert found == 16
    assert ("host", "gpu", 4) in transfers


def test_writing_through_copies_once_and_evicts_for_nothing():
    core = make_engine(host_blocks=100, write="through")
    assert serve(core, 0, 0)[1] == [("gpu", "host", 16)]
    assert serve(core, 1, 1)[1] == [("gpu", "host", 16)]
    assert serve(core, 2, 2)[1] == [("gpu", "host", 16)]
    assert serve(core, 3, 0) == (16, [("host", "gpu", 16)])


def test_the_host_evicts_to_the_disk_and_both_are_loaded_at_once():
    """The host holds two blocks; what does not fit goes on to the disk."""
    core = make_engine(host_blocks=2, disk_blocks=100, write="through")
    serve(core, 0, 0)
    found, transfers = serve(core, 1, 1)
    assert ("host", "disk", 8) in transfers
    serve(core, 2, 2)
    found, transfers = serve(core, 3, 0)
    assert found == 16
    assert sum(n for source, target, n in transfers if target == "gpu") == 16
    assert {source for source, target, n in transfers if target == "gpu"} <= {"host", "disk"}


def test_a_sequence_waits_for_both_its_transfers():
    core = make_engine(host_blocks=2, disk_blocks=100, write="through")
    serve(core, 0, 0)
    for request_id in range(1, 5):
        serve(core, request_id, request_id)
    core.block_pool._tiers[0].put(core.block_pool._places.path(Request(9, 0.0, prompt(0)))[0][0], 0, 2)
    seq = core.add(Request(9, 0.0, prompt(0)), stop_after=2)
    assert core.plan(0.0) is None
    loads = [t for t in core.take_transfers() if t.seq is seq]
    assert [(t.source, t.num_tokens) for t in loads] == [("host", 8), ("disk", 8)]
    core.loaded(9)
    assert seq.state is SequenceState.loading
    assert core.plan(0.0) is None
    core.loaded(9)
    assert core.plan(0.0).tokens_by_request == {9: 1}


def test_short_hits_are_computed():
    core = make_engine(host_blocks=100, min_load_tokens=17)
    for request_id in range(3):
        serve(core, request_id, request_id)
    assert serve(core, 3, 0)[1].count(("host", "gpu", 16)) == 0


def test_an_abort_while_loading_leaves_no_content_that_never_came():
    core = make_engine(host_blocks=100)
    for request_id in range(3):
        serve(core, request_id, request_id)
    core.add(Request(3, 0.0, prompt(0)), stop_after=1)
    assert core.plan(0.0) is None
    core.take_transfers()
    core.abort(3)
    core.check_integrity()
    core.loaded(3)  # too late: no sequence waits
    seq = core.add(Request(4, 0.0, prompt(0)), stop_after=1)
    assert core.block_pool.num_cached(seq) == 0


def test_a_tier_keeps_what_was_used_last_and_drops_the_end_of_a_piece_first():
    tier = Tier("host", 6)
    assert tier.put(0, 0, 4) == (4, [])
    assert tier.put(1, 0, 2) == (2, [])
    assert tier.put(0, 2, 4) == (0, [])  # known already; used now
    assert tier.put(2, 0, 3) == (3, [(1, 0, 2), (0, 3, 4)])
    assert (tier.reach(0, 0), tier.reach(0, 3), tier.reach(1, 0), tier.num_used) == (3, 3, 0, 6)
    assert (tier.reach_back(0, 3), tier.reach_back(0, 4), tier.reach_back(1, 2)) == (0, 4, 2)


class PlainTier:
    """A slow model of a tier, block by block."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.held = {}  # place -> blocks, least used first

    def touch(self, place):
        if place in self.held:
            self.held[place] = self.held.pop(place)

    def put(self, place, first, end):
        blocks = self.held.pop(place, set())
        new = set(range(first, end)) - blocks
        self.held[place] = blocks | new
        evicted = []
        while sum(map(len, self.held.values())) > self.num_blocks:
            oldest = next(iter(self.held))
            evicted.append((oldest, max(self.held[oldest])))
            self.held[oldest].remove(evicted[-1][1])
            if not self.held[oldest]:
                del self.held[oldest]
        return len(new), evicted

    def reach(self, place, block):
        while block in self.held.get(place, ()):
            block += 1
        return block

    def reach_back(self, place, block):
        while block - 1 in self.held.get(place, ()):
            block -= 1
        return block


pieces = st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 6))


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), pieces), max_size=40))
def test_a_tier_is_a_set_of_blocks(num_blocks, operations):
    tier, plain = Tier("host", num_blocks), PlainTier(num_blocks)
    for is_touch, (place, first, count) in operations:
        if is_touch:
            tier.touch(place)
            plain.touch(place)
        else:
            num_new, evicted = tier.put(place, first, first + count)
            gone = [(where, block) for where, f, e in evicted for block in reversed(range(f, e))]
            assert (num_new, gone) == plain.put(place, first, first + count)
        assert tier.places == set(plain.held)
        assert tier.num_used == sum(map(len, plain.held.values())) <= num_blocks
        for where in range(4):
            for block in range(20):
                assert tier.reach(where, block) == plain.reach(where, block)
                assert tier.reach_back(where, block) == plain.reach_back(where, block)


@given(
    st.lists(st.tuples(st.integers(0, 2), pieces), max_size=12),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 12),
    st.sampled_from([1, 8, 30]),
)
@example([(0, (0, 0, 1)), (0, (1, 1, 1)), (1, (1, 0, 2))], [4, 9], 0, 1)
def test_what_is_found_below_are_the_blocks_that_follow_without_a_gap(stored, runs, num_cached, least):
    """The tier nearest to the GPU counts for each block, but a piece that was begun in a tier goes on there.

    The last known token is never found.
    """
    core = make_engine(100, host_blocks=100, disk_blocks=100, min_load_tokens=least)
    segments = tuple(Segment(number, num_tokens) for number, num_tokens in enumerate(runs))
    seq = core.add(Request(0, 0.0, Prompt(sum(runs), segments)), stop_after=1)
    pool = core.block_pool
    path = pool._new_held(seq).path
    for tier, (stretch, first, count) in stored:
        if tier < 2 and path:
            pool._tiers[tier].put(path[stretch % len(path)][0], first, first + count)
    expected = {"host": 0, "disk": 0}
    blocks, start = [], 0
    for place, end in path:
        blocks += [(place, block - start) for block in range(start, min(end, 40))]  # answers are endless
        start = end
    last = (None, None)
    for place, block in blocks[num_cached : (sum(runs) - 1) // BLOCK_SIZE]:
        having = [tier for tier in pool._tiers if tier.reach(place, block) > block]
        if not having:
            break
        tier = last[1] if last[0] == place and last[1] in having else having[0]
        last = (place, tier)
        expected[tier.name] += BLOCK_SIZE
    if sum(expected.values()) < least:
        expected = {}
    assert pool.num_loadable(seq, num_cached * BLOCK_SIZE) == sum(expected.values())
    assert dict(pool.loads(seq)) == {name: num for name, num in expected.items() if num}


@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.sampled_from([1, 5, 9, 100]),
    st.sampled_from([0, 20]),
    st.sampled_from(["back", "through"]),
)
def test_what_is_quiet_is_taken_without_a_copy(content_ids, host_blocks, disk_blocks, write):
    for num_served in range(1, len(content_ids) + 1):
        core = make_engine(10, host_blocks, disk_blocks, write)
        for request_id, content_id in enumerate(content_ids[:num_served]):
            serve(core, request_id, content_id)
        pool = core.block_pool
        assert 0 <= pool.num_free_without_copy <= pool.num_free
        pool.take(pool.num_free_without_copy)
        assert pool.stores == []


def test_content_that_is_below_already_is_quiet():
    """Nine blocks, five a prompt, of which four keep content: two contents stay, and one block without."""
    core = make_engine(num_blocks=9, host_blocks=100)
    serve(core, 0, 0)
    serve(core, 1, 1)
    assert (core.block_pool.num_free_without_content, core.block_pool.num_free_without_copy) == (
        1,
        1,
    )  # A and B are nowhere else
    serve(core, 2, 2)
    assert (core.block_pool.num_free_without_content, core.block_pool.num_free_without_copy) == (
        1,
        1,
    )  # A went down; B and C are nowhere else
    serve(core, 3, 0)  # B goes down, A comes back
    serve(core, 4, 2)  # found: C is used after A, and A is next
    assert (core.block_pool.num_free_without_content, core.block_pool.num_free_without_copy) == (1, 5)


def test_decodes_that_evict_what_is_below_already_leap():
    """A decode after A came back: its blocks are taken from A's, copy by copy unless those are below."""
    horizons = {}
    for content_ids in ((0, 1, 2, 0, 2), (0, 1)):
        core = make_engine(num_blocks=9, host_blocks=100)
        for request_id, content_id in enumerate(content_ids):
            serve(core, request_id, content_id)
        core.add(Request(9, 0.0, Prompt(4)), stop_after=100)
        core.commit(core.plan(0.0), StepOutcome(), 0.0)  # the prompt takes the one block without content
        plan = core.plan(0.0)
        horizons[content_ids] = plan.horizon
    assert horizons == {(0, 1, 2, 0, 2): 16, (0, 1): 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"write": "never"}, "write=never: must be one of back, through"),
        ({"host_gib": -1.0}, "host_gib=-1.0: must be a finite number >= 0 GiB"),
        ({"host_gib": 0.0, "disk_gib": 5.0}, "set host_gib > 0, or disk_gib=0"),
        ({"min_load_tokens": 0}, "min_load_tokens=0: must be >= 1 token"),
        ({"block_size": 0}, "block_size=0: must be >= 1 token"),
    ],
)
def test_rejects_tiers_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Tiered(**settings)


def test_transfers_name_the_waiting_sequence():
    core = make_engine(host_blocks=100)
    for request_id in range(3):
        serve(core, request_id, request_id)
    seq = core.add(Request(3, 0.0, prompt(0)), stop_after=1)
    core.plan(0.0)
    assert Transfer(seq, "host", "gpu", 16) in core.take_transfers()
