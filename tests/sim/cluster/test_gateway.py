"""Admission, retries and the cost of crashes at the gateway: times worked out by hand, in ticks.

An iteration takes one tick and gives one token, and a prompt takes one iteration: an answer of n tokens that
is alone begins 1 tick after it was sent, and ends n ticks after.
"""

from math import nan

import numpy as np
import pytest

from policies.admission.queue_bound import QueueBound
from policies.admission.token_bucket import TokenBucket
from policies.routing.load_balancing import LeastOutstanding
from policies.user_code import WrongDecisionError
from sim.cluster.clients import Retries
from sim.cluster.failures import Failures, Scripted
from sim.records.run import FailureKind

TICK_S = 0.125


def crash(at, duration, *replicas):
    event = Scripted(
        kind=FailureKind.crash, at_s=at * TICK_S, duration_s=duration * TICK_S, replicas=replicas
    )
    return Failures(events=(event,))


def clients(max_attempts, base, **settings):
    """Retries after base ticks, without jitter."""
    settings = {"factor": 1.0, "cap_s": 1000 * TICK_S, "jitter": "none"} | settings
    return Retries(max_attempts=max_attempts, base_s=base * TICK_S, **settings)


def ticks(requests, *names):
    return [tuple(requests[name] / TICK_S) for name in names]


@pytest.fixture(params=[True, False], ids=["leap", "step"])
def run_world(request, make_world):
    """Returns a function for the requests of a world, leaping or stepping."""

    def run_world(*asks, **settings):
        return make_world(*asks, **settings).simulate(leap=request.param).records.requests

    return run_world


def test_a_refused_client_comes_again_later_and_later_until_it_is_let_in(run_world, ask):
    """Waits of 2, 4 and 8 ticks from tick 1 on: tick 15 is the first at which the other one is gone."""
    requests = run_world(
        ask(0.0, 4, 10),
        ask(1 * TICK_S, 4, 3),
        admission=QueueBound(max_outstanding=1),
        retries=clients(4, 2, factor=2.0),
    )
    assert requests.status.tolist() == ["finished", "finished"]
    assert ticks(requests, "arrival_s", "wait_gateway_s") == [(0, 1), (0, 14)]
    assert ticks(requests, "scheduled_s", "first_token_s", "finished_s") == [(0, 15), (1, 16), (10, 18)]
    assert requests.attempts.tolist() == [1, 1]  # to a replica


def test_a_client_that_was_refused_too_often_is_rejected_for_the_last_reason(run_world, ask):
    requests = run_world(
        ask(0.0, 4, 10),
        ask(1 * TICK_S, 4, 3),
        admission=QueueBound(max_outstanding=1),
        retries=clients(3, 2, factor=2.0),
    )
    assert requests.status.tolist() == ["finished", "rejected"]
    assert requests.reason.tolist() == ["", "queue bound of the replica"]
    assert ticks(requests, "finished_s", "wait_gateway_s") == [(10, 7), (0, 6)]
    assert requests.attempts.tolist() == [1, 0]


def test_a_client_waits_as_long_as_a_refusal_says(run_world, ask):
    """At ticks 1, 6 and 11."""
    requests = run_world(
        ask(0.0, 4, 10),
        ask(1 * TICK_S, 4, 3),
        admission=QueueBound(max_outstanding=1, retry_after_s=5 * TICK_S),
        retries=clients(4, 2),
    )
    assert ticks(requests, "scheduled_s") == [(0, 11)]


def test_a_rate_limit_admits_requests_that_come_when_it_says(run_world, ask):
    """A request every 4 ticks. At 1 it says 3 ticks, at 2 it says 2; at 4 it is the first one's turn, and the
    other must wait 4 more.
    """
    requests = run_world(
        *(ask(tick * TICK_S, 4, 1) for tick in range(3)),
        admission=TokenBucket(rate_per_s=1 / (4 * TICK_S), burst=1),
        retries=clients(4, 0),
    )
    assert ticks(requests, "scheduled_s", "wait_gateway_s") == [(0, 4, 8), (0, 3, 6)]


def test_a_client_that_has_waited_too_long_drops_its_request_before_it_sends_it_again(make_world, ask):
    """After 4.5 ticks; dropped at 5, having made 5 tokens. Again from 7 to 11.5, dropped at 12."""
    run = make_world(ask(0.0, 4, 10), retries=clients(2, 2, timeout_s=4.5 * TICK_S)).simulate()
    row = run.records.requests.iloc[0]
    assert (row.status, row.reason, row.finished_s) == ("rejected", "timed out", 12 * TICK_S)
    assert (row.attempts, row.output_tokens, row.lost_tokens) == (2, 0, 10)
    assert row.wait_gateway_s == 2 * TICK_S
    assert np.isnan(row.first_token_s)
    starts = run.records.iterations.start_s / TICK_S
    assert starts.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    assert (run.records.iterations.running == 1).all()


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_requests_given_up_on_their_way_have_left_all_replicas_before_any_is_routed_again(
    run_world, ask, plans_ahead
):
    """Requests 0, 1, 2 go to replicas 0, 1, 0, and behind them 3 and 4, a tick later, to 1 and 0.

    At tick 3 the first three, given up at tick 2, are at their engines, which are idle. They leave, and one
    is left in each replica: so the arrival 5 goes to replica 0, and the retries of 0, 1 and 2 go to 1, 0, 1.
    """
    together, later, last = [ask(0.0, 4, 10)] * 3, [ask(1 * TICK_S, 4, 10)] * 2, ask(3 * TICK_S, 4, 10)
    requests = run_world(
        *together,
        *later,
        last,
        num_replicas=2,
        routing=LeastOutstanding(),
        frontend_s=3 * TICK_S,
        plans_ahead=plans_ahead,
        until_s=3.5 * TICK_S,
        retries=clients(2, 0, timeout_s=2 * TICK_S),
    )
    assert requests.replica.tolist() == [1, 0, 1, 1, 0, 0]


def test_a_client_that_waits_for_its_first_token_waits_for_the_rest_too(run_world, ask):
    requests = run_world(
        ask(0.0, 4, 10), retries=clients(2, 2, timeout_s=4.5 * TICK_S, timeout_until="first_token")
    )
    assert requests.status.tolist() == ["finished"]
    assert requests.attempts.tolist() == [1]


def test_a_crash_after_the_first_token_does_not_let_the_client_time_out(run_world, ask):
    """It has seen that token at tick 1; replica 1 begins again at 3.5."""
    requests = run_world(
        ask(0.0, 4, 10),
        num_replicas=2,
        failures=crash(3.5, 100, 0),
        max_resends=1,
        retries=clients(2, 2, timeout_s=4 * TICK_S, timeout_until="first_token"),
    )
    assert ticks(requests, "finished_s") == [(13.5,)]


def test_a_budget_without_a_deposit_lets_the_burst_try_again(run_world, ask):
    """Three are refused together and nothing is paid in: one retry is there."""
    requests = run_world(
        *[ask(0.0, 4, 5)] * 4,
        admission=QueueBound(max_outstanding=1),
        retries=clients(2, 7, retry_budget=0.0, retry_burst=1.0),
    )
    assert requests.status.tolist() == ["finished", "finished", "rejected", "rejected"]


def test_a_crash_costs_what_was_done_and_the_time_until_a_replica_serves(run_world, ask):
    """3 tokens by tick 3.5. No replica serves at 3.5, 7.5 and 11.5; at 15.5 one does, since 13.5."""
    requests = run_world(ask(0.0, 4, 10), failures=crash(3.5, 10), max_resends=1, retries=clients(4, 4))
    assert requests.status.tolist() == ["finished"]
    assert requests.lost_tokens.tolist() == [3]
    assert requests.output_tokens.tolist() == [10]
    assert requests.attempts.tolist() == [2]
    assert ticks(requests, "scheduled_s", "first_token_s", "finished_s") == [(15.5,), (16.5,), (25.5,)]
    assert ticks(requests, "wait_gateway_s") == [(12,)]


def test_the_service_sends_a_lost_request_to_another_replica_at_once(run_world, ask):
    requests = run_world(ask(0.0, 4, 10), num_replicas=2, failures=crash(3.5, 10, 0), max_resends=1)
    assert requests.replica.tolist() == [1]
    assert (requests.lost_tokens[0], requests.attempts[0]) == (3, 2)
    assert ticks(requests, "first_token_s", "finished_s", "wait_gateway_s") == [(4.5,), (13.5,), (0,)]


def test_a_crash_at_the_end_of_an_iteration_comes_after_it(run_world, ask):
    requests = run_world(ask(0.0, 4, 10), failures=crash(3, 10))
    assert requests.lost_tokens.tolist() == [3]
    requests = run_world(ask(0.0, 4, 10), failures=crash(10, 10))
    assert requests.status.tolist() == ["finished"]


def test_a_request_that_is_not_resent_is_rejected_when_its_replica_crashes(run_world, ask):
    requests = run_world(ask(0.0, 4, 10), num_replicas=2, failures=crash(3.5, 10, 0))
    assert (requests.status[0], requests.reason[0]) == ("rejected", "its replica crashed")
    assert ticks(requests, "finished_s") == [(3.5,)]
    assert requests.output_tokens.tolist() == [0]


def test_every_crash_takes_one_of_the_resends(run_world, ask):
    """Three of four replicas crash, one after the other."""
    events = [event for at in (1.5, 3.5, 5.5) for event in crash(at, 100, int(at / 2)).events]
    settings = {"num_replicas": 4, "routing": LeastOutstanding(), "failures": Failures(events=tuple(events))}
    requests = run_world(ask(0.0, 4, 10), **settings, max_resends=2)
    assert (requests.status[0], requests.attempts[0], requests.lost_tokens[0]) == ("rejected", 3, 1 + 2 + 2)
    requests = run_world(ask(0.0, 4, 10), **settings, max_resends=3)
    assert (requests.status[0], requests.attempts[0], requests.lost_tokens[0]) == ("finished", 4, 5)


def test_a_client_that_has_given_up_is_not_served_again_after_a_crash(run_world, ask):
    """It leaves at 3.25; before the iteration's end, at which the engine would know, the replica crashes."""
    requests = run_world(
        ask(0.0, 4, 10),
        num_replicas=2,
        patience_s=3.25 * TICK_S,
        failures=crash(3.5, 10, 0),
        max_resends=1,
        retries=clients(3, 1, timeout_s=3.375 * TICK_S),
    )
    assert requests.status.tolist() == ["aborted"]
    assert requests.attempts.tolist() == [1]
    assert ticks(requests, "finished_s") == [(3.5,)]


def test_a_client_that_gives_up_does_not_time_out_after_that(run_world, ask):
    """It leaves at 3.25, the engine knows at 4, and at 3.5 its timer for this attempt goes off."""
    requests = run_world(
        ask(0.0, 4, 10), patience_s=3.25 * TICK_S, retries=clients(3, 1, timeout_s=3.5 * TICK_S)
    )
    assert requests.status.tolist() == ["aborted"]
    assert (requests.attempts[0], requests.output_tokens[0]) == (1, 4)


def test_a_client_may_give_up_while_it_waits_to_come_again(run_world, ask):
    requests = run_world(
        ask(0.0, 4, 10),
        ask(1 * TICK_S, 4, 3),
        patience_s=10.5 * TICK_S,
        admission=QueueBound(max_outstanding=1),
        retries=clients(4, 20),
    )
    assert requests.status.tolist() == ["finished", "aborted"]
    assert ticks(requests, "finished_s", "wait_gateway_s") == [(10, 11.5), (0, 10.5)]


def test_a_request_that_can_never_be_served_is_sent_once(run_world, ask):
    requests = run_world(ask(0.0, 50, 2), max_model_len=40, retries=clients(4, 1))
    assert (requests.status[0], requests.attempts[0]) == ("rejected", 1)
    assert "max_model_len is 40" in requests.reason[0]


@pytest.mark.parametrize("position", [2, -1, None, "first", 1.0])
def test_a_router_that_names_an_unknown_replica_is_named(make_world, ask, position):
    class Lost:
        def choose(self, request, replicas, now):
            return position

    message = f"Lost: choose returned {position!r}; it must return a position in `replicas`"
    with pytest.raises(WrongDecisionError, match=message):
        make_world(ask(0.0, 4, 10), num_replicas=2, routing=Lost()).simulate()


def test_refusals_in_a_closed_loop_bring_the_next_request(make_world, ask):
    """Two users; each rejection and each end is followed by a request 1 tick later."""
    run = make_world(
        *[ask(0.0, 4, 3)] * 4, num_users=2, think_s=TICK_S, admission=QueueBound(max_outstanding=1)
    ).simulate()
    requests = run.records.requests
    assert ticks(requests, "arrival_s") == [(0, 0, 1, 2)]
    assert requests.status.tolist() == ["finished", "rejected", "rejected", "rejected"]
    assert [(i, now / TICK_S) for i, now, _ in run.source.ends] == [(1, 0), (2, 1), (3, 2), (0, 3)]
    assert not requests.replica[1:].ne(-1).any()
    assert np.array_equal(requests.first_token_s[1:], [nan] * 3, equal_nan=True)
