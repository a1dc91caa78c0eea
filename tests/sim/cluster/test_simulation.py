"""Whole runs: nothing is lost, every request is served, the same seed gives the same bytes."""

import signal
from collections import Counter
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.conformance.draws import draw_worlds
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.routing.load_balancing import LeastOutstanding, RoundRobin
from policies.scheduling.fcfs import Fcfs
from tests.examples import examples

TICK_S = 0.125
STATUSES = {"finished", "rejected", "aborted", "unfinished"}


def assert_tokens_are_conserved(records):
    """Checks that every produced token is in an answer and that all but an answer's first ended a gap."""
    requests, iterations = records.requests, records.iterations
    sampled = requests.output_tokens.sum() + records.num_discarded_tokens
    assert iterations.sampled_seqs.sum() == sampled
    begun = requests[requests.output_tokens > 0]
    assert records.gap_count.sum() == begun.output_tokens.sum() - len(begun)
    spans_s = (begun.last_token_s - begun.first_token_s).sum()
    assert np.dot(records.gap_s, records.gap_count) == pytest.approx(spans_s, rel=1e-9, abs=1e-9)


@given(data=st.data())
def test_no_request_and_no_token_is_lost(data, worlds):
    world = data.draw(worlds)
    run = world.simulate()
    records, requests = run.records, run.records.requests
    counts = Counter(requests.status)
    assert set(counts) <= STATUSES
    assert requests.request_id.is_unique
    assert len(run.source.ends) == counts.total() - counts["unfinished"]
    assert len({request_id for request_id, _, _ in run.source.ends}) == len(run.source.ends)
    if world.until_s is None:
        assert requests.request_id.tolist() == list(range(len(world.asks)))
        assert counts["unfinished"] == 0
        assert all(core.block_pool.num_used == 0 and core.num_unfinished == 0 for core in run.cores)
    assert_tokens_are_conserved(records)


@given(data=st.data())
def test_times_of_a_request_are_in_order(data, worlds):
    records = data.draw(worlds).simulate().records
    requests = records.requests
    stations = ["arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s"]
    for times_s in requests[stations].to_numpy():
        known = times_s[~np.isnan(times_s)]
        assert (np.diff(known) >= 0).all()
        assert (known <= records.end_s).all()
    assert (requests.scheduled_s.isna() <= requests.first_token_s.isna()).all()
    assert (requests.first_token_s.isna() == (requests.output_tokens == 0)).all()
    assert (requests.last_token_s.isna() == (requests.output_tokens == 0)).all()
    assert (requests.finished_s.isna() == (requests.status == "unfinished")).all()


@given(data=st.data())
def test_iterations_follow_each_other_within_the_limits(data, worlds):
    world = data.draw(worlds)
    records = world.simulate().records
    for _, rows in records.iterations.groupby("replica"):
        assert rows.iteration.tolist() == list(range(len(rows)))
        ends_s = rows.start_s + rows.duration_s
        assert (rows.start_s.to_numpy()[1:] >= ends_s.to_numpy()[:-1] - 1e-9).all()
        # Behind the last end, asynchronous scheduling may decode a token that is discarded.
        assert (rows.start_s if world.plans_ahead else ends_s).max() <= records.end_s + 1e-9
        assert (rows.duration_s > 0).all()
        assert (rows.running <= world.max_num_seqs).all()
        assert (rows.kv_blocks_used <= world.num_blocks).all()
        if isinstance(world.caching, Paged):  # else two sequences may hold the same block
            assert (rows.kv_tokens_used <= rows.kv_blocks_used * world.caching.block_size).all()
        if isinstance(world.batching, Chunked):
            assert (rows.decode_seqs + rows.prefill_tokens <= world.batching.max_num_batched_tokens).all()


@given(data=st.data())
def test_no_request_starves_and_every_answer_has_its_length(data):
    """First come, first served, without time limit or impatience: all that can be served are, to the end."""
    world = data.draw(draw_worlds(schedulings=st.just(Fcfs())))
    world = type(world)(**(vars(world) | {"until_s": None, "patience_s": None, "num_users": None}))
    records = world.simulate().records
    asks = sorted(world.asks, key=lambda ask: ask.arrival_s)
    memory = KvMemory(world.num_blocks, 1.0, max_model_len=world.max_model_len)
    kv_room = world.caching.pool(memory).max_tokens_per_seq
    for row, ask in zip(records.requests.itertuples(), asks, strict=True):
        prompt = ask.num_prompt_tokens
        if prompt >= world.max_model_len or prompt > kv_room:
            assert (row.status, row.output_tokens) == ("rejected", 0)
            continue
        limit = min(ask.max_tokens or inf, world.max_model_len - prompt, kv_room + 1 - prompt)
        assert (row.status, row.output_tokens) == ("finished", min(ask.num_output_tokens, limit))
        assert row.reason == ("length" if ask.num_output_tokens > limit else "")


@examples(8, 15)
@given(data=st.data())
def test_the_same_world_gives_the_same_bytes(data, worlds, tmp_path_factory):
    world = data.draw(worlds)
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "other"):
        records = world.simulate().records
        records.requests.to_parquet(folder / f"{name}.requests")
        records.iterations.to_parquet(folder / f"{name}.iterations")
    for table in ("requests", "iterations"):
        assert (folder / f"one.{table}").read_bytes() == (folder / f"other.{table}").read_bytes()


def test_a_prompt_that_never_fits_is_rejected_and_the_run_goes_on(make_world, ask):
    records = make_world(ask(0.0, 4, 5), ask(0.1, 81, 5), ask(0.2, 4, 5), num_blocks=20).simulate().records
    assert records.requests.status.tolist() == ["finished", "rejected", "finished"]
    assert records.requests.reason[1] == "prompt of 81 tokens: the KV cache holds at most 80 per sequence"
    assert records.requests.finished_s[1] == 0.1


def test_round_robin_sends_to_one_after_the_other(make_world, ask):
    world = make_world(*[ask(0.0, 4, 3)] * 7, num_replicas=3, routing=RoundRobin())
    assert world.simulate().records.requests.replica.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_least_outstanding_sends_to_the_replica_with_the_fewest_requests(make_world, ask):
    """0: 9 ticks on replica 0. 1: 2 ticks on 1. 2: a tie, to 0. 3: to 1. Request 1 has ended when 4 comes."""
    arrivals_and_answers = [(0.0, 9), (0.0, 2), (1.0, 9), (1.0, 9), (2.0, 9), (3.0, 9)]
    asks = [ask(ticks * TICK_S, 4, answer) for ticks, answer in arrivals_and_answers]
    world = make_world(*asks, num_replicas=2, routing=LeastOutstanding())
    assert world.simulate().records.requests.replica.tolist() == [0, 1, 0, 1, 1, 0]


def test_a_closed_loop_sends_on_when_a_request_ends(make_world, ask):
    """Two users, an iteration a tick, think time two ticks; a rejection counts as an end."""
    asks = [ask(0.0, 4, 3), ask(0.0, 99, 1), ask(0.0, 4, 2), ask(0.0, 4, 1), ask(0.0, 4, 1)]
    world = make_world(*asks, num_blocks=20, num_users=2, think_s=2 * TICK_S)
    run = world.simulate()
    requests = run.records.requests
    # 1 is rejected at 0 -> 2 arrives at 2, when 0 is decoding, ends at 4; 0 ends at 3 -> 3 at 5; 4 at 6.
    assert requests.arrival_s.tolist() == [0.0, 0.0, 2 * TICK_S, 5 * TICK_S, 6 * TICK_S]
    assert run.source.ends == [
        (1, 0.0, 0),
        (0, 3 * TICK_S, 3),
        (2, 4 * TICK_S, 2),
        (3, 6 * TICK_S, 1),
        (4, 7 * TICK_S, 1),
    ]


@pytest.mark.parametrize("patience_s", [None, 99.0])
def test_a_run_ends_with_the_last_thing_that_happened(make_world, ask, patience_s):
    """Leaps that were cut and clients that were answered leave timers behind, which do not prolong it."""
    world = make_world(ask(0.0, 4, 9), ask(4.5 * TICK_S, 4, 2), patience_s=patience_s)
    assert world.simulate().records.end_s == 9 * TICK_S
    world = make_world(ask(0.0, 4, 900), ask(0.0, 4, 900), patience_s=5 * TICK_S)
    assert world.simulate().records.end_s == 5 * TICK_S


def test_a_run_reports_its_progress(make_world, ask):
    reports = []
    make_world(*[ask(0.0, 4, 3)] * 5).simulate(report=lambda now, num_ended: reports.append((now, num_ended)))
    assert reports[-1] == (3 * TICK_S, 5)


class InterruptedRouting:
    """Raises KeyboardInterrupt while the third request is being routed."""

    def __init__(self):
        self._num_routed = 0

    def choose(self, request, replicas, now):
        self._num_routed += 1
        if self._num_routed == 3:
            signal.raise_signal(signal.SIGINT)
        return 0


def test_ctrl_c_leaves_the_records_so_far(make_world, ask):
    """At 4.5 ticks: four iterations have ended, in the middle of a leap; the fifth is lost."""
    asks = [ask(0.0, 4, 2), ask(0.0, 4, 30), ask(4.5 * TICK_S, 4, 30), ask(9.0 * TICK_S, 4, 30)]
    records = make_world(*asks, routing=InterruptedRouting()).simulate().records
    assert records.interrupted
    assert records.end_s == 4.5 * TICK_S
    assert records.requests.status.tolist() == ["finished", "unfinished", "unfinished"]
    assert records.requests.output_tokens.tolist() == [2, 4, 0]
    assert len(records.iterations) == 4
    assert_tokens_are_conserved(records)
    assert not make_world(*asks).simulate().records.interrupted


@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5])
def test_ctrl_c_never_tears_an_iteration_apart(make_world, ask, moment):
    """Two answers end in one iteration and three in another; Ctrl-C comes while the simulation tells of one
    of them. What is recorded is whole iterations.
    """

    def ctrl_c(num_ended):
        if num_ended == moment:
            signal.raise_signal(signal.SIGINT)

    world = make_world(*[ask(0.0, 4, 3)] * 2, *[ask(0.0, 4, 6)] * 3, ask(9.0, 4, 6), on_end=ctrl_c)
    records = world.simulate().records
    assert records.interrupted
    assert_tokens_are_conserved(records)


def test_rejects_a_cluster_without_replicas(make_world, ask):
    with pytest.raises(ValueError, match="replicas=0: must be >= 1"):
        make_world(ask(0.0, 4, 3), num_replicas=0).simulate()


@pytest.mark.parametrize("until_s", [0.0, -1.0, float("nan")])
def test_rejects_a_time_limit_that_is_no_time(make_world, ask, until_s):
    with pytest.raises(ValueError, match=f"until_s={until_s}: must be a finite number > 0 s"):
        make_world(ask(0.0, 4, 3), until_s=until_s).simulate()
