"""Generated blocks are found while their sequence runs, where answers have content ids.

`make parity` compares the same with vLLM on random workloads (the modes with "shared").
"""

import pytest

from policies.batching.chunked import Chunked
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Branching, Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from tests.policies.cores import async_core

A, B = 0, 1
PROMPT = Prompt(4, (Segment(5, 4),))
QUOTE = Prompt(21, (Segment(5, 4), Segment(6, 17)))  # the prompt and 17 tokens of its answer, content 6


def make_engine(kind=EngineCore, num_blocks=100, batching=None, block_size=4, max_num_seqs=8):
    return kind(
        batching=batching or Chunked(max_num_batched_tokens=64),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=block_size).pool(KvMemory(num_blocks)),
        max_num_seqs=max_num_seqs,
        max_model_len=200,
    )


def run(core, num_steps):
    """Runs steps of one iteration; returns the cached tokens of the requests that the last one admits."""
    for _ in range(num_steps):
        plan = core.plan(0.0)
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    return {seq.request_id: seq.num_found for seq in plan.admitted}


@pytest.mark.parametrize(("kind", "num_decodes"), [(EngineCore, 3), (async_core, 4)])
def test_a_prompt_finds_what_a_running_sequence_has_generated(kind, num_decodes):
    """The fourth generated token is computed by the step that admits B; asynchronously, it is unknown."""
    for num_steps, found in [(num_decodes, 4), (num_decodes + 1, 8)]:
        core = make_engine(kind)
        core.add(Request(A, 0.0, PROMPT, answer_id=6), stop_after=50)
        run(core, num_steps)
        core.add(Request(B, 0.0, QUOTE), stop_after=1)
        assert run(core, 1) == {B: found}


def test_generated_blocks_are_found_although_a_prompt_has_quoted_them_before():
    """The quote, whose blocks are gone, is 17 tokens of the answer, and something else follows it."""
    core = make_engine()
    quote = Prompt(25, (*QUOTE.segments, Segment(7, 4)))
    core.add(Request(2, 0.0, quote), stop_after=1)
    run(core, 1)
    core.block_pool.clear_cache()
    core.add(Request(A, 0.0, PROMPT, answer_id=6), stop_after=50)
    run(core, 4)
    core.add(Request(B, 0.0, QUOTE), stop_after=1)
    assert run(core, 1) == {B: 8}


class StopsDecoding:
    """Decodes in the first three steps only; later ones compute prompts, token by token."""

    def fill(self, view, step, now):
        if view.num_iterations < 3:
            step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, 1)
        for seq in view.waiting:
            step.admit(seq, 3)


def test_an_answer_that_ends_late_without_a_surplus_token_is_found_as_far_as_it_was_computed():
    """A ends with its third token in step 2, and no later step decodes: 3 + 2 tokens have KV."""
    core = make_engine(async_core, batching=StopsDecoding(), block_size=1)
    core.add(Request(A, 0.0, Prompt(3, (Segment(5, 3),)), answer_id=6), stop_after=3)
    core.add(Request(2, 0.0, Prompt(50)), stop_after=1)
    run(core, 4)
    core.add(Request(B, 0.0, Prompt(20, (Segment(5, 3), Segment(6, 17)))), stop_after=1)
    assert run(core, 1) == {B: 5}


def test_an_answer_with_another_content_is_not_found():
    core = make_engine()
    core.add(Request(A, 0.0, PROMPT, answer_id=7), stop_after=50)
    run(core, 20)
    core.add(Request(B, 0.0, QUOTE), stop_after=1)
    assert run(core, 1) == {B: 4}


@pytest.mark.parametrize("kind", [EngineCore, async_core])
def test_a_preempted_sequence_resumes_on_the_blocks_of_its_twin(kind):
    """59 blocks of 2 hold two sequences of 58 tokens; then B is preempted, and all but its end is A's."""
    core = make_engine(kind, num_blocks=59, batching=Chunked(max_num_batched_tokens=6), block_size=2)
    prompt = Prompt(14, (Segment(1, 14),))
    core.add(Request(A, 0.0, prompt, answer_id=2), stop_after=53)
    core.add(Request(B, 0.0, prompt, answer_id=2), stop_after=52)
    resumed, num_free = {}, []
    while (plan := core.plan(0.0)) is not None:
        resumed |= {seq.request_id: seq.num_found for seq in plan.admitted if seq.num_preemptions}
        if resumed:
            num_free.append(core.block_pool.num_free)
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    assert resumed == {B: 64}
    assert num_free[0] == 25


def test_while_a_prompt_waits_for_more_of_an_answer_every_step_is_decided_anew():
    """B has a slot, but needs 6 blocks of the 8, of which A generates the first ones."""
    core = make_engine(num_blocks=8)
    core.add(Request(A, 0.0, PROMPT, answer_id=6), stop_after=25)
    run(core, 9)
    assert core.plan(0.0).horizon > 1
    other = make_engine(num_blocks=8)
    other.add(Request(A, 0.0, PROMPT, answer_id=6), stop_after=25)
    run(other, 9)
    other.add(Request(B, 0.0, Prompt(30, (*QUOTE.segments, Segment(9, 9)))), stop_after=1)
    plan = other.plan(0.0)
    assert not plan.admitted
    assert plan.horizon == 1


def test_a_hit_on_a_token_that_is_not_computed_is_undone():
    """A policy admits B onto the block that A completes in this step, then preempts A."""

    class AdmitsThenPreempts:
        def fill(self, view, step, now):
            step.decode_all()
            for seq in view.waiting:
                step.admit(seq, 100)
            if not preempted:
                preempted.append([seq.num_found for seq in view.running])
                step.preempt(view.running[0])

    preempted = []
    core = make_engine()
    core.add(Request(A, 0.0, PROMPT, answer_id=6), stop_after=50)
    run(core, 4)
    core.batching = AdmitsThenPreempts()
    core.add(Request(B, 0.0, QUOTE), stop_after=1)
    plan = core.plan(0.0)
    assert preempted == [[0, 8]]
    assert {seq.request_id for seq in plan.preempted} == {A, B}
    assert {seq.request_id: seq.num_found for seq in plan.admitted} == {A: 4, B: 8}


def test_a_preempted_sequence_with_branches_has_no_unread_token():
    """Else the abort of a swapped one would free the KV of a token more than it loads."""

    class PreemptsOnce:
        def fill(self, view, step, now):
            if view.num_decoding and not preempted:
                preempted.extend(view.running)
                step.preempt(view.running[0])
            step.decode_all()
            for seq in view.waiting:
                step.admit(seq, 100)

    preempted = []
    core = make_engine(async_core)
    core.add(Request(A, 0.0, PROMPT, branching=Branching(2)), stop_after=50)
    run(core, 3)
    core.batching = PreemptsOnce()
    core.plan(0.0)
    assert [seq.num_unread for seq in preempted] == [0]
