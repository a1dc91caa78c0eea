"""Rules that differ between vLLM 0.32 and 0.33, worked out on paper."""

import numpy as np
import pytest

from policies.batching.chunked import Chunked
from policies.batching.paced_prefills import PacedPrefills
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.tiered import Tiered
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.release import RELEASES, VLLM_0_32, release_of
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.drafts import Speculation
from policies.speculation.proposers import Eagle, Mtp
from tests.policies.cores import speculative_core

VLLM_0_33 = RELEASES[0, 33]
SHARED = Segment(7, 8)


@pytest.mark.parametrize(
    ("version", "release"),
    [
        (None, VLLM_0_33),
        ("0.9.0", VLLM_0_32),
        ("0.32.0", VLLM_0_32),
        ("0.32.1", VLLM_0_32),
        ("0.33.0", VLLM_0_33),
        ("0.40.0", VLLM_0_33),
        ("1.0", VLLM_0_33),
    ],
)
def test_a_version_has_the_rules_of_the_last_release_that_changed_some(version, release):
    assert release_of(version) == release


def found(prompts, release, proposer, caching):
    """Computes prompts one after the other; returns the tokens that the cache has of each."""
    core = speculative_core(
        speculation=Speculation(proposer=proposer, draft_length=Fixed()),
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=Fcfs(),
        block_pool=caching.pool(KvMemory(100, 1.0, max_model_len=1000)),
        max_num_seqs=4,
        max_model_len=1000,
        release=release,
    )
    cached = []
    for request_id, prompt in enumerate(prompts):
        core.add(Request(request_id, 0.0, prompt), 1)
        plan = core.plan(0.0)
        cached.append(plan.chunks[0].num_cached)
        core.commit(plan, StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
        core.check_integrity()
    return cached


@pytest.mark.parametrize(
    ("rest", "old", "new"),
    [
        ((Segment(1, 4), Segment(1, 4)), [0, 4], [0, 8]),  # the second prompt goes on as the first
        ((Segment(1, 4), Segment(2, 4)), [0, 4], [0, 4]),  # it differs in the token after the second block
    ],
)
def test_the_content_of_a_block_includes_the_token_after_it(rest, old, new):
    """Two blocks of 4 tokens are shared. In 0.32 the last block of a hit is computed again."""
    prompts = [Prompt(12, (SHARED, segment)) for segment in rest]
    eagle, caching = Eagle(draft=None, num_speculative_tokens=2), PrefixCaching(block_size=4)
    assert found(prompts, VLLM_0_32, eagle, caching) == old
    assert found(prompts, VLLM_0_33, eagle, caching) == new


def test_several_modules_of_mtp_read_several_tokens_ahead():
    """The three tokens after the second block, 8, 9 and 10, belong to it."""
    mtp = Mtp(draft=None, num_speculative_tokens=3, num_nextn_predict_layers=3)
    prompts = [Prompt(14, (Segment(7, 10), Segment(content, 4))) for content in (1, 2)]
    assert found(prompts, VLLM_0_33, mtp, PrefixCaching(block_size=4)) == [0, 4]
    prompts = [Prompt(14, (Segment(7, 11), Segment(content, 3))) for content in (1, 2)]
    assert found(prompts, VLLM_0_33, mtp, PrefixCaching(block_size=4)) == [0, 8]


def test_a_block_at_the_end_of_a_prompt_is_found_once_the_token_after_it_is_known():
    """The first prompt ends with a block, and its answer goes on as the second prompt does."""
    first = Prompt(8, (SHARED,))
    core = speculative_core(
        speculation=Speculation(proposer=Eagle(draft=None, num_speculative_tokens=2), draft_length=Fixed()),
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=Fcfs(),
        block_pool=PrefixCaching(block_size=4).pool(KvMemory(100)),
        max_num_seqs=4,
        max_model_len=1000,
        release=VLLM_0_33,
    )
    core.add(Request(0, 0.0, first, answer_id=9), 1)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    for content, num_cached in ((9, 8), (5, 4)):
        core.add(Request(content, 0.0, Prompt(10, (SHARED, Segment(content, 2)))), 1)
        plan = core.plan(0.0)
        assert plan.chunks[0].num_cached == num_cached
        core.commit(plan, StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)


def test_caches_with_other_tiers_hash_blocks_in_the_old_way():
    prompts = [Prompt(12, (SHARED, Segment(1, 4)))] * 2
    eagle = Eagle(draft=None, num_speculative_tokens=2)
    assert found(prompts, VLLM_0_33, eagle, Tiered(block_size=4)) == [0, 4]


def without_drafts(release, scheduling, batching, num_blocks=100):
    return EngineCore(
        batching=batching,
        scheduling=scheduling,
        block_pool=Paged(block_size=4).pool(KvMemory(num_blocks)),
        max_num_seqs=8,
        max_model_len=100,
        release=release,
    )


@pytest.mark.parametrize(
    ("release", "scheduling", "preempted", "served"),
    [
        (VLLM_0_32, Priority(), [1], {0: 1}),
        (VLLM_0_33, Priority(), [1], {0: 1, 2: 1}),
        (VLLM_0_33, Fcfs(), [2], {0: 1, 1: 1}),  # it preempts the last one for the one before
    ],
)
def test_the_running_requests_after_one_that_preempted_itself_are_served(
    run_step, release, scheduling, preempted, served
):
    """All five blocks are taken, and request 1, the least urgent one, needs another for its next token."""
    core = without_drafts(release, scheduling, Chunked(max_num_batched_tokens=64), num_blocks=5)
    core.add(Request(0, 0.0, Prompt(5), priority=0), 9)
    core.add(Request(1, 0.0, Prompt(7), priority=5), 9)
    assert run_step(core)[0] == {0: 5, 1: 7}
    core.add(Request(2, 0.0, Prompt(3), priority=1), 9)
    assert run_step(core)[0] == {0: 1, 1: 1, 2: 3}
    plan = core.plan(0.0)
    assert [seq.request_id for seq in plan.preempted] == preempted
    assert plan.tokens_by_request == served


@pytest.mark.parametrize(("release", "num_waits"), [(VLLM_0_32, 1), (VLLM_0_33, 2)])
def test_an_engine_alone_counts_from_its_last_step_with_prompts(run_step, release, num_waits):
    """The steps 0 and 1 have a prompt. The next may be step 3, a multiple of 3; in 0.33 step 4, 3 later."""
    batching = PacedPrefills(max_num_batched_tokens=8, prefill_schedule_interval=3)
    core = without_drafts(release, Fcfs(), batching)
    core.add(Request(0, 0.0, Prompt(9)), 20)
    assert [run_step(core)[0] for _ in range(2)] == [{0: 8}, {0: 1}]
    core.add(Request(1, 0.0, Prompt(6)), 20)
    assert [run_step(core)[0] for _ in range(num_waits + 1)] == [{0: 1}] * num_waits + [{0: 1, 1: 6}]
