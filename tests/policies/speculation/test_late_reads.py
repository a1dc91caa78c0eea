"""Tests that an executor may say what a step accepted after the next one was planned: the plans are equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import BlockPool
from policies.caching.prefix import PrefixPool
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.request import Prompt, Request, Segment
from policies.core.sequence import FinishReason, Sequence, SequenceState
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from policies.speculation import SlotRules
from policies.speculation.draft_lengths import Adaptive, Backoff, ByBatchSize, Fixed, SloAware
from policies.speculation.engine.drafts import Speculation
from tests.policies.cores import async_speculative_core
from tests.policies.speculation.test_engine import Any4

MAX_ASKED = 6
"""Highest number of calls of `plan` without a plan between two steps."""


def pass_seconds(num_seqs: int, num_tokens: int, num_drafts: int) -> float:
    """Estimates a pass, which depends on all that it is given."""
    return 0.01 + 1e-4 * num_seqs + 1e-6 * num_tokens + 1e-3 * num_drafts


@dataclass(frozen=True)
class World:
    """Settings of an engine, its requests with their arrivals, and what every pass accepts."""

    settings: dict[str, Any]
    arrivals: list[tuple[int, Request]]
    lengths: dict[int, int]
    """Output tokens after which a stop token comes, by request id."""
    aborts: dict[int, int]
    """Number of committed steps after which the client aborts, by request id."""
    seed: int

    @cached_property
    def table(self) -> list[list[int]]:
        """Accepted draft tokens of a pass, by request id and output tokens before it."""
        return np.minimum(np.random.default_rng(self.seed).geometric(0.4, (20, 200)) - 1, 5).tolist()

    def core(self) -> EngineCore:
        given = dict(self.settings)
        pool, num_blocks, block_size = given.pop("pool")
        return async_speculative_core(block_pool=pool(num_blocks, block_size), **given)

    def accepted(self, plan: StepPlan, ended: set[Sequence], num_certain: int = 0) -> np.ndarray:
        """Returns the accepted draft tokens of a plan, up to the stop token of each sequence.

        ended: sequences that had ended before. num_certain: tokens of this plan that the others have got
        already.
        """
        drafts = plan.drafts
        accepted = []
        for seq, depth in zip(drafts.seqs, drafts.depth.tolist(), strict=True):
            place = seq.num_output_tokens - num_certain
            num_left = max(self.lengths[seq.request_id] - place - 1, 0)
            num = 0 if seq in ended else min(self.table[seq.request_id][place], depth, num_left)
            accepted.append(num)
        return np.array([accepted], np.int64).reshape(1, len(drafts.seqs))


@st.composite
def worlds(draw: Any) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_drafts = draw(st.integers(1, 5))
    lookahead = draw(st.sampled_from([0, num_drafts]))
    rules = SlotRules(draw(st.booleans()), draw(st.integers(0, 1)), draw(st.booleans()), lookahead)
    lengths = [
        Fixed(),
        ByBatchSize(num_speculative_tokens_per_batch_size=((1, 2, num_drafts), (3, 100, 1))),
        Adaptive(interval=1),
        Backoff(max_misses=1, retry_interval=2),
        SloAware(tpot_s=0.7),
    ]
    speculation = Speculation(
        proposer=Any4(num_drafts, None, rules),
        draft_length=draw(st.sampled_from(lengths)),
        estimate=pass_seconds,
    )
    schedulings = [Fcfs(), Fcfs(preemption_mode="swap"), Priority(), Mlfq(quantum_tokens=3, max_active=2)]
    schedulings.append(Mlfq(quantum_tokens=2, preemption_mode="swap", max_active=2, min_free_share=0.5))
    num_blocks = draw(st.integers(64 // block_size + 20, 300 // block_size + 30))
    made = {
        "speculation": speculation,
        "batching": Chunked(max_num_batched_tokens=draw(st.sampled_from([16, 64, 256]))),
        "scheduling": draw(st.sampled_from(schedulings)),
        "pool": (draw(st.sampled_from([BlockPool, PrefixPool])), num_blocks, block_size),
        "max_num_seqs": draw(st.integers(1, 12)),
        "max_model_len": draw(st.sampled_from([64, 128, 1000])),
        "num_swap_blocks": draw(st.sampled_from([20, 1000])),
    }
    arrivals, num_output, aborts = [], {}, {}
    for request_id in range(draw(st.integers(1, 20))):
        num_tokens = draw(st.integers(1, 40))
        prompt = Prompt(num_tokens, (Segment(request_id % 5, num_tokens),))
        max_tokens = draw(st.sampled_from([None, 1, 7, 20]))
        request = Request(
            request_id, 0.0, prompt, max_tokens, draw(st.integers(0, 2)), answer_id=100 + request_id
        )
        arrivals.append((draw(st.integers(0, 30)), request))
        num_output[request_id] = draw(st.integers(1, 40))
        if draw(st.integers(0, 9)) == 0:
            aborts[request_id] = draw(st.integers(1, 40))
    arrivals.sort(key=lambda each: each[0])
    return World(made, arrivals, num_output, aborts, draw(st.integers(0, 1000)))


def ended_of(plan: StepPlan) -> set[Sequence]:
    """Returns the sequences of a plan that have ended before."""
    return {seq for seq in plan.drafts.seqs if seq.finish_reason is not None}


class Early:
    """An executor that knows at once what a step accepts, as a simulator does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.core = world.core()
        self.digests: list[str] = []
        self.ended: dict[int, tuple[str, int]] = {}
        self.left = list(world.arrivals)
        self.num_asked = 0

    def run(self) -> None:
        core = self.core
        while self.left or core.num_unfinished or core.running:
            num_committed = len(self.digests)
            if not (core.num_unfinished or core.running):
                self.left[0] = (num_committed, self.left[0][1])
            while self.left and self.left[0][0] <= num_committed:
                self.add(self.left.pop(0)[1])
            for request_id in self.aborts():
                if core.find(request_id) is not None:
                    core.abort(request_id)
                    self.ended[request_id] = "aborted", num_committed
            plan = core.plan(float(num_committed))
            for transfer in core.take_transfers():
                if transfer.seq is not None:
                    core.loaded(transfer.seq.request_id)
            self.num_asked = 0 if plan is not None else self.num_asked + 1
            assert self.num_asked < MAX_ASKED
            assert num_committed < 3000
            self.step(plan, float(num_committed))
            core.check_integrity()
        assert core.block_pool.num_free == core.block_pool.num_blocks

    def aborts(self) -> list[int]:
        """Returns the requests that their clients abort now."""
        return [each for each, step in self.world.aborts.items() if step <= len(self.digests)]

    def add(self, request: Request) -> None:
        self.core.add(request, self.world.lengths[request.request_id])

    def end(self, finished: list[Sequence]) -> None:
        for seq in finished:
            assert seq.request_id not in self.ended
            is_complete = (
                seq.num_output_tokens == self.world.lengths[seq.request_id]
            )  # maybe at its limit, too
            self.ended[seq.request_id] = "stop" if is_complete else seq._end_reason.name, seq.num_known

    def step(self, plan: StepPlan | None, now: float) -> None:
        if plan is None:
            return
        self.digests.append(plan.digest())
        outcome = StepOutcome(accepted=self.world.accepted(plan, ended_of(plan)))
        self.end(self.core.commit(plan, outcome, now)[1])


class Late(Early):
    """An executor that reads the tokens of a step after planning the next one, as a real engine does."""

    pending: StepPlan | None = None
    discarded: frozenset[Sequence] = frozenset()
    prefilled: tuple[Sequence, ...] = ()

    def __init__(self, world: World, ended: dict[int, tuple[str, int]]) -> None:
        super().__init__(world)
        self.aborted = {each: step for each, (reason, step) in ended.items() if reason == "aborted"}

    def aborts(self) -> list[int]:
        """Returns those aborted now, without those that a simulator knows to have ended."""
        return [each for each, step in self.aborted.items() if step <= len(self.digests)]

    def add(self, request: Request) -> None:
        self.core.add(request)  # where its stop token will be is not known

    def step(self, plan: StepPlan | None, now: float) -> None:
        if self.pending is not None:
            self.read(self.pending, self.discarded)
        self.pending = plan
        self.discarded = ended_of(plan) if plan is not None else set()
        if plan is None:
            return
        self.digests.append(plan.digest())
        self.prefilled, finished = self.core.commit(plan, StepOutcome(), now)
        self.end(finished)

    def read(self, plan: StepPlan, discarded: set[Sequence]) -> None:
        accepted = self.world.accepted(plan, discarded, 1)
        num_more = dict(zip(plan.drafts.seqs, accepted[0].tolist(), strict=True))
        num_more |= dict.fromkeys(self.prefilled, 0)
        stopped = []
        for seq, num in num_more.items():
            num_known = min(seq.num_known + num, seq.max_num_tokens)
            if num_known - seq.num_prompt_tokens >= self.world.lengths[seq.request_id]:
                stopped.append(seq)
        self.end(self.core.drafts.read(plan, accepted, stopped))


@given(worlds())
def test_plans_are_equal_if_acceptances_are_read_late(world):
    early = Early(world)
    early.run()
    late = Late(world, early.ended)
    late.run()
    assert late.digests == early.digests
    assert late.ended == early.ended


def make_core() -> EngineCore:
    """Returns an engine with one sequence that has its first token, and a prompt of 6 tokens."""
    core = async_speculative_core(
        speculation=Speculation(proposer=Any4(), draft_length=Fixed()),
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=Fcfs(),
        block_pool=BlockPool(100, 4),
        max_num_seqs=4,
        max_model_len=1000,
    )
    core.add(Request(0, 0.0, Prompt(6), 7))
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    return core


def test_the_certain_token_counts_at_once_and_the_others_when_they_are_read():
    core = make_core()
    seq = core.find(0)
    first = core.plan(0.0)
    assert core.commit(first, StepOutcome(), 0.0) == ([], [])
    assert seq.num_output_tokens == 2
    second = core.plan(0.0)
    assert second.drafts.num_computed.tolist() == [7]
    assert core.drafts.read(first, np.array([[3]])) == []
    assert seq.num_output_tokens == 5
    assert second.drafts.num_computed.tolist() == [10]
    assert second.num_decode_context_tokens == 11


def test_the_end_at_a_limit_is_found_when_the_tokens_are_read():
    core = make_core()
    seq = core.find(0)
    first = core.plan(0.0)
    core.commit(first, StepOutcome(), 0.0)
    second = core.plan(0.0)
    core.drafts.read(first, np.array([[4]]))
    assert core.commit(second, StepOutcome(), 0.0) == ([], [seq]), "its last token is certain"
    assert seq.finish_reason is FinishReason.length
    third = core.plan(0.0)
    assert third is None
    assert core.drafts.read(second, np.array([[4]])) == []
    assert core.block_pool.num_free == 100


def test_a_burst_over_the_limit_ends_the_sequence_with_the_next_commit():
    core = make_core()
    seq = core.find(0)
    plan = core.plan(0.0)
    for num_accepted, ended in ((2, []), (4, [seq])):
        core.commit(plan, StepOutcome(), 0.0)
        following = core.plan(0.0)
        assert core.drafts.read(plan, np.array([[num_accepted]])) == ended
        plan = following
    assert seq.num_output_tokens == 7
    assert seq.state is SequenceState.decoding, "for one more pass, whose tokens are discarded"
    core.commit(plan, StepOutcome(), 0.0)
    assert seq.state is SequenceState.ended


def test_the_next_commit_is_refused_until_the_acceptances_are_read():
    core = make_core()
    first = core.plan(0.0)
    core.commit(first, StepOutcome(), 0.0)
    second = core.plan(0.0)
    with pytest.raises(ValueError, match="read must be called first"):
        core.commit(second, StepOutcome(), 0.0)
    with pytest.raises(ValueError, match="the plan that was committed last"):
        core.drafts.read(second, np.array([[0]]))
    with pytest.raises(ValueError, match="from 0 to the depth"):
        core.drafts.read(first, np.array([[5]]))


def test_a_commit_of_several_iterations_needs_acceptances():
    core = make_core()
    plan = core.plan(0.0)
    with pytest.raises(ValueError, match="without acceptances: must be of 1"):
        core.commit(plan, StepOutcome(2), 0.0)
