"""LoRA adapters of disaggregated replicas: an answer waits for its KV and for its adapter."""

from functools import partial

from hypothesis import given

from experiments.conformance.same_run import assert_leap_equals_step
from experiments.conformance.toys import TICK_S
from policies.adapters.fixed_slots import FixedSlots
from policies.adapters.serving import Adapter
from policies.adapters.unified_paging import UnifiedPaging
from sim.engine.replica_pool import Links
from sim.metrics.output import check_conservation
from tests.sim.transfer.prefill_and_decode import AT_END, run_world, ticks
from tests.worlds.services import draw_adapter_services, toy_network


@given(service=draw_adapter_services())
def test_leap_equals_step_with_adapters(service):
    check_conservation(assert_leap_equals_step(service).records)


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
