"""Tests that iterations that run before anything is read end in the state of as many single steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.caching.pool import BlockPool, KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs
from policies.speculation import SlotRules, TokenTree
from policies.speculation.draft_lengths import Adaptive, Fixed
from policies.speculation.engine.drafts import Speculation
from tests.policies.cores import async_speculative_core, speculative_core
from tests.policies.speculation.test_engine import Any4
from tests.policies.speculation.test_late_reads import pass_seconds

CACHINGS = (None, PrefixCaching, Radix)


class Runner:
    """Runs requests of known acceptances, up to max_iterations of a plan in one launch."""

    def __init__(self, world: dict[str, Any], max_iterations: int) -> None:
        given = dict(world)
        make, caching, num_blocks, block_size = given.pop("engine")
        pool = BlockPool(num_blocks, block_size)
        if caching is not None:
            pool = caching(block_size=block_size).pool(KvMemory(num_blocks, 1.0, max_model_len=1000))
        self.requests = given.pop("requests")
        self.table = np.minimum(np.random.default_rng(given.pop("seed")).geometric(0.4, (20, 400)) - 1, 5)
        self.core = make(block_pool=pool, names_blocks=True, **given)
        self.max_iterations = max_iterations
        self.digests: list[str] = []
        self.states: list[object] = []
        self.num_launches = 0

    def run(self) -> None:
        core, requests = self.core, list(self.requests)
        while requests or core.num_unfinished or core.running:
            while requests and requests[0][0] <= core.num_iterations:
                core.add(requests.pop(0)[1])
            plan = core.plan(float(core.num_iterations))
            if plan is None:
                if not core.num_unfinished and requests:
                    requests[0] = (0, requests[0][1])
                continue
            until = requests[0][0] - core.num_iterations if requests else self.max_iterations
            limit = max(min(self.max_iterations, until), 1)
            num_iterations = core.drafts.max_iterations_of(plan, limit)
            if num_iterations > 1:
                core.reserve(plan, num_iterations)
            self.check_ids(plan)
            accepted = self.accepted(plan, num_iterations)
            for iteration in range(num_iterations):
                self.states.append(self.state_of(plan, accepted[:iteration].sum(axis=0) + iteration))
            core.commit(plan, StepOutcome(num_iterations, accepted=accepted), float(core.num_iterations))
            self.num_launches += 1
            core.check_integrity()
        assert core.block_pool.num_free == core.block_pool.num_blocks

    def check_ids(self, plan: Any) -> None:
        """Checks that every block of a decoding sequence has an id that no other sequence has."""
        core = self.core
        owned: list[int] = []
        for seq in plan.drafts.seqs:
            num_blocks = int(core.drafts.decodes.blocks_S[seq.slot])
            ids = core.block_ids(seq, num_blocks * core.block_pool.block_size)
            assert len(ids) == num_blocks
            owned += set(ids) - set(owned) if core.block_pool.finds_kv else ids
        assert len(set(owned)) == len(owned)
        assert not owned or max(owned) <= core.block_pool.num_blocks

    def accepted(self, plan: Any, num_iterations: int) -> np.ndarray:
        drafts = plan.drafts
        place = np.array([seq.num_output_tokens for seq in drafts.seqs], np.int64)
        rows = np.array([seq.request_id for seq in drafts.seqs], np.int64)
        accepted = np.zeros((num_iterations, len(rows)), np.int64)
        for iteration in range(num_iterations):
            accepted[iteration] = np.minimum(self.table[rows, place], drafts.depth)
            place = place + accepted[iteration] + 1
        return accepted

    @staticmethod
    def state_of(plan: Any, num_more: np.ndarray) -> object:
        """Returns the tokens of each decoding sequence before an iteration, and its draft tokens."""
        drafts = plan.drafts
        computed = (drafts.num_computed + num_more).tolist() if drafts.seqs else []
        ids = [seq.request_id for seq in drafts.seqs]
        chunks = [(chunk.seq.request_id, chunk.num_cached, chunk.num_tokens) for chunk in plan.chunks]
        return list(zip(ids, computed, drafts.num_drafts.tolist(), strict=True)), chunks


@st.composite
def worlds(draw: Any) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_drafts = draw(st.integers(1, 5))
    rules = SlotRules(draw(st.booleans()), draw(st.integers(0, 1)))
    tree = draw(st.sampled_from([None, None, TokenTree.of_widths([2, 2]), TokenTree.of_widths([3, 1, 1])]))
    proposer = Any4(num_drafts if tree is None else tree.num_nodes, tree, rules)
    length = draw(st.sampled_from([Fixed(), Adaptive(interval=5)]))
    requests = []
    for request_id in range(draw(st.integers(1, 12))):
        num_tokens = draw(st.integers(1, 40))
        prompt = Prompt(num_tokens, (Segment(request_id % 3, num_tokens),))
        max_tokens = draw(st.integers(1, 120))
        requests.append((draw(st.integers(0, 60)), Request(request_id, 0.0, prompt, max_tokens)))
    num_blocks = draw(st.integers(200 // block_size + 20, 500 // block_size + 40))
    make = draw(st.sampled_from([speculative_core, async_speculative_core]))
    return {
        "engine": (make, draw(st.sampled_from(CACHINGS)), num_blocks, block_size),
        "speculation": Speculation(proposer=proposer, draft_length=length, estimate=pass_seconds),
        "batching": Chunked(max_num_batched_tokens=draw(st.sampled_from([64, 256]))),
        "scheduling": Fcfs(),
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_model_len": draw(st.sampled_from([128, 1000])),
        "requests": sorted(requests, key=lambda each: each[0]),
        "seed": draw(st.integers(0, 1000)),
    }


@given(worlds())
def test_reserved_iterations_equal_single_steps(world):
    single, several = Runner(world, 1), Runner(world, 7)
    single.run()
    several.run()
    assert several.states == single.states


def make_core(**settings: Any) -> EngineCore:
    """Returns an engine with one sequence that decodes."""
    core = speculative_core(
        speculation=Speculation(proposer=Any4(), draft_length=Fixed()),
        batching=Chunked(max_num_batched_tokens=64),
        scheduling=Fcfs(),
        block_pool=BlockPool(settings.get("num_blocks", 100), 4),
        max_num_seqs=4,
        max_model_len=1000,
    )
    core.add(Request(0, 0.0, Prompt(8), settings.get("max_tokens", 50)))
    core.commit(core.plan(0.0), StepOutcome(accepted=np.zeros((1, 0), np.int64)), 0.0)
    core.commit(core.plan(0.0), StepOutcome(accepted=np.array([[0]])), 0.0)
    return core


def test_as_many_iterations_as_are_safe_if_all_drafts_are_accepted():
    core = make_core()
    assert core.drafts.max_iterations_of(core.plan(0.0), 6) == 6
    core = make_core(max_tokens=15)
    assert core.drafts.max_iterations_of(core.plan(0.0), 6) == 3, "2 of 15 tokens, and 5 in each pass"
    core = make_core(num_blocks=6)
    assert core.drafts.max_iterations_of(core.plan(0.0), 6) == 3, "9 of 24 slots, and 5 in each pass"


def test_blocks_that_were_not_needed_are_free_after_the_commit():
    core = make_core()
    plan = core.plan(0.0)
    assert core.drafts.max_iterations_of(plan, 3) == 3
    core.reserve(plan, 3)
    (seq,) = plan.drafts.seqs
    assert core.block_pool.num_used == len(core.block_ids(seq, 9 + 15)) == 6
    with pytest.raises(ValueError, match="must be 3, as reserved"):
        core.commit(plan, StepOutcome(2, accepted=np.array([[0], [0]])), 0.0)
    core.commit(plan, StepOutcome(3, accepted=np.array([[0], [1], [0]])), 0.0)
    assert seq.num_computed == 9 + 4
    assert core.block_pool.num_used == 5, "the last pass had rows up to slot 12 + 5"
    assert len(seq.block_ids) == 5
    core.abort(0)
    assert core.block_pool.num_free == 100
