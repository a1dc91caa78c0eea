"""Contiguous regions: reservations, the end of a region, and no block lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.contiguous import Contiguous
from policies.caching.pool import BlockPool, KvMemory
from policies.caching.prefix import PrefixPool
from policies.caching.selective import H2o, SnapKv
from policies.caching.streaming import StreamingLlm
from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import Cause, StepOutcome
from policies.core.request import Prompt, Request
from policies.prediction import within_limits
from policies.scheduling.fcfs import Fcfs


class Guess:
    """A predictor of one length for all answers."""

    needs_truth = False

    def __init__(self, num_tokens):
        self._num_tokens = num_tokens

    def predict(self, request, true_num_tokens):
        return within_limits(request, self._num_tokens)

    def observe(self, request, num_output_tokens):
        pass


def make_engine(num_blocks=64, *, guess=8, max_model_len=32, max_num_seqs=8, num_swap_blocks=0, **caching):
    caching = {"block_size": 1} | caching
    return EngineCore(
        batching=Chunked(),
        scheduling=Fcfs(preemption_mode="swap" if num_swap_blocks else "recompute"),
        block_pool=Contiguous(**caching).pool(KvMemory(num_blocks, max_model_len=max_model_len)),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        predictor=Guess(guess),
        num_swap_blocks=num_swap_blocks,
    )


def add(core, request_id, num_prompt_tokens, num_output_tokens, max_tokens=None):
    request = Request(request_id, 0.0, Prompt(num_prompt_tokens), max_tokens)
    return core.add(request, stop_after=num_output_tokens)


def step(core, num_iterations=1):
    plan = core.plan(0.0)
    transfers = core.take_transfers()
    if plan is not None:
        core.commit(plan, StepOutcome(num_iterations), 0.0)
    for transfer in transfers:
        if transfer.seq is not None:
            core.loaded(transfer.seq.request_id)
    core.check_integrity()
    return plan


@pytest.mark.parametrize(
    ("caching", "num_blocks"),
    [
        ({"reserve": "max_model_len"}, 32),
        ({"reserve": "max_tokens"}, 5 + 11),
        ({"reserve": "max_tokens", "pow2_output": True}, 5 + 16),
        ({"reserve": "predicted"}, 5 + 7),
        ({"reserve": "predicted", "pow2_output": True}, 5 + 8),
        ({"reserve": "predicted", "allocator": "buddy"}, 16),
        ({"reserve": "predicted", "allocator": "best_fit", "block_size": 8}, 2),
    ],
)
def test_what_is_reserved(caching, num_blocks):
    """Prompt 5, at most 11 output tokens, 7 predicted, a model of 32; in blocks of 1, once of 8."""
    core = make_engine(guess=7, **caching)
    seq = add(core, 0, 5, 3, max_tokens=11)
    step(core)
    assert core.block_pool.num_used == num_blocks
    ids = core.block_ids(seq, 6)
    assert ids == list(range(ids[0], ids[0] + num_blocks)), "a region is one piece"
    step(core)
    step(core)
    assert core.num_unfinished == 0
    assert core.block_pool.num_free == 64


def test_a_prediction_beyond_what_the_client_allows_reserves_no_more():
    core = make_engine(guess=100, reserve="predicted")
    add(core, 0, 5, 3, max_tokens=11)
    step(core)
    assert core.block_pool.num_used == 16


def test_a_region_doubles_in_place_at_its_end():
    """Prompt 4, 4 predicted: 8 places. The fifth decode wants a ninth; 16 suffice for 4 + 12 - 1."""
    core = make_engine(guess=4, reserve="predicted")
    seq = add(core, 0, 4, 12)
    used = []
    while core.num_unfinished:
        step(core)
        used.append((seq.num_output_tokens, core.block_pool.num_used))
    assert used[:6] == [(1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (6, 16)]
    assert seq.num_preemptions == 0


def side_by_side(moves):
    """Returns a core and sequence A, which holds slots 0 to 7 of 40 and is about to store its ninth token.

    Sequence B, which came an iteration later, holds the next 8.
    """
    core = make_engine(40, guess=4, reserve="predicted", moves=moves)
    first = add(core, 0, 4, 12)
    step(core)
    add(core, 1, 4, 20)
    for _ in range(4):
        assert not step(core).preempted
    assert first.num_computed == 8
    return core, first


def test_a_sequence_that_may_move_is_copied_to_a_longer_region():
    core, first = side_by_side(moves=True)
    assert not step(core).preempted
    assert core.block_pool.num_moved_tokens == 8
    assert core.block_ids(first, 9) == list(range(17, 33)), "behind the other's region"


def test_one_that_may_not_is_preempted_and_gets_twice_as_much_at_its_return():
    core, first = side_by_side(moves=False)
    assert [seq.request_id for seq in step(core).preempted] == [0]
    assert core.block_pool.num_used == 8
    assert [seq.request_id for seq in step(core).admitted] == [0]
    assert len(core.block_ids(first, 9)) == 16
    assert core.block_pool.num_moved_tokens == 0


def test_free_places_in_pieces_are_counted_as_fragments():
    """Three regions of 10 in 36; the middle one ends: 10 + 6 are free, and 14 are wanted in one piece."""
    core = make_engine(36, reserve="max_tokens")
    for request_id, answer in enumerate((9, 2, 9)):
        add(core, request_id, 1, answer, max_tokens=9)
    step(core)
    waiting = add(core, 3, 5, 9, max_tokens=9)
    for _ in range(3):
        plan = step(core)
        assert not plan.admitted
    assert core.block_pool.num_free == 16
    assert plan.waits_for is Cause.memory
    assert core.block_pool.num_fragmented == 1, "an admission, however often it is asked for"
    while waiting.num_computed == 0:
        step(core)
    assert core.block_pool.num_fragmented == 1


def test_too_few_places_are_no_fragments():
    core = make_engine(20, reserve="max_tokens")
    add(core, 0, 1, 9, max_tokens=14)
    add(core, 1, 1, 9, max_tokens=14)
    step(core)
    assert core.block_pool.num_free == 5
    assert core.block_pool.num_fragmented == 0


def test_what_was_never_filled_is_written_down():
    """A: 1 + 9 reserved, 4 known at its end, 3 of them stored: 7 places for iterations 0 to 2."""
    core = make_engine(reserve="max_tokens")
    add(core, 0, 1, 3, max_tokens=9)
    for _ in range(3):
        step(core)
    assert list(core.block_pool.unfilled) == [0, 3, 7]


def test_what_is_filled_to_the_end_of_a_doubled_region_counts_from_the_doubling():
    """8 places until iteration 5, 16 from then on; 15 are filled at the end, after iteration 11."""
    core = make_engine(guess=4, reserve="predicted")
    add(core, 0, 4, 12)
    while core.num_unfinished:
        step(core)
    assert list(core.block_pool.unfilled) == [5, 12, 1]


def test_a_sequence_may_be_as_long_as_the_longest_region():
    """13 blocks of 2 are 8 + 4 + 1 to a buddy allocator: 16 tokens."""
    core = make_engine(13, allocator="buddy", block_size=2)
    assert core.block_pool.max_tokens_per_seq == 16
    with pytest.raises(RejectedError, match="the KV cache holds at most 16 per sequence"):
        add(core, 0, 17, 1)
    seq = add(core, 1, 10, 30)
    while core.num_unfinished:
        step(core)
    assert seq.num_known == 17, "the last token needs no place"


@given(
    st.integers(0, 2**32),
    st.sampled_from(["first_fit", "best_fit", "buddy"]),
    st.sampled_from(["max_model_len", "max_tokens", "predicted"]),
    st.booleans(),
    st.sampled_from([0, 20]),
)
def test_random_traffic_leaks_nothing_and_all_is_served(seed, allocator, reserve, moves, num_swap_blocks):
    """Admissions, ends, aborts, preemptions at limits: regions tile the memory after every commit."""
    rng = random.Random(seed)
    core = make_engine(
        rng.randint(8, 40),
        guess=rng.randint(1, 12),
        max_model_len=rng.randint(8, 40),
        allocator=allocator,
        reserve=reserve,
        moves=moves,
        num_swap_blocks=num_swap_blocks,
        block_size=rng.randint(1, 3),
    )
    seqs = []
    for request_id in range(20):
        try:
            seqs.append(add(core, request_id, rng.randint(1, 12), rng.randint(1, 20)))
        except RejectedError:
            continue
        for _ in range(rng.randint(0, 4)):
            if core.num_unfinished:
                step(core)
        if rng.random() < 0.1:
            core.abort(request_id)
    for _ in range(2000):
        if not core.num_unfinished:
            break
        step(core)
    assert core.num_unfinished == 0
    assert core.block_pool.num_free == core.block_pool.num_blocks
    assert core.num_free_swap_blocks == num_swap_blocks
    assert all(seq.finish_reason is not None for seq in seqs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reserve": "orca"}, "reserve=orca: must be one of max_model_len, max_tokens, predicted"),
        ({"allocator": "slab"}, "allocator=slab: must be one of first_fit, best_fit, buddy"),
        ({"block_size": 0}, "block_size=0: must be >= 1"),
        ({"pow2_output": True}, "pow2_output=True: must be False with reserve=max_model_len"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Contiguous(**settings)


def test_only_paged_pools_can_fork():
    assert BlockPool.can_fork
    assert PrefixPool.can_fork
    memory = KvMemory(8)
    assert not any(
        caching.pool(memory).can_fork for caching in (Contiguous(), StreamingLlm(), H2o(), SnapKv())
    )


def test_only_a_predicted_reservation_needs_a_predictor():
    assert Contiguous(reserve="predicted").needs_predictor
    assert not Contiguous(reserve="max_tokens").needs_predictor
