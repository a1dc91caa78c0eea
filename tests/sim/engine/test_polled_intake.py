"""An engine that looks for new requests at every n-th iteration of decodes."""

import pytest

from experiments.conformance.same_run import assert_leap_equals_step

TICK_S = 0.125  # one iteration of the flat toy model


@pytest.mark.parametrize(
    ("interval", "arrival_ticks", "plans_ahead", "seen_at_ticks"),
    [
        (1, 5.5, False, 6),
        (4, 5.5, False, 8),
        (4, 8.5, False, 12),
        (4, 5.5, True, 8),
        (4, 7.5, True, 12),  # the plan of iteration 8 is made in iteration 7
        (4, 0.5, False, 1),  # the first iteration computes a prompt
    ],
)
def test_a_request_waits_for_the_next_look(
    make_world, ask, interval, arrival_ticks, plans_ahead, seen_at_ticks
):
    asks = ask(0.0, 4, 30), ask(arrival_ticks * TICK_S, 4, 2)
    world = make_world(*asks, recv_interval=interval, plans_ahead=plans_ahead)
    requests = assert_leap_equals_step(world).records.requests
    assert requests.scheduled_s.tolist() == [0.0, seen_at_ticks * TICK_S]


def test_an_idle_engine_looks_at_once(make_world, ask):
    world = make_world(ask(0.0, 4, 2), ask(6.25 * TICK_S, 4, 2), recv_interval=50)
    requests = assert_leap_equals_step(world).records.requests
    assert requests.scheduled_s.tolist() == [0.0, 6.25 * TICK_S]
