"""Prompts in every n-th iteration, as with vLLM's prefill_schedule_interval, worked out on paper."""

import pytest

from policies.batching.paced_prefills import PacedPrefills
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs

A, B, C = range(3)


def paced(interval, budget=8, **settings):
    return PacedPrefills(max_num_batched_tokens=budget, prefill_schedule_interval=interval, **settings)


def test_prompts_wait_for_an_iteration_of_the_interval(make_core, make_request, run_step):
    """B arrives in iteration 1 and begins in iteration 3, of which its rest waits for iteration 6."""
    core = make_core(batching=paced(3))
    core.add(make_request(A, 4), stop_after=9)
    assert run_step(core)[0] == {A: 4}
    core.add(make_request(B, 10), stop_after=1)
    assert [run_step(core)[0] for _ in range(6)] == [
        {A: 1},
        {A: 1},
        {A: 1, B: 7},
        {A: 1},
        {A: 1},
        {A: 1, B: 3},
    ]


def test_prompts_do_not_wait_where_nothing_decodes(make_core, make_request, run_out):
    core = make_core(batching=paced(5))
    core.add(make_request(A, 20), stop_after=1)
    assert [tokens for tokens, _, _ in run_out(core)] == [{A: 8}, {A: 8}, {A: 4}]


def test_prompts_do_not_wait_while_more_of_them_queue(make_core, make_request, run_step):
    """After iteration 3, C waits for budget, so B continues; after iteration 4, none waits."""
    core = make_core(batching=paced(3))
    core.add(make_request(A, 4), stop_after=20)
    assert run_step(core)[0] == {A: 4}
    core.add(make_request(B, 9))
    core.add(make_request(C, 9))
    steps = [run_step(core)[0] for _ in range(6)]
    assert steps == [{A: 1}, {A: 1}, {A: 1, B: 7}, {A: 1, B: 2, C: 5}, {A: 1, B: 1}, {A: 1, B: 1, C: 4}]


def test_a_cached_prompt_does_not_wait(make_request, run_step):
    """The cache has all of B's prompt but its last token, and nothing of C's."""
    core = EngineCore(
        batching=paced(9),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(100)),
        max_num_seqs=8,
        max_model_len=100,
    )
    core.add(Request(A, 0.0, Prompt(4, (Segment(7, 4),))), stop_after=20)
    assert run_step(core)[0] == {A: 4}
    core.add(Request(B, 0.0, Prompt(5, (Segment(7, 4), Segment(8, 1)))), stop_after=20)
    core.add(make_request(C, 4))
    assert [run_step(core)[0] for _ in range(2)] == [{A: 1, B: 1}, {A: 1, B: 1}]


def test_decodes_are_leapt_over_up_to_the_interval(make_core, make_request, run_step):
    core = make_core(batching=paced(6))
    core.add(make_request(A, 4), stop_after=50)
    assert run_step(core)[0] == {A: 4}
    core.add(make_request(B, 4))
    assert core.plan(0.0).horizon == 5


def test_rejects_an_interval_below_one():
    with pytest.raises(ValueError, match="prefill_schedule_interval=0: must be >= 1"):
        paced(0)
