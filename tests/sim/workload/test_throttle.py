"""A provider's limits per minute: when requests are sent, by hand and as a bound that always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Prompt, Request
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.clients import TOO_LARGE, ThrottledSource, WithThrottle


class Given:
    """A workload of these arrivals; each end is followed by a request at once."""

    num_requests, last_arrival_s, patience_s = None, None, None

    def __init__(self, *arrivals):
        self.notes = WorkloadNotes()
        self._arrivals = arrivals

    def source(self, *, seed, max_model_len):
        return self

    def arrivals(self):
        yield from self._arrivals

    def follow_ups(self, request, now, num_output_tokens):
        return (Arrival(Request(99, now, request.prompt, tenant=request.tenant), 5),)


def ask(i, at_s, prompt=5, output=5, tenant=""):
    return Arrival(Request(i, at_s, Prompt(prompt), tenant=tenant), output)


def sent(*arrivals, requests=None, tokens=None):
    source = ThrottledSource(Given(*arrivals), (requests, tokens))
    return [(a.request.request_id, a.at_s) for a in source.arrivals()], source


def test_a_minutes_requests_go_at_once_and_the_next_when_the_bucket_has_filled():
    """Two a minute: 0 and 1 go at once, 2 and 3 after 30 s each."""
    found, source = sent(*(ask(i, 0.0) for i in range(4)), requests=2)
    assert found == [(0, 0.0), (1, 0.0), (2, 30.0), (3, 60.0)]
    assert source.notes.remarks == [
        "Clients held 2 requests back to keep the provider's limits, for 45 s on average."
    ]


def test_tokens_count_prompt_and_output_or_the_limit_that_the_client_sets():
    """60 tokens a minute, one a second. Request 1 needs 30 and finds 20 at 0 s, so it waits 10 s."""
    limited = Arrival(Request(1, 0.0, Prompt(10), max_tokens=20), 2)
    found, _ = sent(ask(0, 0.0, 30, 10), limited, ask(2, 5.0, 1, 1), tokens=60)
    assert found == [(0, 0.0), (1, 10.0), (2, 12.0)]


def test_tenants_have_limits_of_their_own_and_times_stay_in_order():
    found, _ = sent(
        ask(0, 0.0, tenant="a"), ask(1, 0.0, tenant="a"), ask(2, 1.0, tenant="b"), ask(3, 70.0), requests=1
    )
    assert found == [(0, 0.0), (2, 1.0), (1, 60.0), (3, 70.0)]


def test_a_follow_up_waits_as_well():
    _, source = sent(ask(0, 0.0), requests=1)
    (later,) = source.follow_ups(Request(0, 0.0, Prompt(5)), 15.0, 5)
    assert (later.request.arrival_s, later.at_s) == (15.0, 60.0)


def test_a_request_larger_than_the_limit_is_never_sent():
    found, source = sent(ask(0, 0.0, 50, 11), ask(1, 0.0, 50, 10), tokens=60)
    assert found == [(1, 0.0)]
    assert source.notes.skipped == {TOO_LARGE: 1}


@given(st.lists(st.tuples(st.floats(0, 300), st.integers(1, 40), st.sampled_from("ab")), max_size=40))
def test_no_minute_has_more_than_two_limits(rows):
    """In t seconds, a bucket lets at most limit (1 + t / 60) go: two limits in a minute."""
    arrivals = [ask(i, at_s, size, 1, tenant) for i, (at_s, size, tenant) in enumerate(sorted(rows))]
    source = ThrottledSource(Given(*arrivals), (5, 100))
    found = list(source.arrivals())
    assert [a.at_s for a in found] == sorted(a.at_s for a in found)
    assert len(found) == len(arrivals)
    assert all(a.at_s >= a.request.arrival_s for a in found)
    for tenant in "ab":
        mine = [a for a in found if a.request.tenant == tenant]
        for first in mine:
            within = [a for a in mine if first.at_s <= a.at_s <= first.at_s + 60]
            assert len(within) <= 10 + 1e-6
            assert sum(a.request.prompt.num_tokens + 1 for a in within) <= 200 + 1e-6


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="at least one must be set"):
        WithThrottle(of=Given())
    with pytest.raises(ValueError, match=r"requests_per_minute=0.5: must be >= 1"):
        WithThrottle(of=Given(), requests_per_minute=0.5)
