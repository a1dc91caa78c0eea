"""Any policy made of the step's methods, however foolish: no block leaked, no token lost, counters right."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.core.plan import StepOutcome
from policies.core.sequence import SequenceState

BLOCK_SIZE = 4


class Whim:
    """Takes random decisions, and sensible ones if these did nothing."""

    def __init__(self, rng):
        self._rng = rng

    def fill(self, view, step, now):
        rng = self._rng
        if rng.random() < 0.5:
            step.budget(rng.randint(1, 20))
        if rng.random() < 0.5:
            step.decode_all()
        elif rng.random() < 0.8:
            for seq in view.decoding:
                if seq.state is SequenceState.decoding and rng.random() < 0.7:
                    step.decode(seq)
        for seq in view.prefilling:
            if seq.state is SequenceState.prefilling and rng.random() < 0.8:
                step.prefill(seq, rng.randint(1, 9))
        for seq in view.waiting:
            if rng.random() < 0.5 and not step.admit(seq, rng.randint(1, 9)):
                break
        if rng.random() < 0.1 and view.num_running:
            step.preempt(rng.choice([*view.decoding, *view.prefilling]))
        self._work(view, step)

    def _work(self, view, step):
        """Makes sure that the step computes something if anything can be computed."""
        if not step.num_tokens:
            step.decode_all()
        if not step.num_tokens and not view.num_decoding:
            for seq in [*view.prefilling, *view.waiting][:1]:
                verb = step.admit if seq.state is SequenceState.waiting else step.prefill
                verb(seq, seq.num_uncomputed)


class Naive:
    """A naive model of the engine's sequences, counted one by one, iteration by iteration."""

    def __init__(self):
        self.computed, self.known, self.end = {}, {}, {}

    def add(self, seq, num_prompt_tokens, answer):
        self.computed[seq.request_id] = 0
        self.known[seq.request_id] = num_prompt_tokens
        self.end[seq.request_id] = num_prompt_tokens + answer

    def run(self, tokens_by_request):
        """Runs one iteration; returns the requests that ended."""
        ended = []
        for request_id, num_tokens in tokens_by_request.items():
            self.computed[request_id] += num_tokens
            assert self.computed[request_id] <= self.known[request_id]
            if self.computed[request_id] == self.known[request_id]:
                self.known[request_id] += 1
                if self.known[request_id] == self.end[request_id]:
                    ended.append(request_id)
        return ended

    def blocks_due(self, members, iteration):
        """Counts the decodes that need a new block in that iteration after the next one."""
        return sum((self.computed[request_id] + iteration) % BLOCK_SIZE == 0 for request_id in members)


def check_decode_set(core, naive):
    decodes = core.decodes
    members = {seq.request_id: seq for seq in decodes}
    assert all(seq in decodes for seq in members.values())
    assert decodes.size == len(members)
    assert decodes.num_context_tokens == sum(naive.computed[request_id] for request_id in members)
    num_computed_S = {seq.slot: naive.computed[request_id] for request_id, seq in members.items()}
    assert {slot: n for slot, n in enumerate(decodes.num_computed_S.tolist()) if n} == num_computed_S
    due = [naive.blocks_due(members, iteration) for iteration in range(12)]
    assert decodes.blocks_due() == due[0]
    for skipped in range(3):
        for num_iterations in range(10):
            expected = sum(due[skipped : skipped + num_iterations])
            assert decodes.blocks_due_after(skipped, num_iterations) == expected
    if members:
        first_end = min(naive.end[request_id] - naive.known[request_id] for request_id in members)
        assert decodes.iterations_to_first_event() == first_end


def check_block_ids(core, plan):
    """Checks that all block ids are in range, have one owner each, and are as many as the pool counts.

    Blocks of planned tokens are included.
    """
    tokens, owners = plan.tokens_by_request, Counter()
    for seq in core.running.values():
        owners.update(core.block_ids(seq, seq.num_computed + tokens.get(seq.request_id, 0)))
    assert all(count == 1 for count in owners.values()), "a block is owned twice"
    assert set(owners) <= set(range(1, core.block_pool.num_blocks + 1))
    assert len(owners) == core.block_pool.num_used, "a block is leaked"


@given(st.integers(0, 2**32), st.booleans())
def test_any_policy_conserves_blocks_and_tokens(make_core, make_request, seed, presume_cached):
    rng = random.Random(seed)
    num_blocks = rng.randint(4, 14)
    core = make_core(
        batching=Whim(rng),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.randint(1, 6),
        presume_cached=presume_cached,
    )
    naive = Naive()
    num_requests = finished = aborted = 0
    for _ in range(80):
        if rng.random() < 0.25:
            num_prompt_tokens, answer = rng.randint(1, 12), rng.randint(1, 5)
            knows_end = rng.random() < 0.7
            seq = core.add(
                make_request(num_requests, num_prompt_tokens), stop_after=answer if knows_end else None
            )
            room = num_blocks * BLOCK_SIZE + 1 - num_prompt_tokens
            naive.add(seq, num_prompt_tokens, min(answer, room) if knows_end else room)
            num_requests += 1
        if core.num_unfinished and rng.random() < 0.05:
            aborted += 1
            core.abort(rng.choice([seq.request_id for seq in core.unfinished]))
        plan = core.plan(0.0)
        if plan is None:
            continue
        for seq in plan.preempted:
            naive.computed[seq.request_id] = 0
        if presume_cached:
            for seq in plan.admitted:
                naive.computed[seq.request_id] = (seq.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        check_block_ids(core, plan)
        assert plan.num_decode_context_tokens == sum(seq.num_known for seq in plan.decodes)
        ended = naive.run(plan.tokens_by_request)
        stopped = [seq for seq in plan.decodes if rng.random() < 0.05]
        _, ended_now = core.commit(plan, StepOutcome(1, tuple(stopped)), 0.0)
        assert {s.request_id for s in ended_now} == set(ended) | {s.request_id for s in stopped}
        assert len(set(ended_now)) == len(ended_now)
        finished += len(ended_now)
        core.check_integrity()
        check_decode_set(core, naive)
        for seq in core.unfinished:
            assert (seq.num_computed, seq.num_known) == (
                naive.computed[seq.request_id],
                naive.known[seq.request_id],
            )
        assert core.num_tokens_held == sum(seq.num_computed for seq in core.running.values())
    assert num_requests == finished + aborted + core.num_unfinished


@given(st.integers(0, 2**32))
def test_a_plan_may_be_left_after_any_iteration_of_its_horizon(make_core, make_request, seed):
    """Two engines, one stepping, one leaping a random part of each horizon: the same sequences throughout."""
    rng = random.Random(seed)
    settings = {
        "num_blocks": rng.randint(6, 16),
        "batching": Chunked(max_num_batched_tokens=rng.randint(2, 9)),
    }
    leaping, stepping = make_core(**settings), make_core(**settings)
    for request_id in range(30):
        num_prompt_tokens, answer = rng.randint(1, 20), rng.randint(1, 20)
        for core in (leaping, stepping):
            core.add(make_request(request_id, num_prompt_tokens), stop_after=answer)
        for _ in range(rng.randint(1, 4)):
            plan = leaping.plan(0.0)
            if plan is None:
                break
            num_iterations = rng.randint(1, plan.horizon)
            for _ in range(num_iterations):
                step = stepping.plan(0.0)
                assert step.tokens_by_request == plan.tokens_by_request
                check_block_ids(stepping, step)
                stepping.commit(step, StepOutcome(), 0.0)
            leaping.commit(plan, StepOutcome(num_iterations), 0.0)
            leaping.check_integrity()
            shown = [
                [
                    (seq.request_id, seq.state, seq.slot, seq.num_computed, seq.num_known)
                    for seq in core.unfinished
                ]
                for core in (leaping, stepping)
            ]
            assert shown[0] == shown[1]
            assert leaping.block_pool.num_free == stepping.block_pool.num_free
