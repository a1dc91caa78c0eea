"""Records of a run, against a schedule worked out on paper."""

import numpy as np
import pytest

from policies.batching.chunked import Chunked
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from sim.records.iterations import IterationLog
from sim.records.run import expanded


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def three(request, make_world, ask, toy_model):
    """Simulates the schedule of tests/policies/batching/test_batching.py at one iteration per second.

    Budget 6, five blocks of 4 tokens; A: prompt 5, answer 6; B: 6, 4; C: 3, 3.
    """
    return make_world(
        *[ask(0.0, 5, 6), ask(0.0, 6, 4), ask(0.0, 3, 3)],
        batching=Chunked(max_num_batched_tokens=6),
        caching=Paged(block_size=4),
        num_blocks=5,
        model=toy_model(tick_s=1.0, flat=True),
    ).simulate(leap=request.param)


def test_requests_have_the_times_worked_out_on_paper(three):
    """A decodes in every iteration from the second to the sixth; B and C return in the next two."""
    requests = three.records.requests
    assert requests.request_id.tolist() == [0, 1, 2]
    assert requests.status.tolist() == ["finished"] * 3
    assert requests.scheduled_s.tolist() == [0.0, 0.0, 2.0]
    assert requests.first_token_s.tolist() == [1.0, 2.0, 3.0]
    assert requests.last_token_s.tolist() == [6.0, 8.0, 9.0]
    assert requests.finished_s.tolist() == [6.0, 8.0, 9.0]
    assert requests.output_tokens.tolist() == [6, 4, 3]
    assert requests.preemptions.tolist() == [0, 1, 1]


def test_iterations_have_the_shapes_worked_out_on_paper(three):
    """Pairs of n new tokens behind c cached ones: n c + n (n + 1) / 2."""
    iterations = three.records.iterations
    expected = {
        "iteration": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "start_s": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "duration_s": [1] * 9,
        "running": [2, 2, 3, 3, 1, 1, 1, 2, 1],
        "waiting": [1, 1, 0, 0, 2, 2, 1, 0, 0],
        "preempted": [0, 0, 0, 0, 2, 0, 0, 0, 0],
        "kv_blocks_used": [3, 4, 5, 5, 3, 3, 2, 4, 2],
        "kv_tokens_used": [6, 12, 17, 20, 9, 10, 6, 12, 5],
        "decode_seqs": [0, 1, 2, 3, 1, 1, 0, 0, 0],
        "decode_context_tokens": [0, 6, 14, 20, 9, 10, 0, 0, 0],
        "prefill_seqs": [2, 1, 1, 0, 0, 0, 1, 2, 1],
        "prefill_tokens": [6, 5, 3, 0, 0, 0, 6, 6, 2],
        "prefill_pairs": [15 + 1, 5 + 15, 6, 0, 0, 0, 21, 18 + 6 + 6, 6 + 3],
        "prefill_context_tokens": [6, 6, 3, 0, 0, 0, 6, 9 + 3, 5],
        "sampled_seqs": [1, 2, 3, 3, 1, 1, 0, 1, 1],
    }
    assert {name: iterations[name].tolist() for name in expected} == expected


def test_gaps_span_the_absence_of_a_preempted_sequence(three, list_gaps):
    """B's tokens come at 2, 3, 4, 8 and C's at 3, 4, 9."""
    tokens_s = [[1, 2, 3, 4, 5, 6], [2, 3, 4, 8], [3, 4, 9]]
    expected = [
        (float(gap), float(end)) for s in tokens_s for gap, end in zip(np.diff(s), s[1:], strict=True)
    ]
    assert list_gaps(three.records) == sorted(expected)


def test_gaps_span_the_stalls_behind_prompts(make_world, ask, toy_model, list_gaps):
    """Prefill first, budget 4: A's first token comes at 1, B's at 2, and from then on both decode."""
    world = make_world(
        *[ask(0.0, 4, 3), ask(0.0, 4, 2)],
        batching=PrefillFirst(max_num_batched_tokens=4),
        model=toy_model(tick_s=1.0, flat=True),
    )
    assert list_gaps(world.simulate().records) == [(1.0, 3.0), (1.0, 4.0), (2.0, 3.0)]


def test_gaps_of_an_idle_sequence_grow_until_its_turn(make_world, ask, toy_model, list_gaps):
    """A policy that decodes one sequence at a time, the shorter one. A's tokens come at 1, 2, 4, 6 and B's at
    1, 3, 5.
    """

    class OneByOne:
        def fill(self, view, step, now):
            for seq in sorted(view.decoding, key=lambda seq: (seq.num_known, seq.request_id))[:1]:
                step.decode(seq)
            for seq in view.waiting:
                step.admit(seq, 99)

    world = make_world(
        *[ask(0.0, 4, 4), ask(0.0, 4, 3)], batching=OneByOne(), model=toy_model(tick_s=1.0, flat=True)
    )
    assert list_gaps(world.simulate().records) == [(1.0, 2.0), (2.0, 3.0), (2.0, 4.0), (2.0, 5.0), (2.0, 6.0)]


def test_times_that_did_not_happen_are_missing(make_world, ask):
    """A prompt that never fits, one still in the queue at the end, one whose prompt is under way."""
    world = make_world(
        *[ask(0.0, 99, 5), ask(0.0, 8, 5), ask(0.0, 8, 5)], num_blocks=20, max_num_seqs=1, until_s=0.1
    )
    requests = world.simulate().records.requests
    assert requests.status.tolist() == ["rejected", "unfinished", "unfinished"]
    assert requests.reason.tolist()[0] == "prompt of 99 tokens: the KV cache holds at most 80 per sequence"
    assert requests.scheduled_s.isna().tolist() == [True, False, True]
    assert requests.first_token_s.isna().all()
    assert requests.last_token_s.isna().all()
    assert requests.finished_s.isna().tolist() == [False, True, True]
    assert requests.output_tokens.tolist() == [0, 0, 0]


def test_an_answer_cut_by_a_limit_says_so(make_world, ask):
    world = make_world(ask(0.0, 4, 9, max_tokens=5), ask(0.0, 4, 5), ask(0.0, 4, 999), max_model_len=20)
    requests = world.simulate().records.requests
    assert requests.output_tokens.tolist() == [5, 5, 16]
    assert requests.reason.tolist() == ["length", "", "length"]


def test_a_replica_that_never_ran_leaves_no_iterations(make_world, ask):
    records = make_world(ask(0.0, 4, 5), num_replicas=3).simulate().records
    assert set(records.iterations.replica) == {0}
    assert records.num_replicas == 3


def test_a_run_without_requests_leaves_empty_tables(make_world):
    records = make_world().simulate().records
    assert len(records.requests) == len(records.iterations) == len(records.gap_s) == 0
    assert records.end_s == 0.0


def test_the_logs_of_all_replicas_make_one_table_and_are_taken_from_their_list():
    logs = [IterationLog(0, 16), IterationLog(1, 16)]
    logs[0].add_gap(7, 0.75, 1.0)
    logs[1].add_gap(8, 1.5, 2.0)
    logs[1].add_gap(7, 2.25, 3.0)
    own_columns, _ = expanded([IterationLog(0, 16)])
    columns, gaps = expanded(logs)
    assert logs == []
    assert {name: column.dtype for name, column in columns.items()} == {
        name: column.dtype for name, column in own_columns.items()
    }
    assert [part.tolist() for part in gaps] == [[0.25, 0.5, 0.75], [1, 1, 1], [1.0, 2.0, 3.0]]


def test_a_replica_that_serves_no_adapters_used_none():
    columns, _ = expanded([IterationLog(0, 16), IterationLog(1, 16, serves_adapters=True)])
    assert "adapter_tokens" in columns
    assert "adapter_tokens" not in expanded([IterationLog(0, 16)])[0]
