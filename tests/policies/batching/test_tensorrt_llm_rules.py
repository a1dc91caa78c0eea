"""The rules of TensorRT-LLM's scheduler, each on a case worked out on paper from its source.

Sources: NVIDIA/TensorRT-LLM, `scheduler.py` (tensorrt_llm/_torch/pyexecutor/scheduler) at 002f3cc3,
`py_executor.py` (tensorrt_llm/_torch/pyexecutor) at 00043967, `kvCacheManager.cpp` (cpp/tensorrt_llm/
batch_manager) at 002ba6a7, `microBatchScheduler.cpp` (the same) at 0a949d31. docs/policies.md has the table.
"""

import pytest

from policies.batching.inflight import InFlight
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

A, B, C, D = range(4)
PREFIX = (Segment(7, 8),)
"""Two blocks that prompts share."""


def sharing_core(num_blocks, **settings):
    """Returns an engine with a prefix cache, as with enable_block_reuse."""
    return EngineCore(
        batching=InFlight(**settings),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=64,
    )


def sharer(request_id, num_prompt_tokens, **settings):
    """Returns a request that begins with the common prefix."""
    return Request(request_id, 0.0, Prompt(num_prompt_tokens, PREFIX), **settings)


# Capacity: GUARANTEED_NO_EVICT


@pytest.mark.parametrize(("max_tokens", "runs_beside"), [(4, True), (5, False)])
def test_a_reservation_covers_prompt_and_longest_output(
    make_core, make_request, run_step, max_tokens, runs_beside
):
    """kvCacheManager.cpp, getRemainingBlocksToCompletion: ceil((prompt + max_new_tokens) / block).

    A reserves ceil(9 / 4) = 3 of 5 blocks; B ceil(8 / 4) = 2, or ceil(9 / 4) = 3, although the KV of 4 + 5
    tokens, whose last is never stored, fits into two.
    """
    core = make_core(batching=InFlight(), num_blocks=5)
    core.add(make_request(A, 4, max_tokens=5))
    core.add(make_request(B, 4, max_tokens=max_tokens))
    assert (B in run_step(core)[0]) == runs_beside


def test_the_first_request_that_does_not_fit_holds_back_those_behind_it(make_core, make_request, run_out):
    """scheduler.py, GuaranteedNoEvictPolicy: generation requests first, then pending ones, with `break`.

    Of 4 blocks A reserves 2, B wants 3, C wants 1: C waits behind B until A ends after its third token.
    """
    core = make_core(batching=InFlight(), num_blocks=4)
    core.add(make_request(A, 4, max_tokens=4), 3)
    core.add(make_request(B, 4, max_tokens=8), 1)
    core.add(make_request(C, 2, max_tokens=2), 1)
    assert [step[0] for step in run_out(core)] == [{A: 4}, {A: 1}, {A: 1}, {B: 4, C: 2}]


def test_blocks_of_a_prefix_that_is_in_use_are_not_reserved_again(run_step):
    """kvCacheManager.cpp: needed = reserved - allocated; free blocks do not count those that are held.

    A reserves 4 of 6 blocks and has written the prefix in its first iteration. B needs 4 blocks, of which A
    holds 2, so that 2 suffice.
    """
    core = sharing_core(6)
    core.add(sharer(A, 12, max_tokens=4))
    core.add(sharer(B, 12, max_tokens=4))
    assert run_step(core)[0] == {A: 12}
    assert run_step(core)[0] == {A: 1, B: 4}


def test_without_a_shared_prefix_the_same_request_waits(make_core, make_request, run_step):
    core = make_core(batching=InFlight(), num_blocks=6)
    for request_id in (A, B):
        core.add(make_request(request_id, 12, max_tokens=4))
    assert [run_step(core)[0] for _ in range(2)] == [{A: 12}, {A: 1}]


def test_a_static_batch_takes_prompts_only_while_nothing_decodes(make_core, make_request, run_out):
    """scheduler.py, GuaranteedNoEvictPolicy(static_batch=True): pending requests only if none generates.

    Budget 8, blocks of 4: A has its first token when B, started with a chunk of 4, still lacks 3. B is
    pending as long as A generates, and so is C; then both run.
    """
    policy = InFlight(max_num_batched_tokens=8, capacity_scheduler_policy="static_batch")
    core = make_core(batching=policy)
    core.add(make_request(A, 4, max_tokens=3), 3)
    core.add(make_request(B, 7, max_tokens=2), 2)
    core.add(make_request(C, 2, max_tokens=1), 1)
    expected = [{A: 4, B: 4}, {A: 1}, {A: 1}, {B: 3, C: 2}, {B: 1}]
    assert [step[0] for step in run_out(core)] == expected


# Prefixes that are being computed


def test_a_prompt_waits_for_the_prefix_of_the_same_iteration_and_others_overtake_it(run_step):
    """scheduler.py, _beneficial_to_skip: `continue` if an earlier request computes its first new block."""
    core = sharing_core(40, capacity_scheduler_policy="max_utilization")
    core.add(sharer(A, 12))
    core.add(sharer(B, 11))
    core.add(Request(C, 0.0, Prompt(5)))
    assert run_step(core)[0] == {A: 12, C: 5}
    assert run_step(core)[0] == {A: 1, B: 3, C: 1}


def test_a_prompt_waits_for_the_next_chunk_of_a_started_one(run_out):
    """scheduler.py, _prefill_contributed_blocks: a started prompt registers the first block that it lacks.

    Budget 6, blocks of 4: A computes its first block, then its second, which B shares both. In the third
    iteration B has no whole block to compute, and its last token fits beside A's last four.
    """
    core = sharing_core(40, capacity_scheduler_policy="max_utilization", max_num_batched_tokens=6)
    core.add(sharer(A, 12), 1)
    core.add(sharer(B, 9), 1)
    assert [step[0] for step in run_out(core)] == [{A: 4}, {A: 4}, {A: 4, B: 1}]


def test_with_prefix_aware_scheduling_off_no_prompt_waits(run_step):
    core = sharing_core(40, capacity_scheduler_policy="max_utilization", enable_prefix_aware_scheduling=False)
    core.add(sharer(A, 12))
    core.add(sharer(B, 11))
    assert B in run_step(core)[0]


# The token budget


def test_the_budget_goes_to_decodes_then_to_prompts_in_order_in_chunks_of_blocks(
    make_core, make_request, run_step
):
    """scheduler.py, PyMicroBatchScheduler.schedule and _chunk_fcfs: a cut chunk is rounded down to blocks.

    Budget 10, blocks of 4, one decode: of the 9 tokens that are left, A of 20 gets 8.
    """
    core = make_core(batching=InFlight(max_num_batched_tokens=10), max_model_len=64)
    core.add(make_request(D, 2))
    run_step(core)
    core.add(make_request(A, 20))
    assert run_step(core)[0] == {D: 1, A: 8}


def test_what_the_rounding_leaves_goes_to_later_prompts_that_fit_whole(make_core, make_request, run_step):
    """_chunk_fcfs goes on with the next request, and a whole rest is not rounded.

    Budget 10: A of 26 gets 8, B of 1 fits into the two that are left, C of 2 does not fit and gets less than
    a block, so nothing, D of 1 fits again.
    """
    core = make_core(batching=InFlight(max_num_batched_tokens=10), max_model_len=64)
    for request_id, num_tokens in ((A, 26), (B, 1), (C, 2), (D, 1)):
        core.add(make_request(request_id, num_tokens), 1)
    assert run_step(core)[0] == {A: 8, B: 1, D: 1}
    assert run_step(core)[0] == {A: 8, C: 2}


def test_a_prompt_without_tokens_keeps_its_blocks_from_those_behind_it(make_core, make_request, run_step):
    """The capacity scheduler has let it pass before the budget is shared out.

    Budget 10, blocks of 4, 9 of them: A of 26 takes 7, C of 5 the other 2, but gets no token; D finds none.
    """
    core = make_core(
        batching=InFlight(max_num_batched_tokens=10, capacity_scheduler_policy="max_utilization"),
        num_blocks=9,
    )
    for request_id, num_tokens in ((A, 26), (C, 5), (D, 1)):
        core.add(make_request(request_id, num_tokens), 1)
    assert run_step(core)[0] == {A: 8}


def test_cached_tokens_cost_no_budget(run_step):
    """scheduler.py, _reuse_adjusted_compute: the last chunk costs what is not reusable."""
    core = sharing_core(40, max_num_batched_tokens=12)
    core.add(sharer(A, 12))
    assert run_step(core)[0] == {A: 12}
    core.add(sharer(B, 19))
    assert run_step(core)[0] == {A: 1, B: 11}, "19 - 8 of the 11 tokens that are left"


def test_without_chunks_the_first_prompt_that_does_not_fit_ends_the_iteration(
    make_core, make_request, run_step
):
    """PyMicroBatchScheduler.schedule without ctx_chunk_config: `break`."""
    core = make_core(batching=InFlight(max_num_batched_tokens=10, enable_chunked_context=False))
    for request_id, num_tokens in ((A, 6), (B, 6), (C, 1)):
        core.add(make_request(request_id, num_tokens, max_tokens=2))
    assert run_step(core)[0] == {A: 6}


@pytest.mark.parametrize(
    ("budget", "prompts", "expected"),
    [
        (22, (10, 3, 9), [{A: 10, B: 3, C: 9}]),  # all fit
        (12, (10, 3, 9), [{A: 4, B: 3, C: 4}, {A: 6, C: 5}]),  # one token is left, and no block fits
        (9, (5, 5), [{A: 5, B: 4}, {B: 1}]),  # A's second turn is its last token
        (17, (20, 20), [{A: 8, B: 8}, {A: 8, B: 8}, {A: 4, B: 4}]),
    ],
)
def test_equal_progress_gives_a_block_to_each_in_turn(
    make_core, make_request, run_out, budget, prompts, expected
):
    """scheduler.py, _chunk_equal_progress: a block or the rest in turn, those that exceed the budget pass."""
    policy = InFlight(max_num_batched_tokens=budget, context_chunking_policy="equal_progress")
    core = make_core(batching=policy)
    for request_id, num_tokens in enumerate(prompts):
        core.add(make_request(request_id, num_tokens, max_tokens=1), 1)
    assert [step[0] for step in run_out(core)] == expected


# Capacity: MAX_UTILIZATION


def test_the_last_started_request_is_paused_for_an_earlier_one(make_core, make_request, run_out):
    """scheduler.py, MaxUtilizationPolicy: the last started of the list is paused until the earlier one fits.

    3 blocks of 4: A's fifth token needs a block that B holds two of. B, paused with one output token, is a
    prompt of 6 and runs again when A has ended.
    """
    core = make_core(batching=InFlight(capacity_scheduler_policy="max_utilization"), num_blocks=3)
    core.add(make_request(A, 4), 3)
    core.add(make_request(B, 5), 2)
    steps = run_out(core)
    assert [step[0] for step in steps] == [{A: 4, B: 5}, {A: 1}, {A: 1}, {B: 6}]
    assert [step[1] for step in steps] == [[], [B], [], []]


def test_a_paused_request_keeps_its_place_before_later_arrivals(make_core, make_request, run_out):
    """It stays in the list of active requests; where it does not fit, the loop breaks.

    4 blocks: B needs a third block for its ninth token when A and B hold all, and pauses itself. Its 9 tokens
    need 3 blocks. C, of two, waits behind it although A leaves two free, and then for B's end.
    """
    core = make_core(batching=InFlight(capacity_scheduler_policy="max_utilization"), num_blocks=4)
    core.add(make_request(A, 4), 5)
    core.add(make_request(B, 7), 4)
    core.add(make_request(C, 5), 1)
    steps = run_out(core)
    tokens = [{A: 4, B: 7}, {A: 1, B: 1}, {A: 1}, {A: 1}, {A: 1}, {B: 9}, {B: 1}, {C: 5}]
    assert [step[0] for step in steps] == tokens
    assert [step[1] for step in steps] == [[], [], [B], [], [], [], [], []]


def test_a_started_prompt_holds_the_blocks_of_all_of_it(make_core, make_request, run_out):
    """kvCacheManager.cpp, addSequence: all context blocks are allocated with the first chunk.

    4 blocks, budget 8: A takes one and B, of 12 tokens, three, though its first chunk fills one. A's next
    token needs a block, so B is paused, and starts again when A has ended.
    """
    policy = InFlight(max_num_batched_tokens=8, capacity_scheduler_policy="max_utilization")
    core = make_core(batching=policy, num_blocks=4)
    core.add(make_request(A, 4), 3)
    core.add(make_request(B, 12), 1)
    steps = run_out(core)
    assert [step[0] for step in steps] == [{A: 4, B: 4}, {A: 1}, {A: 1}, {B: 8}, {B: 4}]
    assert [step[1] for step in steps] == [[], [B], [], [], []]


# Batch waiting


def waiting(core, make_request, run_step, num_prompt_tokens):
    """Lets A decode and B, a new prompt, wait; returns the iterations until B runs."""
    core.add(make_request(A, 2), 40)
    run_step(core)
    core.add(make_request(B, num_prompt_tokens), 1)
    return next(i for i in range(40) if B in run_step(core)[0])


@pytest.mark.parametrize(("num_prompt_tokens", "iterations"), [(7, 0), (6, 3)])
def test_prompts_wait_for_their_share_of_the_budget_or_the_timeout(
    make_core, make_request, run_step, num_prompt_tokens, iterations
):
    """py_executor.py, _waiting_requests: tokens < ratio x max_num_tokens and count < timeout: wait.

    A decode and 7 tokens are half of 16; with 6 the prompt waits in three iterations and runs in the fourth.
    """
    policy = InFlight(max_num_batched_tokens=16, batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=0.5)
    core = make_core(batching=policy, max_model_len=64)
    assert waiting(core, make_request, run_step, num_prompt_tokens) == iterations


def test_what_counts_is_the_chunk_of_this_iteration(make_core, make_request, run_step):
    """_compute_scheduled_tokens: the chunk; the rest of a prompt may wait again.

    Budget 12, ratio 0.75, one decode: of 11 tokens B, of 12, gets a chunk of 8, and 9 of 12 end the wait.
    Its last 4 tokens wait for two iterations.
    """
    policy = InFlight(max_num_batched_tokens=12, batch_wait_timeout_iters=2, batch_wait_max_tokens_ratio=0.75)
    core = make_core(batching=policy, max_model_len=64)
    core.add(make_request(A, 2), 40)
    run_step(core)
    core.add(make_request(B, 12), 1)
    assert [run_step(core)[0].get(B, 0) for _ in range(4)] == [8, 0, 0, 4]


def test_cached_tokens_do_not_count(run_step):
    """Budget 16, ratio 0.5: B has 15 tokens, of which 8 are cached; with the decode 8 count, with C's 7."""
    policy = {"max_num_batched_tokens": 16, "batch_wait_timeout_iters": 2, "batch_wait_max_tokens_ratio": 0.5}
    core = sharing_core(40, **policy)
    core.add(sharer(A, 12), 40)
    run_step(core)
    core.add(sharer(B, 14), 1)
    assert [B in run_step(core)[0] for _ in range(3)] == [False, False, True], "1 + 6 of 8 tokens"
    core.add(sharer(C, 15), 1)
    assert run_step(core)[0] == {A: 1, C: 7}, "1 + 7 of 8 tokens"


def test_a_prompt_without_room_does_not_wait_yet(make_core, make_request, run_step):
    """py_executor.py, _schedule: the count goes on only in iterations with scheduled context requests.

    6 blocks of 4: A holds 1 and C 3 or 4, so that B, of 3, does not fit until C has ended with the fifth
    iteration. It waits in iterations 6 to 8, and runs in the ninth, in which A takes its third block.
    """
    policy = InFlight(
        capacity_scheduler_policy="max_utilization",
        batch_wait_timeout_iters=3,
        batch_wait_max_tokens_ratio=0.9,
    )
    core = make_core(batching=policy, num_blocks=6)
    core.add(make_request(A, 1), 20)
    core.add(make_request(C, 12), 5)
    assert run_step(core)[0] == {A: 1, C: 12}
    core.add(make_request(B, 12), 1)
    assert [B in run_step(core)[0] for _ in range(8)] == [False] * 7 + [True]


@pytest.mark.parametrize("leap", [False, True])
def test_a_wait_goes_on_where_it_was_interrupted(make_core, make_request, leap):
    """The count is neither reset nor increased while no prompt could run.

    6 blocks of 4, B needs 3. Beside A's one block and C's two it waits in iterations 2 to 4. In the fifth A
    takes a second, and B does not fit until C has ended with the sixth. It waits in 7 and 8, the fourth and
    fifth time, and runs in the ninth.
    """
    policy = InFlight(
        capacity_scheduler_policy="max_utilization",
        batch_wait_timeout_iters=5,
        batch_wait_max_tokens_ratio=0.9,
    )
    core = make_core(batching=policy, num_blocks=6)
    core.add(make_request(A, 1), 9)
    core.add(make_request(C, 4), 6)
    core.commit(core.plan(0.0), StepOutcome(), 0.0)
    core.add(make_request(B, 12), 1)
    log = []
    while (plan := core.plan(0.0)) is not None:
        num_iterations = plan.horizon if leap else 1
        log += [plan.tokens_by_request] * num_iterations
        core.commit(plan, StepOutcome(num_iterations), 0.0)
    assert log == [{A: 1, C: 1}] * 5 + [{A: 1}] * 2 + [{A: 1, B: 12}]
