"""Transfers that name their blocks: KV is where it is read after swaps, loads from tiers, and branches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.contiguous import Contiguous
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.tiered import GIB, Tiered
from policies.core.engine import EngineCore
from policies.core.request import Branching, Prompt, Request, Segment
from policies.core.sequence import SequenceState
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from tests.policies.core.labelled_memory import BLOCK_SIZE, run_core


class Whim:
    """Takes random decisions, and sensible ones if these did nothing.

    swaps: preempted sequences go to host memory. It preempts before and after it admits, when the admitted
    ones may have found blocks that others were to compute in the same step.
    """

    def __init__(self, seed, swaps):
        self._rng = random.Random(seed)
        self._swaps = swaps

    def fill(self, view, step, now):
        rng = self._rng
        if rng.random() < 0.3:
            step.budget(rng.randint(1, 20))
        for seq in view.paused:
            if rng.random() < 0.7:
                step.resume(seq)
        if rng.random() < 0.15 and view.decoding:
            step.pause(rng.choice(list(view.decoding)))
        for seq in view.prefilling:
            if seq.state is SequenceState.prefilling and rng.random() < 0.8:
                step.prefill(seq, rng.randint(1, 9))
        if rng.random() < 0.6:
            step.decode_all()
        self._preempt(view, step, 0.2)
        for seq in view.waiting:
            if rng.random() < 0.6 and not step.admit(seq, rng.randint(1, 9)):
                break
        self._preempt(view, step, 0.3)
        self._work(view, step)
        step.repeat(rng.randint(1, 6))

    def _preempt(self, view, step, chance):
        """Preempts any running sequence, by chance."""
        running = [*view.decoding, *view.prefilling]
        if running and self._rng.random() < chance:
            step.preempt(self._rng.choice(running), swap=self._swaps and self._rng.random() < 0.8)

    def _work(self, view, step):
        """Makes sure that the step computes something if anything can be computed."""
        if not step.num_tokens:
            step.budget(99)
            for seq in view.paused:
                step.resume(seq)
            step.decode_all()
        if not step.num_tokens:
            for seq in [*view.prefilling, *view.waiting][:1]:
                verb = step.admit if seq.state is SequenceState.waiting else step.prefill
                verb(seq, seq.num_uncomputed)


def draw_requests(rng, *, num_contents=0, branching=False):
    """Draws requests, each with the output tokens after which it ends, or None.

    num_contents: prompts begin with some of so many texts, or quote an earlier prompt with its answer.
    """
    requests, past = [], []
    for request_id in range(rng.randint(3, 30)):
        segments, answer_id, branches = (), None, None
        if num_contents:
            segments = tuple(
                Segment(rng.randrange(num_contents), rng.choice([3, 4, 8, 13]))
                for _ in range(rng.randint(0, 3))
            )
            if past and rng.random() < 0.4:
                segments = rng.choice(past)
            answer_id = 1000 + request_id
        num_named = sum(segment.num_tokens for segment in segments)
        prompt = Prompt(max(1, num_named + rng.randint(0, 6)), segments, rng.choice([0, 0, 8]))
        if branching and rng.random() < 0.6:
            branches, answer_id = Branching(rng.randint(1, 4), rng.choice([None, 1, 3])), None
        answer = rng.randint(1, 14)
        if answer_id is not None and prompt.num_tokens == num_named < 40:
            past.append((*segments, Segment(answer_id, answer)))
        stop_after = answer if rng.random() < 0.8 else None
        if branches is not None and rng.random() < 0.5:
            stop_after = tuple(rng.randint(1, 14) for _ in range(branches.width))
        request = Request(
            request_id,
            0.0,
            prompt,
            rng.choice([None, 20]),
            priority=rng.randint(0, 2),
            answer_id=answer_id,
            branching=branches,
        )
        requests.append((request, stop_after))
    return requests


def draw_policies(rng, swaps):
    """Makers of a batching and of a scheduling policy."""
    mode = "swap" if swaps else "recompute"
    seed, budget, max_active = rng.randrange(2**32), rng.randint(4, 30), rng.randint(1, 3)
    if rng.random() < 0.4:
        return lambda: Whim(seed, swaps), lambda: Fcfs(preemption_mode=mode)
    batching = rng.choice([Chunked, PrefillFirst])
    scheduling = rng.choice(
        [
            lambda: Fcfs(preemption_mode=mode),
            lambda: Priority(preemption_mode=mode),
            lambda: Mlfq(quantum_tokens=4, max_active=max_active, min_free_share=0.3, preemption_mode=mode),
        ]
    )
    return lambda: batching(max_num_batched_tokens=budget), scheduling


def maker(rng, caching, num_blocks, num_swap_blocks=0):
    """Makes engines that are alike, with blocks for few sequences."""
    batching, scheduling = draw_policies(rng, swaps=num_swap_blocks > 0)
    max_num_seqs = rng.randint(4, 8)

    def make(names_blocks):
        return EngineCore(
            batching=batching(),
            scheduling=scheduling(),
            block_pool=caching.pool(KvMemory(num_blocks, 1.0)),
            max_num_seqs=max_num_seqs,
            max_model_len=60,
            num_swap_blocks=num_swap_blocks,
            names_blocks=names_blocks,
        )

    return make


SEEDS = st.integers(0, 2**32)
CACHES = {
    "paged": Paged(block_size=BLOCK_SIZE),
    "prefix": PrefixCaching(block_size=BLOCK_SIZE, max_pinned_share=0.2, pin_s=9.0),
    "radix": Radix(block_size=BLOCK_SIZE),
    "contiguous": Contiguous(block_size=BLOCK_SIZE, reserve="max_tokens"),
}


def tiered(host_blocks, disk_blocks=0, write="back", min_load_tokens=1):
    """Returns a tiered cache in which a token takes one byte."""
    return Tiered(
        block_size=BLOCK_SIZE,
        host_gib=host_blocks * BLOCK_SIZE / GIB,
        disk_gib=disk_blocks * BLOCK_SIZE / GIB,
        write=write,
        min_load_tokens=min_load_tokens,
    )


@pytest.mark.parametrize("cache", CACHES)
@given(SEEDS)
def test_kv_survives_preemption_by_swap_and_by_recomputation(cache, seed):
    rng = random.Random(seed)
    num_swap_blocks = rng.choice([0, 3, 100])
    make = maker(rng, CACHES[cache], rng.randint(16, 24), num_swap_blocks)
    requests = draw_requests(rng, num_contents=0 if cache == "paged" else 3)
    run_core(make, requests, seed, num_swap_blocks=num_swap_blocks)


@pytest.mark.parametrize("write", ["back", "through"])
@given(SEEDS)
def test_kv_survives_in_the_tiers_below(write, seed):
    rng = random.Random(seed)
    tiers = rng.choice([1, 4, 12, 100]), rng.choice([0, 0, 3, 20])
    num_swap_blocks = rng.choice([0, 0, 20])
    caching = tiered(*tiers, write, min_load_tokens=rng.choice([1, 1, 9]))
    make = maker(rng, caching, rng.randint(16, 24), num_swap_blocks)
    run_core(make, draw_requests(rng, num_contents=3), seed, num_swap_blocks=num_swap_blocks, tiers=tiers)


@pytest.mark.parametrize("cache", ["paged", "prefix", "radix"])
@given(SEEDS)
def test_kv_of_branches_survives_a_swap(cache, seed):
    rng = random.Random(seed)
    num_swap_blocks = rng.choice([6, 100, 100])
    make = maker(rng, CACHES[cache], rng.randint(40, 60), num_swap_blocks)
    requests = draw_requests(rng, num_contents=0 if cache == "paged" else 3, branching=True)
    run_core(make, requests, seed, num_swap_blocks=num_swap_blocks)
