"""Several plans in flight: what each of them holds, as vLLM's scheduler decides it with a pipeline."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.batching.sglang import Sglang
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.core.engine import EngineCore
from policies.core.plan import Cause, StepOutcome
from policies.core.request import Branching, Prompt, Request
from policies.scheduling.fcfs import Fcfs


def engine(max_batches=3, *, batching=None, caching=None, num_blocks=100, max_num_seqs=8, **given):
    return EngineCore(
        max_batches=max_batches,
        batching=batching or Chunked(max_num_batched_tokens=10),
        scheduling=Fcfs(),
        block_pool=(caching or Paged(block_size=4)).pool(KvMemory(num_blocks)),
        max_num_seqs=max_num_seqs,
        max_model_len=400,
        **given,
    )


class Line:
    """An engine, and the batches that it has in flight."""

    def __init__(self, core):
        self.core, self.batches, self.now = core, deque(), 0.0

    def add(self, request_id, num_prompt_tokens, num_output_tokens, **given):
        request = Request(request_id, self.now, Prompt(num_prompt_tokens), **given)
        return self.core.add(request, num_output_tokens)

    def fill(self):
        """Plans until no more may be in flight; returns the tokens of the new batches, by request id."""
        found = []
        while not self.core.batches.is_full and (plan := self.core.plan(self.now)) is not None:
            found.append(plan.tokens_by_request)
            self.core.batches.depart(plan)
            self.batches.append(plan)
            self.core.check_integrity()
        return found

    def end(self):
        """Commits the oldest batch; returns the ids of the requests that got their first token or ended."""
        self.now += 1.0
        prefilled, finished = self.core.commit(self.batches.popleft(), StepOutcome(), self.now)
        self.core.check_integrity()
        return [seq.request_id for seq in prefilled], [seq.request_id for seq in finished]


def test_chunks_of_one_prompt_are_in_flight_together():
    """25 tokens by a budget of 10 in 3 stages: three chunks go at once, the token comes with the third."""
    line = Line(engine())
    seq = line.add(0, 25, 2)
    assert line.fill() == [{0: 10}, {0: 10}, {0: 5}]
    assert line.core.batches.is_full
    assert [line.end(), line.end()] == [([], []), ([], [])]
    assert line.fill() == []  # nothing to schedule: the prompt is computed, its token is on its way
    assert line.end() == ([0], [])
    assert seq.num_output_tokens == 1
    assert line.fill() == [{0: 1}]


def test_only_as_many_batches_as_stages_are_in_flight():
    line = Line(engine(2))
    line.add(0, 45, 1)
    assert line.fill() == [{0: 10}, {0: 10}]
    line.end()
    assert line.fill() == [{0: 10}]


def test_a_decode_is_in_one_batch_only_and_groups_stay_together():
    """Two requests of a batch decode together ever after; a later one goes round the pipeline beside them."""
    line = Line(engine())
    line.add(0, 4, 9)
    line.add(1, 4, 9)
    assert line.fill() == [{0: 4, 1: 4}]
    line.add(2, 4, 9)
    line.end()
    assert line.fill() == [{0: 1, 1: 1, 2: 4}]
    line.end()
    line.add(3, 9, 9)
    assert line.fill() == [{0: 1, 1: 1, 2: 1, 3: 7}, {3: 2}]
    line.end()
    assert line.fill() == [{0: 1, 1: 1, 2: 1}]
    line.end()
    assert line.fill() == [{3: 1}]


def test_a_batch_is_not_cut_into_micro_batches():
    """Four short prompts at once are one batch: two of three stages stay empty, as in vLLM."""
    line = Line(engine())
    for request_id in range(4):
        line.add(request_id, 2, 3)
    assert line.fill() == [dict.fromkeys(range(4), 2)]
    line.end()
    assert line.fill() == [dict.fromkeys(range(4), 1)]


def test_a_limit_of_a_batch_spreads_requests_over_the_stages():
    """SGLang's pp_max_micro_batch_size=2."""
    line = Line(engine(max_batch_seqs=2))
    for request_id in range(7):
        line.add(request_id, 2, 3)
    assert line.fill() == [{0: 2, 1: 2}, {2: 2, 3: 2}, {4: 2, 5: 2}]
    assert line.batches[0].waits_for is Cause.slot
    line.end()
    assert line.fill() == [{0: 1, 1: 1}]


def test_requests_end_with_the_batch_of_their_last_token():
    line = Line(engine())
    line.add(0, 3, 1)
    line.add(1, 3, 2)
    line.fill()
    assert line.end() == ([0, 1], [0])
    line.fill()
    assert line.end() == ([], [1])
    assert line.core.num_unfinished == 0
    assert line.core.block_pool.num_used == 0


def test_tokens_on_their_way_are_not_held():
    line = Line(engine())
    line.add(0, 25, 3)
    line.fill()
    assert line.core.num_tokens_held == 0
    line.end()
    assert line.core.num_tokens_held == 10
    line.end()
    line.end()
    line.fill()
    assert line.core.num_tokens_held == 25
    line.end()
    assert line.core.num_tokens_held == 26


@pytest.mark.parametrize("num_ended", [0, 1, 3, 4])
def test_an_aborted_request_is_gone_at_once_and_its_batches_pass_without_it(num_ended):
    line = Line(engine())
    line.add(0, 25, 5)
    line.fill()
    for _ in range(num_ended):
        line.end()
        line.fill()
    line.core.abort(0)
    line.core.check_integrity()
    assert line.core.block_pool.num_used == 0
    line.add(1, 4, 1)
    line.fill()
    ended = []
    while line.batches:
        ended += line.end()[1]
        line.fill()
    assert ended == [1]


def test_memory_is_taken_from_those_that_are_not_in_flight():
    """9 blocks of 4: two groups decode; the one whose turn it is has to give way, none on its way does."""
    line = Line(engine(2, num_blocks=9))
    line.add(0, 10, 30)
    line.fill()
    line.add(1, 8, 20)
    line.fill()
    preempted = []
    for _ in range(60):
        if not line.batches:
            break
        line.end()
        states = set(line.core.running_set.computing)
        line.fill()
        for plan in line.batches:
            preempted += [seq.request_id for seq in plan.preempted if seq.request_id in states]
    assert preempted == []
    assert line.core.num_preemptions >= 1
    assert line.core.num_unfinished == 0


def test_only_one_batch_is_in_flight_while_requests_have_branches():
    line = Line(engine())
    line.add(0, 25, 3, branching=Branching(2))
    assert line.fill() == [{0: 10}]
    line.end()
    assert line.fill() == [{0: 10}]


def test_only_the_oldest_batch_may_be_committed():
    line = Line(engine())
    line.add(0, 25, 3)
    line.fill()
    with pytest.raises(ValueError, match="must be of one iteration of the plan that is in flight longest"):
        line.core.commit(line.batches[1], StepOutcome(), 1.0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    max_batches=st.integers(1, 5),
    num_blocks=st.integers(14, 60),
    limit=st.none() | st.integers(1, 4),
    batching=st.sampled_from(
        [
            Chunked(max_num_batched_tokens=10),
            Chunked(max_num_batched_tokens=16, long_prefill_token_threshold=6),
            PrefillFirst(max_num_batched_tokens=64),
            Sglang(max_num_batched_tokens=16),
        ]
    ),
    caching=st.sampled_from([Paged(block_size=4), PrefixCaching(block_size=4)]),
    gap=st.integers(0, 3),
)
def test_every_request_gets_its_tokens(lengths, max_batches, num_blocks, limit, batching, caching, gap):
    """Requests come while batches are in flight; no sequence is in two batches but for its chunks."""
    core = engine(
        max_batches, batching=batching, caching=caching, num_blocks=num_blocks, max_batch_seqs=limit
    )
    line, left, seqs = Line(core), deque(enumerate(lengths)), []
    for _ in range(3000):
        for _ in range(gap if left and line.batches else len(left)):
            if left:
                request_id, (prompt, output) = left.popleft()
                seqs.append((line.add(request_id, prompt, output), output))
        line.fill()
        if not line.batches:
            if left:
                gap = 1
                continue
            break
        decoding = [seq.request_id for plan in line.batches for seq in plan.decodes]
        assert len(decoding) == len(set(decoding))
        line.end()
    assert core.num_unfinished == 0
    assert core.block_pool.num_used == 0
    assert [seq.num_output_tokens for seq, _ in seqs] == [output for _, output in seqs]
