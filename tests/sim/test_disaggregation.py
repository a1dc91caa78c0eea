"""Prompts computed in one replica, answers decoded in another: times by hand, and nothing lost or leaked."""

import pytest
from hypothesis import HealthCheck, given, settings

from experiments.conformance.same_run import assert_same_decisions
from experiments.conformance.services import Service, draw_services
from experiments.conformance.worlds import TICK_S

random_services = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(random_services, max_examples=100)
@given(service=draw_services())
def test_leap_equals_step(service, same_records):
    assert_leap_equals_step(service, same_records)


@pytest.mark.slow
@settings(random_services, max_examples=3000)
@given(service=draw_services())
def test_leap_equals_step_in_many_services(service, same_records):
    assert_leap_equals_step(service, same_records)


def assert_leap_equals_step(service, same_records):
    leapt, stepped = service.fly(leap=True), service.fly(leap=False)
    same_records(leapt.records, stepped.records)
    assert_same_decisions(leapt, stepped)
    assert leapt.records.links == stepped.records.links
    assert leapt.source.ends == stepped.source.ends


def test_one_request_by_hand(ask):
    """8 prompt tokens at tick 1: computed by tick 2; 8 tokens of KV at 4 a tick: there at 4; then 3 ticks."""
    records = Service(asks=(ask(TICK_S, 8, 4),)).fly().records
    (row,) = records.requests.itertuples()
    ticks = {"first_token": 2, "last_token": 7, "finished": 7}
    assert {name: getattr(row, f"{name}_s") / TICK_S for name in ticks} == ticks
    assert (row.replica, row.prefill_replica, row.output_tokens) == (1, 0, 4)
    assert (row.kv_transfer_s, row.kv_transfer_bytes) == (2 * TICK_S, 8.0)
    assert sorted(zip(records.gap_s / TICK_S, records.gap_count, strict=True)) == [(1, 1), (1, 1), (3, 1)]
