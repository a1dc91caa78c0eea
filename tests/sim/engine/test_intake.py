"""Requests on their way to an engine: the order in which they enter, and what wakes an idle one."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.request import Prompt, Request
from sim.engine.frontend import Intake


def make_intake(times_s, plans_ahead=False):
    """Returns an intake that expects request i at times_s[i], and the list of those that have entered."""
    entered = []
    intake = Intake(plans_ahead, lambda entry: entered.append(entry.request.request_id))
    for request_id, known_s in enumerate(times_s):
        intake.add(known_s, Request(request_id, 0.0, Prompt(1)), enter=lambda item: None, item=None)
    return intake, entered


@given(times_s=st.lists(st.integers(0, 9).map(float)), until_s=st.lists(st.integers(0, 9).map(float)))
def test_requests_enter_in_the_order_of_their_times_and_those_of_one_time_as_they_were_sent(times_s, until_s):
    intake, entered = make_intake(times_s)
    in_order = sorted(range(len(times_s)), key=lambda i: (times_s[i], i))
    for now in sorted(until_s):
        if intake.next_s <= now:
            intake.enter_at(now, is_idle=True)
        due = [i for i in in_order if times_s[i] <= now]
        assert entered == due
        assert all((i in intake) == (i not in due) for i in in_order)
        assert intake.next_s == min([t for t in times_s if t > now], default=inf)
    assert [entry.request.request_id for entry in intake.entries()] == in_order[len(entered) :]


def test_an_idle_engine_that_plans_ahead_is_woken_by_the_first_request_alone():
    intake, entered = make_intake([1.0, 1.0], plans_ahead=True)
    intake.enter_at(1.0, is_idle=False)
    assert entered == []
    intake.enter_at(1.0, is_idle=True)
    assert entered == [0]


def test_one_request_may_enter_alone():
    intake, entered = make_intake([1.0, 2.0, 2.0])
    assert intake.find(3) is None
    for request_id, next_s in [(2, 1.0), (0, 2.0), (1, inf)]:
        entry = intake.find(request_id)
        assert entry.request.request_id == request_id
        intake.enter_alone(entry)
        assert entered[-1] == request_id
        assert intake.find(request_id) is None
        assert intake.next_s == next_s


@pytest.mark.parametrize("num", [1023, 1024, 3000])
def test_many_requests_keep_their_order(num):
    intake, entered = make_intake([0.0] * num)
    intake.enter_at(0.0, is_idle=True)
    assert entered == list(range(num))
    assert intake.next_s == inf
