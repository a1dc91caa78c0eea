"""TensorRT-LLM's in-flight batching against schedules worked out on paper."""

import pytest

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.worlds import Ask, World
from policies.batching.inflight import InFlight
from policies.caching.paged import Paged
from policies.core.plan import StepOutcome

A, B, C = range(3)


def begun(make_core, make_request, **settings):
    """Returns a core with four blocks of 4, and requests A of two blocks and B of three.

    A may reach 8 tokens, 7 of them in KV; B 12 tokens, 11 of them in KV.
    """
    core = make_core(batching=InFlight(**settings), num_blocks=4)
    core.add(make_request(A, 4, max_tokens=4), stop_after=3)
    core.add(make_request(B, 4, max_tokens=8), stop_after=2)
    return core


def test_guaranteed_no_evict_reserves_the_longest_answers(make_core, make_request, run_out):
    core = begun(make_core, make_request)
    assert [step[0] for step in run_out(core)] == [{A: 4}, {A: 1}, {A: 1}, {B: 4}, {B: 1}]


def test_guaranteed_no_evict_admits_what_fits_to_the_last_block(make_core, make_request, run_step):
    core = make_core(batching=InFlight(), num_blocks=5)
    core.add(make_request(A, 4, max_tokens=4))
    core.add(make_request(B, 4, max_tokens=8))
    assert run_step(core)[0] == {A: 4, B: 4}


def test_a_request_without_a_limit_reserves_the_whole_context(make_core, make_request, run_step):
    core = make_core(batching=InFlight(), num_blocks=10, max_model_len=20)
    for request_id in (A, B, C):
        core.add(make_request(request_id, 4))
    assert run_step(core)[0] == {A: 4, B: 4}, "20 tokens are five blocks, for two requests of three"


def test_max_utilization_admits_what_fits_now(make_core, make_request, run_step):
    core = begun(make_core, make_request, capacity_scheduler_policy="max_utilization")
    assert run_step(core)[0] == {A: 4, B: 4}


def test_a_cut_prompt_ends_on_a_block_boundary_and_is_leapt_over(make_core, make_request):
    """Budget 10, blocks of 4: 8 tokens while more than 10 are left of 26, that is twice, then 10."""
    core = make_core(batching=InFlight(max_num_batched_tokens=10))
    core.add(make_request(A, 26), stop_after=1)
    plan = core.plan(0.0)
    assert plan.tokens_by_request == {A: 8}
    assert plan.horizon == 2


def test_the_last_piece_of_a_prompt_is_what_is_left(make_core, make_request, run_out):
    core = make_core(batching=InFlight(max_num_batched_tokens=10))
    core.add(make_request(A, 26), stop_after=1)
    assert [step[0] for step in run_out(core)] == [{A: 8}, {A: 8}, {A: 10}]


def test_a_budget_below_a_block_does_not_stop_the_engine(make_core, make_request, run_out):
    core = make_core(batching=InFlight(max_num_batched_tokens=3))
    core.add(make_request(A, 7), stop_after=1)
    assert [step[0] for step in run_out(core)] == [{A: 3}, {A: 3}, {A: 1}]


def test_without_chunked_context_a_prompt_waits_until_it_fits_whole(make_core, make_request, run_step):
    policy = InFlight(
        max_num_batched_tokens=10,
        capacity_scheduler_policy="max_utilization",
        enable_chunked_context=False,
    )
    core = make_core(batching=policy)
    for request_id, prompt, answer in [(A, 6, 2), (B, 6, 1), (C, 1, 1)]:
        core.add(make_request(request_id, prompt), stop_after=answer)
    assert run_step(core)[0] == {A: 6}
    assert run_step(core)[0] == {A: 1, B: 6, C: 1}


def waiting_core(make_core, make_request):
    """Returns a core with budget 10 in which A decodes and B, a prompt of 4, has just arrived."""
    policy = InFlight(
        max_num_batched_tokens=10,
        capacity_scheduler_policy="max_utilization",
        batch_wait_timeout_iters=3,
        batch_wait_max_tokens_ratio=0.9,
    )
    core = make_core(batching=policy)
    core.add(make_request(A, 2), stop_after=20)
    core.commit(core.plan(0.0), StepOutcome(1), 0.0)
    core.add(make_request(B, 4), stop_after=20)
    return core


def test_a_prompt_waits_for_others_until_the_timeout(make_core, make_request, run_step):
    """Decode and prompt have 5 of 10 tokens, less than 90 %, so the prompt waits for three iterations."""
    core = waiting_core(make_core, make_request)
    assert [run_step(core)[0] for _ in range(5)] == [{A: 1}, {A: 1}, {A: 1}, {A: 1, B: 4}, {A: 1, B: 1}]


def test_batch_waiting_is_leapt_over(make_core, make_request):
    assert waiting_core(make_core, make_request).plan(0.0).horizon == 3


def test_batch_waiting_ends_when_the_prompts_fill_their_share(make_core, make_request, run_step):
    core = waiting_core(make_core, make_request)
    assert run_step(core)[0] == {A: 1}
    core.add(make_request(C, 4), stop_after=1)
    assert run_step(core)[0] == {A: 1, B: 4, C: 4}, "9 of 10 tokens"


def test_a_new_wait_lasts_as_long_as_the_first(make_core, make_request, run_step):
    core = waiting_core(make_core, make_request)
    for _ in range(4):
        run_step(core)
    core.add(make_request(C, 4), stop_after=1)
    steps = [run_step(core)[0] for _ in range(4)]
    assert [C in step for step in steps] == [False, False, False, True]


def test_batch_waiting_ends_when_enough_prompts_wait(make_core, make_request, run_step):
    policy = InFlight(
        capacity_scheduler_policy="max_utilization", batch_wait_timeout_iters=3, batch_wait_min_prompts=2
    )
    core = make_core(batching=policy)
    core.add(make_request(A, 2), stop_after=20)
    run_step(core)
    core.add(make_request(B, 4), stop_after=20)
    assert run_step(core)[0] == {A: 1}
    core.add(make_request(C, 4), stop_after=20)
    assert run_step(core)[0] == {A: 1, B: 4, C: 4}
    core.add(make_request(3, 4), stop_after=1)
    assert [3 in run_step(core)[0] for _ in range(4)] == [False, False, False, True], "the timeout"


def test_a_wait_that_ends_without_memory_is_not_leapt_over():
    """The second prompt waits for others, then in vain for memory (the watermark), and then again."""
    world = World(
        asks=(Ask(0, 4, 60), Ask(0.5, 4, 8)),
        batching=InFlight(
            max_num_batched_tokens=64,
            capacity_scheduler_policy="max_utilization",
            batch_wait_timeout_iters=4,
            batch_wait_max_tokens_ratio=0.5,
        ),
        caching=Paged(block_size=4, watermark=0.9),
        num_blocks=20,
    )
    waits = assert_leap_equals_step(world).records.requests
    assert waits.wait_memory_s[1] > 0
    assert waits.wait_policy_s[1] > waits.wait_memory_s[1]


def test_prompts_do_not_wait_where_none_decodes(make_core, make_request, run_step):
    policy = InFlight(batch_wait_timeout_iters=3, batch_wait_max_tokens_ratio=0.9)
    core = make_core(batching=policy)
    core.add(make_request(A, 4), stop_after=1)
    assert run_step(core)[0] == {A: 4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_wait_timeout_iters": -1}, "batch_wait_timeout_iters=-1: must be >= 0"),
        ({"batch_wait_min_prompts": -1}, "batch_wait_min_prompts=-1: must be >= 0"),
        (
            {"batch_wait_max_tokens_ratio": 1.5},
            "batch_wait_max_tokens_ratio=1.5: must be a share, >= 0 and <= 1",
        ),
    ],
)
def test_rejects_impossible_batch_waits(settings, message):
    with pytest.raises(ValueError, match=message):
        InFlight(**settings)


def test_rejects_an_unknown_capacity_scheduler():
    message = "capacity_scheduler_policy=max_requests: must be one of guaranteed_no_evict, max_utilization, "
    with pytest.raises(ValueError, match=message):
        InFlight(capacity_scheduler_policy="max_requests")
