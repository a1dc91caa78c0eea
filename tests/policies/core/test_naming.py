"""Transfers that name their blocks, and blocks that are reserved: small cases by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.tier import Tier, TierLedger
from policies.caching.tiered import GIB, Tiered
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, Transfer
from policies.core.request import Branching, Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

BLOCK_SIZE = 4
PAGED = Paged(block_size=BLOCK_SIZE)


def make_engine(caching, num_blocks=20, script=None, **settings):
    """Returns an engine that names blocks.

    script: a batching policy as a function of (view, step).
    """
    batching = Chunked()
    if script is not None:
        batching = type("Scripted", (), {"fill": lambda self, view, step, now: script(view, step)})()
    return EngineCore(
        batching=batching,
        scheduling=Fcfs(preemption_mode="swap"),
        block_pool=caching.pool(KvMemory(num_blocks, 1.0)),
        max_num_seqs=8,
        max_model_len=60,
        names_blocks=True,
        **settings,
    )


def run_step(core):
    """Plans, asks for the block ids as an engine does, and commits; returns the transfers."""
    plan = core.plan(0.0)
    transfers = core.take_transfers()
    for seq, num_tokens in [(c.seq, c.num_cached + c.num_tokens) for c in plan.chunks]:
        core.block_ids(seq, num_tokens)
    for seq in plan.decodes:
        if seq.request.branching is None:
            core.block_ids(seq, seq.num_known)
        else:
            core.branched.block_ids(seq)
    core.commit(plan, StepOutcome(), 0.0)
    return transfers


def swapper():
    """Returns a script that preempts each wished request once, and the list of wishes.

    A step that preempts admits no request.
    """
    wishes = []

    def script(view, step):
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, 4)
        if wishes:
            step.preempt(wishes.pop())
            return
        for seq in view.waiting:
            step.admit(seq, 6)

    return script, wishes


def test_a_swap_names_the_blocks_that_are_filled_and_not_those_that_were_planned():
    """The first has computed 6 of 12 tokens and loses the next 4 of this very step, which took a third block:
    both of its others go, the second half full. It returns into other blocks.
    """
    script, wishes = swapper()
    core = make_engine(PAGED, script=script, num_swap_blocks=5)
    seq, other = (core.add(Request(i, 0.0, Prompt(n)), stop_after=20) for i, n in enumerate((12, 6)))
    assert run_step(core) == []
    ids = core.block_ids(seq, 6)[:2]
    contents = ((-1, 0), (-1, 1))
    wishes.append(seq)
    assert run_step(core) == [Transfer(None, "gpu", "host", 6, tuple(ids), contents)]
    core.block_pool.take(2)  # its blocks are given to another owner
    core.block_pool.draw(2)
    (load,) = run_step(core)
    assert load == Transfer(seq, "host", "gpu", 6, load.blocks, contents)
    assert load.blocks == tuple(core.block_ids(seq, 6)[:2])
    assert not {*load.blocks} & {*ids, *core.block_ids(other, other.num_known)}
    core.loaded(0)
    assert run_step(core)[0] == Transfer(None, "host", "nowhere", 6, (), contents)


def test_a_sequence_that_is_aborted_in_host_memory_leaves_it():
    script, wishes = swapper()
    core = make_engine(PAGED, script=script, num_swap_blocks=5)
    seq = core.add(Request(3, 0.0, Prompt(6)), stop_after=20)
    core.add(Request(4, 0.0, Prompt(6)), stop_after=20)
    run_step(core)
    wishes.append(seq)
    run_step(core)
    core.abort(3)
    assert run_step(core) == [Transfer(None, "host", "nowhere", 6, (), ((-4, 0), (-4, 1)))]
    assert core.num_free_swap_blocks == 5


def test_part_full_blocks_of_branches_count_in_host_memory():
    """Three branches of one token in a block each, behind a full block: 4 blocks, though 7 tokens fill 2."""
    for num_swap_blocks, num_swapped in ((3, 0), (4, 7)):
        script, wishes = swapper()
        core = make_engine(PAGED, script=script, num_swap_blocks=num_swap_blocks)
        seq = core.add(Request(0, 0.0, Prompt(4), branching=Branching(3)), stop_after=20)
        core.add(Request(1, 0.0, Prompt(4)), stop_after=20)
        run_step(core)
        run_step(core)
        tables = core.branched.block_ids(seq)
        wishes.append(seq)
        stores = run_step(core)
        assert seq.num_swapped == num_swapped
        if num_swapped:
            blocks = (tables[0][0], *(table[1] for table in tables))
            assert stores == [Transfer(None, "gpu", "host", 7, blocks, tuple((-1, i) for i in range(4)))]
            assert core.num_free_swap_blocks == 0


def test_a_migrant_names_its_blocks_here_and_there():
    one, other = (make_engine(PAGED) for _ in range(2))
    one.add(Request(5, 0.0, Prompt(6)), stop_after=20)
    run_step(one)
    run_step(one)
    ids = tuple(one.block_ids(one.find(5), 7))
    migrant = one.export(5)
    assert migrant.blocks == ids
    other.block_pool.take(3)
    other.block_pool.draw(3)
    arrived = other.adopt(migrant, stop_after=20)
    assert other.plan(0.0) is None
    assert other.take_transfers() == [Transfer(arrived, "remote", "gpu", 7, (4, 5), ((-6, 0), (-6, 1)))]
    assert other.block_ids(arrived, 7) == [4, 5]


def text(content_id, num_tokens=16):
    return Prompt(num_tokens + 1, (Segment(content_id, num_tokens),))


def test_what_is_written_through_is_copied_when_it_has_been_computed():
    """The first step computes blocks 1 to 4 of a text, and has to be over before they are read."""
    core = make_engine(Tiered(block_size=BLOCK_SIZE, host_gib=32 / GIB, write="through", min_load_tokens=1))
    core.add(Request(0, 0.0, text(7)), stop_after=3)
    assert run_step(core) == []
    place = core.block_pool._places.path(Request(1, 0.0, text(7)))[0][0]
    contents = tuple((place, block) for block in range(4))
    assert run_step(core) == [Transfer(None, "gpu", "host", 16, (1, 2, 3, 4), contents)]


def test_contents_that_a_preempted_step_was_to_compute_are_not_found_below():
    """The first of two prompts of one text is admitted and preempted at once."""

    def script(view, step):
        for seq in list(view.waiting):
            if step.admit(seq, 99) and not core.num_preemptions:
                step.preempt(seq, swap=False)
                return

    core = make_engine(
        Tiered(block_size=BLOCK_SIZE, host_gib=400 / GIB, write="through", min_load_tokens=1), script=script
    )
    seq = core.add(Request(0, 0.0, text(7)), stop_after=3)
    plan = core.plan(0.0)
    assert (plan.tokens_by_request, seq.num_preemptions, seq.num_found) == ({0: 17}, 1, 0)


def test_room_is_made_before_it_is_used_and_what_a_load_reads_is_given_up_behind_it():
    """Host: 2 blocks, disk: 1. Two blocks of place 0 lie in the host; a load reads one of them while two of
    place 1 come down: the other goes on to the disk, and the one is given up when it has been read.
    """
    host, disk = Tier("host", 2), Tier("disk", 1)
    ledger = TierLedger([host, disk], BLOCK_SIZE)

    def write(place, ids):
        piece = (place, 0, len(ids))
        ledger.written(piece, ids, 0, 0)
        gone = host.put(*piece)[1]
        ledger.evicted(gone)
        for one in gone:
            ledger.evicted(disk.put(*one)[1])

    write(0, [5, 6])
    assert ledger.transfers(set(), 0) == ([Transfer(None, "gpu", "host", 8, (5, 6), ((0, 0), (0, 1)))], [])
    write(1, [7, 8])
    before, after = ledger.transfers({("host", (0, 1))}, 0)
    assert before == [
        Transfer(None, "host", "disk", 4, (), ((0, 0),)),
        Transfer(None, "host", "nowhere", 4, (), ((0, 0),)),
        Transfer(None, "gpu", "host", 8, (7, 8), ((1, 0), (1, 1))),
    ]
    assert after == [Transfer(None, "host", "nowhere", 4, (), ((0, 1),))]


def test_what_was_written_and_evicted_between_two_calls_is_not_transferred():
    host = Tier("host", 1)
    ledger = TierLedger([host], BLOCK_SIZE)
    for place, block in ((0, 5), (1, 6)):
        ledger.written((place, 0, 1), [block], 0, 0)
        ledger.evicted(host.put(place, 0, 1)[1])
    assert ledger.transfers(set(), 0) == ([Transfer(None, "gpu", "host", 4, (6,), ((1, 0),))], [])


def test_of_two_blocks_with_one_content_the_one_that_has_it_already_is_copied():
    """Block 5 was evicted; its content was found below, went, and is computed again, into block 6."""
    host = Tier("host", 1)
    ledger = TierLedger([host], BLOCK_SIZE)
    ledger.written((0, 0, 1), [5], 0, 0)
    host.put(0, 0, 1)
    ledger.evicted(host.put(1, 0, 1)[1])
    ledger.written((0, 0, 1), [6], 1, 0)
    ledger.evicted(host.put(0, 0, 1)[1])
    before, _ = ledger.transfers({("host", (0, 0))}, 0)
    assert before == [Transfer(None, "gpu", "host", 4, (5,), ((0, 0),))]


ranges = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(st.tuples(st.booleans(), ranges), max_size=12), ranges)
def test_a_tier_lists_what_it_misses_and_drops_what_it_is_asked_to(operations, asked):
    tier, plain = Tier("host", 1000), set()
    for is_put, (first, end) in operations:
        blocks = set(range(first, end))
        if is_put:
            tier.put(3, first, end)
            plain |= blocks
        else:
            tier.drop(3, first, end)
            plain -= blocks
        assert tier.num_used == len(plain)
        assert tier.places == ({3} if plain else set())
        assert [block for block in range(20) if tier.reach(3, block) > block] == sorted(plain)
    missing = [block for first, end in tier.missing(3, *asked) for block in range(first, end)]
    assert missing == [block for block in range(*asked) if block not in plain]


def test_reserved_blocks_are_there_before_the_iterations_are_run():
    """Six tokens in two blocks; with 9 more computed, the newest at 15, there are four."""
    core = make_engine(PAGED)
    seq = core.add(Request(0, 0.0, Prompt(5)), stop_after=30)
    run_step(core)
    plan = core.plan(0.0)
    core.reserve(plan, 10)
    assert core.block_pool.num_used == 4
    assert core.block_ids(seq, seq.num_known + 9) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="reserve: 10 iterations of this plan are reserved already"):
        core.reserve(plan, 10)
    with pytest.raises(ValueError, match="commit of 9 iterations: must be 10, as reserved"):
        core.commit(plan, StepOutcome(9), 0.0)
    core.commit(plan, StepOutcome(10), 0.0)
    assert (core.block_pool.num_used, seq.num_computed) == (4, 15)
    assert core.plan(0.0) is not None


def test_only_what_can_be_run_in_one_go_is_reserved():
    core = make_engine(PAGED)
    core.add(Request(0, 0.0, Prompt(5), branching=Branching(2)), stop_after=30)
    plan = core.plan(0.0)
    with pytest.raises(ValueError, match="the plan must have no prompt chunks and no branches"):
        core.reserve(plan, 1)
    core.commit(plan, StepOutcome(), 0.0)
    with pytest.raises(ValueError, match="reserve for 1 iterations: must be of the plan in flight"):
        core.reserve(plan, 1)
    with pytest.raises(ValueError, match="no prompt chunks and no branches"):
        core.reserve(core.plan(0.0), 1)
    core = make_engine(PAGED)
    core.add(Request(0, 0.0, Prompt(5)), stop_after=4)
    run_step(core)
    with pytest.raises(ValueError, match=r"reserve for 4 iterations: .* within its horizon"):
        core.reserve(core.plan(0.0), 4)
