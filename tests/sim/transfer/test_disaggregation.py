"""Prompts computed in one replica, answers decoded in another: times by hand."""

from dataclasses import replace

import pytest
from hypothesis import given

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.toys import TICK_S
from policies.batching.chunked import Chunked
from policies.caching.prefix import PrefixCaching
from policies.prediction.oracles import OracleWithNoise
from policies.roles import Switch
from policies.roles.balance import Balance
from policies.routing.length_aware import LengthAware
from sim.metrics.features import transferred
from sim.metrics.output import check_conservation
from sim.records.run import events_table
from sim.transfer.kv_transfers import KvTransferSettings
from tests.sim.metrics.figures_of import transfer_use
from tests.sim.transfer.prefill_and_decode import AT_END, run_world, ticks
from tests.worlds.services import Service, draw_services, toy_network


@given(service=draw_services())
def test_leap_equals_step(service):
    check_conservation(assert_leap_equals_step(service).records)


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
    events = events_table(run_world(ask(TICK_S, 8, 4), kv_transfer=AT_END)).to_pandas()
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
        (
            {"first_token_at": "home"},
            "first_token_at=home: must be one of prefill, decode, or null: as the engine does",
        ),
        ({"overflow_tokens": -1}, "overflow_tokens=-1: must be >= 0 tokens"),
    ],
)
def test_refuses_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        KvTransferSettings(**given)
