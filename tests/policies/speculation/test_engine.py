"""Tests of the engine that speculates: no token and no block is lost or doubled, no budget exceeded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import BlockPool, KvMemory
from policies.caching.prefix import PrefixCaching, PrefixPool
from policies.caching.radix import Radix
from policies.caching.tiered import Tiered
from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import FinishReason
from policies.scheduling.fcfs import Fcfs
from policies.speculation import SlotRules, TokenTree
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.drafts import Speculation
from tests.policies.cores import async_speculative_core, speculative_core

NO_RULES = SlotRules()
FIXED = Fixed()
CORES = (speculative_core, async_speculative_core)


@dataclass(frozen=True)
class Any4:
    """A proposer of any rules."""

    method: ClassVar[str] = "any"
    num_speculative_tokens: int = 4
    tree: TokenTree | None = None
    rules: SlotRules = NO_RULES
    draft: object = None


@dataclass(frozen=True)
class Budgets:
    """A draft-length policy that records what is left of the budget and of the KV blocks."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False
    num_repeats: ClassVar[int] = 1
    left: ClassVar[list[tuple[int, int]]] = []

    def num_draft_tokens(self, view):
        self.left.append((view.tokens_left, view.num_free_blocks))
        return 4


def engine(
    make, *, proposer=None, pool=None, budget=64, max_num_seqs=4, max_model_len=1000, draft_length=FIXED
):
    return make(
        speculation=Speculation(proposer=proposer or Any4(), draft_length=draft_length),
        batching=Chunked(max_num_batched_tokens=budget),
        scheduling=Fcfs(),
        block_pool=pool or BlockPool(1000, 4),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )


def accepted_of(plan, table):
    """Accepts, of the drafts of each sequence, as many as a table by request and output position says."""
    drafts = plan.drafts
    rows = zip(drafts.seqs, drafts.depth.tolist(), strict=True)
    one = [min(table[seq.request_id][seq.num_output_tokens], depth) for seq, depth in rows]
    return np.array([one], np.int64).reshape(1, len(drafts.seqs))


@st.composite
def worlds(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_drafts = draw(st.integers(1, 5))
    rules = SlotRules(
        draw(st.booleans()),
        draw(st.integers(0, 1)),
        draw(st.booleans()),
        draw(st.sampled_from([0, num_drafts])),
    )
    tree = draw(st.sampled_from([None, None, TokenTree.of_widths([2, 2]), TokenTree.of_widths([3, 1, 1])]))
    proposer = Any4(num_drafts if tree is None else tree.num_nodes, tree, rules)
    pool = draw(st.sampled_from([BlockPool, PrefixPool]))
    num_blocks = draw(st.integers(64 // block_size + 20, 400 // block_size + 40))
    max_model_len = draw(st.sampled_from([64, 128, 1000]))
    made = engine(
        draw(st.sampled_from(CORES)),
        proposer=proposer,
        pool=pool(num_blocks, block_size),
        budget=draw(st.sampled_from([16, 64, 256])),
        max_num_seqs=draw(st.integers(1, 12)),
        max_model_len=max_model_len,
    )
    requests = []
    for request_id in range(draw(st.integers(1, 20))):
        num_tokens = draw(st.integers(1, 40))
        prompt = Prompt(num_tokens, (Segment(request_id % 5, num_tokens),))
        max_tokens = draw(st.sampled_from([None, 20]))
        requests.append(
            (draw(st.integers(0, 30)), Request(request_id, 0.0, prompt, max_tokens), draw(st.integers(1, 40)))
        )
    seed = draw(st.integers(0, 1000))
    table = np.minimum(np.random.default_rng(seed).geometric(0.4, (20, 100)) - 1, 5).tolist()
    return made, sorted(requests, key=lambda each: each[0]), table


@given(worlds())
def test_no_token_and_no_block_is_lost_or_doubled(world):
    core, requests, table = world
    wanted = {request.request_id: num_tokens for _, request, num_tokens in requests}
    ended, num_added, step = {}, 0, 0
    while requests or core.num_unfinished or core.running:
        while requests and requests[0][0] <= step:
            _, request, num_tokens = requests.pop(0)
            core.add(request, num_tokens)
            num_added += 1
        plan = core.plan(float(step))
        step += 1
        assert step < 3000
        if plan is None:
            continue
        assert plan.num_tokens <= core.batching.max_num_batched_tokens
        assert plan.num_tokens == sum(plan.tokens_by_request.values())
        before = {seq: seq.num_known for seq in plan.drafts.seqs}
        accepted = accepted_of(plan, table)
        _, finished = core.commit(plan, StepOutcome(1, accepted=accepted), float(step))
        for seq, num_accepted in zip(plan.drafts.seqs, accepted[0].tolist(), strict=True):
            if seq not in finished and seq.finish_reason is None:
                assert seq.num_known == before[seq] + 1 + num_accepted
        for seq in finished:
            assert seq.request_id not in ended
            ended[seq.request_id] = seq
            if seq.finish_reason is FinishReason.stop:
                assert seq.num_output_tokens == wanted[seq.request_id]
        core.check_integrity()
    assert len(ended) == num_added
    assert core.block_pool.num_free == core.block_pool.num_blocks


@pytest.mark.parametrize("make", CORES)
def test_a_pass_gives_up_to_all_draft_tokens_and_one_more(make):
    core = engine(make)
    core.add(Request(0, 0.0, Prompt(6)), 9)
    plan = core.plan(0.0)
    core.commit(plan, StepOutcome(accepted=np.zeros((1, 0), np.int64)), 1.0)
    for num_accepted, num_output in ((4, 6), (0, 7)):
        plan = core.plan(1.0)
        assert plan.tokens_by_request == {0: 5}
        core.commit(plan, StepOutcome(accepted=np.array([[num_accepted]])), 1.0)
        assert core.find(0).num_output_tokens == num_output
    plan = core.plan(1.0)
    _, (seq,) = core.commit(plan, StepOutcome(accepted=np.array([[4]])), 1.0)
    assert seq.num_output_tokens == 9, "the answer ends in the middle of the burst"


def test_slots_of_rejected_tokens_are_kept_and_used_again():
    core = engine(speculative_core, pool=BlockPool(100, 4))
    core.add(Request(0, 0.0, Prompt(4)), 50)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    used = []
    for _ in range(5):  # 4 + 5 slots = 3 blocks; one token stays each time
        core.commit(core.plan(0.0), StepOutcome(accepted=np.array([[0]])), 0.0)
        used.append(core.block_pool.num_used)
    assert used == [3, 3, 3, 3, 4]


def test_asynchronous_scheduling_counts_all_draft_tokens_of_the_step_in_flight():
    core = engine(async_speculative_core, pool=BlockPool(100, 4))
    core.add(Request(0, 0.0, Prompt(4)), 50)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    used = []
    for _ in range(3):  # 4 + 5, then 4 + 5 + 5, then 5 + 5 + 5 slots
        core.commit(core.plan(0.0), StepOutcome(accepted=np.array([[0]])), 0.0)
        used.append(core.block_pool.num_used)
    assert used == [3, 4, 4]


@pytest.mark.parametrize("make", CORES)
def test_a_policy_sees_what_a_step_leaves_of_the_budget_and_of_the_blocks(make):
    Budgets.left.clear()
    core = engine(make, pool=BlockPool(100, 4), draft_length=Budgets())
    core.add(Request(0, 0.0, Prompt(4)), 50)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    core.plan(0.0)
    assert Budgets.left == [(64 - 4, 99), (64 - 5, 97)]


def test_a_request_with_branches_is_refused():
    core = engine(speculative_core)
    with pytest.raises(RejectedError, match="choose speculation=none"):
        core.add(Request(0, 0.0, Prompt(4), branching=Branching(2)))


@pytest.mark.parametrize("accepted", [None, np.zeros((2, 1), np.int64), np.array([[5]]), np.array([[-1]])])
def test_wrong_acceptances_are_refused(accepted):
    core = engine(speculative_core)
    core.add(Request(0, 0.0, Prompt(4)), 50)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    with pytest.raises(ValueError, match="accepted"):
        core.commit(core.plan(0.0), StepOutcome(accepted=accepted), 0.0)


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4), Tiered(block_size=4)])
@pytest.mark.parametrize(("drops", "num_cached"), [(False, 8), (True, 4)])
def test_the_last_block_of_a_hit_is_computed_again(caching, drops, num_cached):
    pool = caching.pool(KvMemory(100, 1.0, max_model_len=1000))
    core = engine(speculative_core, proposer=Any4(rules=SlotRules(drops_last_block=drops)), pool=pool)
    for request_id in range(2):
        core.add(Request(request_id, 0.0, Prompt(10, (Segment(7, 10),))), 1)
        plan = core.plan(0.0)
        core.commit(plan, StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    assert plan.chunks[0].num_cached == num_cached
