"""A part of the traffic: the busiest window, moved to the beginning."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Prompt, Request
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.listed import ListedSource, busiest_window


def source_of(rows):
    arrivals = [
        Arrival(Request(i, at_s, Prompt(tokens), deadline_s=at_s + 5), 1)
        for i, (at_s, tokens) in enumerate(sorted(rows))
    ]
    return ListedSource(arrivals, notes=WorkloadNotes(), patience_s=3.0)


rows = st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 5000)), min_size=1, max_size=40)


@given(rows, st.floats(1, 500))
def test_no_window_that_begins_with_a_request_holds_more_tokens(rows, duration_s):
    source = source_of(rows)
    window, start_s = busiest_window(source, duration_s)

    def tokens(begin_s):
        inside = (a for a in source.listed if begin_s <= a.at_s < begin_s + duration_s)
        return sum(a.request.prompt.num_tokens + 1 for a in inside)

    found = sum(a.request.prompt.num_tokens + 1 for a in window.listed)
    last_s = source.last_arrival_s
    others = [tokens(a.at_s) for a in source.listed if a.at_s + duration_s <= last_s]
    assert found >= max(others, default=0)
    assert window.num_requests == len(window.listed)
    assert [a.request.request_id for a in window.listed] == list(range(len(window.listed)))
    if window is not source:
        assert window.listed[0].at_s == 0
        assert window.last_arrival_s < duration_s
        assert all(a.request.deadline_s == pytest.approx(a.at_s + 5) for a in window.listed)
        assert tokens(start_s) == found
    assert window.patience_s == 3.0


def test_the_second_of_two_bursts_is_found():
    source = source_of([(0.0, 10), (1.0, 10), (50.0, 10), (51.0, 30), (52.0, 10), (99.0, 10)])
    window, start_s = busiest_window(source, 10.0)
    assert start_s == 50.0
    assert [(a.at_s, a.request.prompt.num_tokens) for a in window.listed] == [(0.0, 10), (1.0, 30), (2.0, 10)]


def test_traffic_that_is_no_longer_stays_as_it_is():
    source = source_of([(0.0, 10), (5.0, 10)])
    assert busiest_window(source, 10.0) == (source, 0.0)
