"""Prompts computed in one replica, answers decoded in another: times by hand, and nothing lost or leaked."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.toys import TICK_S
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.registry import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.prediction.oracle_with_noise import OracleWithNoise
from policies.roles import Switch
from policies.roles.balance import Balance
from policies.routing.length_aware import LengthAware
from sim.cluster.failures import Failures, Scripted
from sim.engine.links import Links
from sim.metrics.summary import check_conservation
from sim.metrics.transfers import transferred
from sim.records.event_table import events_table
from sim.records.failure import FailureKind
from sim.transfer.kv_transfers import KvTransferSettings
from sim.workload.retries import Retries
from tests.sim.metrics.figures_of import transfer_use
from tests.worlds.services import (
    Service,
    draw_adapter_services,
    draw_failing_services,
    draw_services,
    toy_network,
)


@given(service=draw_services())
def test_leap_equals_step(service):
    check_conservation(assert_leap_equals_step(service).records)


@given(service=draw_failing_services())
def test_leap_equals_step_when_replicas_crash_and_clients_try_again(service):
    check_conservation(assert_leap_equals_step(service).records)


@given(service=draw_adapter_services())
def test_leap_equals_step_with_adapters(service):
    check_conservation(assert_leap_equals_step(service).records)


@dataclass
class Counting:
    """Round robin that counts: the end of each chosen request is reported once, and only then."""

    turn: int = 0
    under_way: Counter = field(default_factory=Counter)

    def choose(self, request, replicas, now):
        self.turn += 1
        self.under_way[request.request_id] += 1
        assert self.under_way[request.request_id] == 1, "chosen again before its end was reported"
        return self.turn % len(replicas)

    def on_first_token(self, request, now):
        assert self.under_way[request.request_id] == 1, "its end was reported before its first token"

    def on_end(self, request, now):
        self.under_way[request.request_id] -= 1
        assert self.under_way[request.request_id] == 0, "an end was reported twice"


@given(service=draw_failing_services())
def test_the_router_gets_one_end_for_each_time_that_it_has_chosen(service):
    records = replace(service, routing=Counting()).simulate().records
    check_conservation(records)
    assert records.requests.request_id.is_unique


def test_a_retry_is_not_reported_as_ended_when_its_former_prefill_replica_lets_go(ask):
    """The decode replica has room for two. The third request times out there, while its prefill replica is
    in the middle of a chunk of the fifth, and comes again to the other one before that chunk ends.
    """
    service = Service(
        asks=[
            ask(0.0, 4, 10),
            ask(0.0, 4, 10),
            ask(0.5 * TICK_S, 4, 4),
            ask(5.0 * TICK_S, 4, 4),
            ask(5.1 * TICK_S, 40, 4),
        ],
        num_prefill=2,
        max_num_seqs=2,
        prefill_batching=Chunked(max_num_batched_tokens=4),
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at="decode"),
        retries=Retries(
            timeout_s=8.0 * TICK_S, base_s=0.05 * TICK_S, jitter="none", timeout_until="first_token"
        ),
        routing=Counting(),
    )
    requests = service.simulate().records.requests
    assert requests.tries.tolist() == [1, 1, 2, 2, 4]
    assert requests.status.tolist() == ["finished"] * 4 + ["rejected"]


AT_END = KvTransferSettings(transfer="at_end")


def run_world(*asks, **given):
    records = assert_leap_equals_step(Service(asks=asks, **given)).records
    check_conservation(records)
    return records


def ticks(records, *names):
    """Times of all requests, in ticks."""
    return [tuple(row[f"{name}_s"] / TICK_S for name in names) for _, row in records.requests.iterrows()]


TIMES = ("first_token", "last_token", "kv_transfer")


def test_one_request_by_hand(ask):
    """8 prompt tokens at tick 1: computed by tick 2; 8 tokens of KV at 4 a tick: there at 4; then 3 ticks."""
    records = run_world(ask(TICK_S, 8, 4), kv_transfer=AT_END)
    assert ticks(records, *TIMES, "finished") == [(2, 7, 2, 7)]
    (row,) = records.requests.itertuples()
    assert (row.replica, row.prefill_replica, row.output_tokens, row.kv_transfer_bytes) == (1, 0, 4, 8)
    assert sorted(zip(records.gap_s / TICK_S, records.gap_count, strict=True)) == [(1, 1), (1, 1), (3, 1)]


def test_the_first_token_may_go_out_with_the_kv(ask):
    """TTFT then includes the transfer, the next gap does not."""
    late = KvTransferSettings(transfer="at_end", first_token_at="decode")
    records = run_world(ask(TICK_S, 8, 4), kv_transfer=late)
    assert ticks(records, *TIMES) == [(4, 7, 2)]
    assert set(records.gap_s / TICK_S) == {1}


@pytest.mark.parametrize(
    ("tokens_per_tick", "num_layers", "left_ticks"),
    [
        (4, 4, 1),  # 8 tokens, 4 of which the link carries while the prompt is computed, in one tick
        (4, 1, 2),  # one layer: nothing can go ahead
        (100, 4, 0.02),  # a fast link: a layer's quarter is left
    ],
)
def test_layer_by_layer_kv_is_sent_during_the_prefill(ask, tokens_per_tick, num_layers, left_ticks):
    records = run_world(
        ask(TICK_S, 8, 4),
        kv_transfer=KvTransferSettings(transfer="layerwise"),
        network=toy_network(tokens_per_tick),
        num_layers=num_layers,
    )
    assert ticks(records, "kv_transfer") == [(pytest.approx(left_ticks),)]
    assert records.requests.kv_transfer_bytes.tolist() == [8]
    assert [link.carried_bytes for link in records.links] == [8, 8]


def test_two_prompts_of_one_iteration_share_its_time_on_the_link(ask):
    """12 and 4 tokens in one tick at 8 a tick: 6 and 2 go ahead. 6 and 2 left: at 4 each, 2 are there after
    half a tick, and 6 after another half.
    """
    records = run_world(ask(0, 12, 3), ask(0, 4, 3), network=toy_network(8), kv_transfer=KvTransferSettings())
    assert ticks(records, "kv_transfer") == [(1,), (0.5,)]


def test_concurrent_copies_share_the_link(ask):
    """8 tokens each from tick 1 on, to two decode replicas, out of one port of 4 a tick: 4 ticks."""
    records = run_world(ask(0, 8, 2), ask(0, 8, 2), num_decode=2, kv_transfer=AT_END)
    assert ticks(records, "kv_transfer") == [(4,), (4,)]
    assert records.requests.replica.tolist() == [1, 2]


def test_bounded_copies_go_one_after_the_other(ask):
    records = run_world(
        ask(0, 8, 2),
        ask(0, 8, 2),
        num_decode=2,
        kv_transfer=AT_END,
        network=toy_network(4, max_transfers=1),
    )
    assert ticks(records, "kv_transfer") == [(2,), (4,)]


def test_a_full_decode_replica_holds_up_the_prefill_replica(ask):
    """Decode: 4 blocks of 4. The first, 12 + 4 tokens, takes them until tick 7 (1 prompt, 3 of transfer, 3).
    The second keeps its KV in the prefill replica, of 4 blocks, too: the third waits for it.
    """
    asks = [ask(0, 12, 4), ask(0, 12, 4), ask(0, 12, 4)]
    records = run_world(*asks, num_blocks=4, kv_transfer=AT_END)
    # 1: prompt [0, 1], copy [1, 4], decode [4, 7]. 2: prompt [4, 5] after the copy, copy [7, 10], ...
    assert ticks(records, "first_token", "last_token") == [(1, 7), (5, 13), (11, 19)]


def test_kv_in_the_decode_replicas_cache_is_not_copied(ask):
    """The second prompt shares 8 of its 12 tokens with the first: 4 tokens flow, at 4 a tick."""
    text = ((7, 8),)
    asks = [ask(0, 10, 2, contents=text), ask(10 * TICK_S, 12, 2, contents=text)]
    records = run_world(*asks, caching=PrefixCaching(block_size=4), kv_transfer=AT_END)
    assert records.requests.kv_transfer_bytes.tolist() == [10, 4]
    assert records.requests.kv_transfer_s.tolist() == [2.5 * TICK_S, TICK_S]
    use = transfer_use(records, records.requests.assign(e2e_s=1.0))
    assert (use["tokens"], use["cached_tokens"], use["bytes"], use["requests"]) == (22, 8, 14, 2)


def test_kv_that_is_all_there_begins_at_once(ask):
    """12 tokens in 3 whole blocks: the second time nothing flows, and the answer goes on in the next tick."""
    text = ((7, 12),)
    asks = [ask(0, 12, 2, contents=text), ask(10 * TICK_S, 12, 3, contents=text)]
    records = run_world(*asks, caching=PrefixCaching(block_size=4), kv_transfer=AT_END)
    assert ticks(records, "first_token", "last_token", "kv_transfer")[1] == (11, 13, 0)


def test_one_token_needs_no_decode_replica(ask):
    records = run_world(ask(0, 8, 1), kv_transfer=AT_END)
    assert records.requests.prefill_replica.tolist() == [-1]
    assert records.requests.replica.tolist() == [0]
    assert transferred(records.requests).empty


def test_a_prompt_that_no_decode_replica_can_hold_is_refused_on_arrival(ask):
    records = run_world(ask(0, 40, 8), num_prefill_blocks=100, num_blocks=10, kv_transfer=AT_END)
    (row,) = records.requests.itertuples()
    assert (row.status, row.reason) == (
        "rejected",
        "a sequence of 41 tokens: the KV cache holds at most 40 per sequence",
    )


@pytest.mark.parametrize(
    ("patience_ticks", "num_tokens"),
    [
        (0.5, 1),  # in the prefill: at the end of that iteration
        (1, 1),  # as the prompt is done
        (2, 1),  # while its KV flows
        (3.5, 2),  # decoding
    ],
)
def test_a_request_that_gives_up_leaves_nothing_behind(ask, patience_ticks, num_tokens):
    """8 prompt tokens until tick 1, KV until 3."""
    records = run_world(ask(0, 8, 20), kv_transfer=AT_END, patience_s=patience_ticks * TICK_S)
    (row,) = records.requests.itertuples()
    assert (row.status, row.output_tokens) == ("aborted", num_tokens)


def crash(at_ticks, replica, duration_ticks=100):
    return Scripted(
        kind=FailureKind.crash,
        at_s=at_ticks * TICK_S,
        duration_s=duration_ticks * TICK_S,
        replicas=(replica,),
    )


def test_a_decode_replica_that_crashes_during_the_copy_costs_only_the_copy(ask):
    """Prompt until tick 1; copy to replica 1 until it crashes at 2; again to replica 2, until 4."""
    failures = Failures(events=(crash(2, 1),))
    records = run_world(ask(0, 8, 3), num_decode=2, kv_transfer=AT_END, failures=failures)
    assert ticks(records, "first_token", "last_token") == [(1, 6)]
    (row,) = records.requests.itertuples()
    assert (row.replica, row.attempts, row.lost_tokens) == (2, 1, 0)


def test_a_prefill_replica_that_crashes_during_the_copy_costs_the_prompt(ask):
    """Prompt until tick 1; replica 0 crashes at 2, with half of the KV copied; again in replica 1 until 3."""
    failures = Failures(events=(crash(2, 0),))
    records = run_world(ask(0, 8, 3), num_prefill=2, kv_transfer=AT_END, failures=failures)
    assert ticks(records, "first_token", "last_token") == [(3, 7)]
    (row,) = records.requests.itertuples()
    assert (row.prefill_replica, row.attempts, row.lost_tokens) == (1, 2, 1)


def test_a_request_that_has_timed_out_ends_once_if_its_prefill_replica_crashes_during_the_copy(ask):
    """The second request times out at 3.6, in the middle of a step of replica 1; replica 0 crashes at 3.8."""
    records = run_world(
        ask(0, 1, 30),
        ask(1.0 * TICK_S, 8, 3),
        kv_transfer=KvTransferSettings(transfer="at_end", first_token_at="decode"),
        retries=Retries(timeout_s=2.6 * TICK_S, timeout_until="first_token", max_attempts=1),
        failures=Failures(events=(crash(3.8, 0),)),
    )
    assert records.requests.status.tolist() == ["finished", "rejected"]


def test_a_lost_link_stalls_the_copy(ask):
    """4 of 8 tokens are copied by tick 2; the link is back at 5: there at 6."""
    down = Scripted(kind=FailureKind.link_down, at_s=2 * TICK_S, duration_s=3 * TICK_S, replicas=(1,))
    records = run_world(ask(0, 8, 3), kv_transfer=AT_END, failures=Failures(events=(down,)))
    assert ticks(records, "kv_transfer", "last_token") == [(5, 8)]


def test_mixed_replicas_take_what_is_too_much_for_the_prefill_replica(ask):
    """16 queued tokens are enough: the third goes to the mixed replica, which answers it alone."""
    few = KvTransferSettings(transfer="at_end", overflow_tokens=16)
    asks = [ask(0, 10, 3), ask(0, 10, 3), ask(0, 10, 3)]
    records = run_world(*asks, num_mixed=1, kv_transfer=few)
    assert records.requests.prefill_replica.tolist() == [0, 0, -1]
    assert records.requests.replica.tolist() == [1, 1, 2]


def test_mixed_replicas_take_answers_for_which_the_decode_replica_has_no_room(ask):
    asks = [ask(0, 12, 30), ask(0, 12, 3)]
    records = run_world(*asks, num_mixed=1, num_blocks=12, kv_transfer=AT_END, signal_age_s=0.0)
    assert records.requests.prefill_replica.tolist() == [0, 0]
    assert records.requests.replica.tolist() == [1, 1]
    full = replace(Service(asks=(ask(0, 40, 8), ask(4 * TICK_S, 40, 3))), num_mixed=1, num_blocks=12)
    assert full.simulate().records.requests.replica.tolist() == [1, 2]


def test_the_prompts_policy_of_a_prefill_replica_may_be_any(ask):
    """Chunks of 4: the prompt takes two ticks, and is handed over at the end of the second."""
    chunked = Chunked(max_num_batched_tokens=4)
    records = run_world(ask(0, 8, 3), prefill_batching=chunked, kv_transfer=AT_END)
    assert ticks(records, "first_token", "last_token") == [(2, 6)]


def test_long_answers_are_spread(ask):
    """Two of six answers are long; a router that knows it sends each to a replica of its own."""
    lengths = [90, 2, 2, 90, 2, 2]
    asks = [ask(i * TICK_S, 4, num_tokens) for i, num_tokens in enumerate(lengths)]
    records = run_world(
        *asks,
        num_decode=2,
        decode_routing=LengthAware(heavy_tokens=50),
        prediction=OracleWithNoise(error=0.0),
        kv_transfer=AT_END,
    )
    heavy = records.requests[records.requests.output_tokens == 90]
    assert sorted(heavy.replica) == [1, 2]


def with_adapter(ask, at_ticks=0, num_prompt=8, num_output=3):
    return ask(at_ticks * TICK_S, num_prompt, num_output)._replace(adapter="a")


SLOTS = {
    "adapters": FixedSlots(max_loras=1),
    "served": (Adapter(name="a", rank=8), Adapter(name="b", rank=4)),
    "links": partial(Links, bytes_per_token=1.0, host_bytes_per_s=8 / TICK_S, disk_bytes_per_s=4 / TICK_S),
    "kv_transfer": AT_END,
}
"""An adapter of 8 bytes comes from disk in 2 ticks, from host memory in 1."""


def test_a_handed_over_answer_waits_for_its_kv_and_for_its_adapter(ask):
    """Adapter to the prefill replica until tick 2, prompt until 3; then both to the decode replica: KV, 8
    tokens at 4 a tick, until 5, and the adapter until 5; 2 ticks of answer. The second finds the adapter in
    both: prompt until 21, KV until 23.
    """
    records = run_world(with_adapter(ask), with_adapter(ask, 20), **SLOTS)
    assert ticks(records, "first_token", "last_token", "kv_transfer") == [(3, 7, 2), (21, 25, 2)]
    assert [counts.num_loads for counts in records.adapters] == [1, 1]


def test_the_later_of_kv_and_adapter_counts(ask):
    """A slow disk: 8 ticks to the prefill replica, prompt until 9, 8 more to the decode replica; KV until 11.
    A slow network: adapter until 2, prompt until 3, adapter until 5, KV until 11.
    """
    slow_disk = partial(Links, bytes_per_token=1.0, host_bytes_per_s=1 / TICK_S, disk_bytes_per_s=1 / TICK_S)
    records = run_world(with_adapter(ask), **SLOTS | {"links": slow_disk})
    assert ticks(records, "first_token", "last_token", "kv_transfer") == [(9, 19, 2)]
    records = run_world(with_adapter(ask), network=toy_network(1), **SLOTS)
    assert ticks(records, "first_token", "last_token", "kv_transfer") == [(3, 13, 8)]


def test_without_a_slot_for_its_adapter_an_answer_keeps_its_kv_in_the_prefill_replica(ask):
    """One slot each. In the prefill replica it is a's until its KV has left at 5: b's 4 bytes come by 6, its
    prompt is done at 7. In the decode replica it is a's until 27: then KV and adapter set out.
    """
    asks = [with_adapter(ask, 0, num_output=23), with_adapter(ask, 4)._replace(adapter="b")]
    records = run_world(*asks, **SLOTS)
    assert ticks(records, "first_token", "last_token", "kv_transfer") == [(3, 27, 2), (7, 31, 2)]
    waits = records.requests[["wait_adapter_s", "wait_load_s"]] / TICK_S
    assert waits.iloc[1].tolist() == [(5 - 4) + (27 - 7), 1 + 2]


def test_an_adapter_beside_which_no_decode_replica_can_hold_the_kv_is_refused_on_arrival(ask):
    """10 blocks of 4 tokens: 2 for the adapter leave 32 tokens, a prompt of 32 would need 33."""
    paged = {**SLOTS, "adapters": UnifiedPaging(), "num_blocks": 10, "num_prefill_blocks": 100}
    fits, too_long = with_adapter(ask, 0, 31), with_adapter(ask, 0, 32)
    assert run_world(fits, **paged).requests.status.tolist() == ["finished"]
    (row,) = run_world(too_long, **paged).requests.itertuples()
    assert (row.status, row.prefill_replica) == ("rejected", -1)
    assert row.reason == "a sequence of 33 tokens: it would have ended at 33 here"


class TurnOnce:
    """Turns a replica at the first opportunity."""

    interval_s = 2.0 * TICK_S

    def __init__(self, name, role):
        self.change = Switch(name, role)

    def switch(self, loads, now):
        change, self.change = self.change, None
        return change


def test_a_replica_changes_its_role_when_it_is_empty(ask):
    """Replica 2 of two decode replicas is drained from tick 2 on, has its last answer out at tick 9, and
    comes back as replica 3, which computes prompts.
    """
    asks = [ask(0, 4, 8), ask(0, 4, 8), *(ask(n * TICK_S, 4, 4) for n in (12, 12.25))]
    records = run_world(*asks, num_decode=2, roles=TurnOnce(2, "prefill"), kv_transfer=AT_END)
    assert records.requests.replica.tolist() == [1, 2, 1, 1]
    assert records.requests.prefill_replica.tolist() == [0, 0, 3, 0]
    left, came = records.replicas[2], records.replicas[3]
    assert (left.pool, came.pool, left.end_s, came.start_s) == (1, 0, came.start_s, left.end_s)
    assert left.end_s == records.requests.finished_s[1]


def test_roles_follow_the_load(ask):
    """A burst of prompts turns a decode replica; a waiting request has its first token earlier."""
    asks = tuple(ask(i * TICK_S / 4, 30, 2) for i in range(60))
    fixed = Service(asks=asks, num_decode=3, prefill_batching=Chunked(max_num_batched_tokens=30))
    balance = Balance(interval_s=TICK_S, max_backlog_tokens=100, max_kv_share=0.9, rest_s=2 * TICK_S)
    means = [
        service.simulate().records.requests.eval("first_token_s - arrival_s").mean()
        for service in (fixed, replace(fixed, roles=balance))
    ]
    assert means[1] < means[0] * 0.7


def test_events_tell_the_whole_way(ask):
    events = events_table(run_world(ask(TICK_S, 8, 4), kv_transfer=AT_END))
    rows = [(row.event, row.replica, row.time_s / TICK_S, row.tokens) for row in events.itertuples()]
    assert rows == [
        ("arrive", 1, 1, 8),
        ("admit", 0, 1, 0),
        ("first_token", 1, 2, 1),
        ("hand_over", 0, 2, 8),
        ("load", 1, 2, 8),
        ("loaded", 1, 4, 8),
        ("adopt", 1, 4, 8),
        ("end", 1, 7, 4),
    ]
    assert events.tier[4] == "remote"
    assert events.wait_load_s.sum() == 2 * TICK_S


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transfer": "now"}, "transfer=now: must be one of layerwise, at_end"),
        ({"first_token_at": "home"}, "first_token_at=home: must be one of prefill, decode"),
        ({"overflow_tokens": -1}, "overflow_tokens=-1: must be >= 0 tokens"),
    ],
)
def test_refuses_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        KvTransferSettings(**given)
