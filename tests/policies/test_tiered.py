"""Tiers below the GPU: what goes down, what is found there, and when a sequence may go on."""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.tiered import GIB, Piece, Tier, Tiered
from policies.engine import EngineCore
from policies.plan import StepOutcome, Transfer
from policies.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from policies.sequence import SequenceState

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
        pool=caching.pool(KvMemory(num_blocks, BYTES_PER_TOKEN)),
        max_num_seqs=8,
        max_model_len=4096,
    )


def prompt(content_id, num_tokens=16):
    return Prompt(num_tokens + 1, (Segment(content_id, num_tokens),))


def serve(core, request_id, content_id):
    """Serve a request of one output token; its loads are done at once. Returns found tokens and transfers."""
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
    """Of the first prompt's four blocks the last is evicted: three are found on the GPU, one on the host."""
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
    core.pool._tiers[0].put(Piece(core.pool._places.path(Request(9, 0.0, prompt(0)))[0].place, 0, 2))
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
    core.loaded(3)  # too late: nobody waits
    seq = core.add(Request(4, 0.0, prompt(0)), stop_after=1)
    assert core.pool.num_cached(seq) == 0


def test_a_tier_keeps_what_was_used_last_and_drops_the_end_of_a_piece_first():
    tier = Tier("host", 6)
    assert tier.put(Piece(0, 0, 4)) == (4, [])
    assert tier.put(Piece(1, 0, 2)) == (2, [])
    assert tier.put(Piece(0, 2, 4)) == (0, [])  # known already; used now
    assert tier.put(Piece(2, 0, 3)) == (3, [Piece(1, 0, 2), Piece(0, 3, 4)])
    assert (tier.reach(0, 0), tier.reach(0, 3), tier.reach(1, 0), tier.num_used) == (3, 3, 0, 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"write": "never"}, "write=never: must be back or through"),
        ({"host_gib": -1.0}, "host_gib=-1.0: must be a finite number >= 0 GiB"),
        ({"host_gib": 0.0, "disk_gib": 5.0}, "set host_gib, or disk_gib=0"),
        ({"min_load_tokens": 0}, "min_load_tokens=0: must be >= 1 token"),
        ({"block_size": 0}, "block_size=0: must be >= 1 token"),
    ],
)
def test_rejects_tiers_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        Tiered(**settings)


def test_transfers_name_who_waits():
    core = make_engine(host_blocks=100)
    for request_id in range(3):
        serve(core, request_id, request_id)
    seq = core.add(Request(3, 0.0, prompt(0)), stop_after=1)
    core.plan(0.0)
    assert Transfer(seq, "host", "gpu", 16) in core.take_transfers()
