"""Twice the load: the same requests in half the time."""

import numpy as np
import pytest

from policies.core.request import Prompt, Request
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.modified import faster


class ThreeRequests:
    num_requests, last_arrival_s, patience_s, notes = 3, 9.0, 4.0, WorkloadNotes()

    def arrivals(self):
        yield Arrival(Request(0, 1.0, Prompt(5), deadline_s=11.0), 7)
        yield Arrival(Request(1, 3.0, Prompt(6)), 8, time_s=4.0)
        yield Arrival(Request(2, 9.0, Prompt(7)), 9, (1, 9))

    def follow_ups(self, request, now, num_output_tokens):
        return (Arrival(Request(3, now + 20.0, request.prompt), num_output_tokens),)


@pytest.mark.parametrize("load", [2.0, 0.5])
def test_arrivals_are_scaled_and_nothing_else(load):
    source = faster(ThreeRequests(), load)
    given, made = list(ThreeRequests().arrivals()), list(source.arrivals())
    assert [one.at_s for one in made] == pytest.approx(np.array([1.0, 4.0, 9.0]) / load)
    assert [one.request.arrival_s for one in made] == pytest.approx(np.array([1.0, 3.0, 9.0]) / load)
    assert made[0].request.deadline_s - made[0].request.arrival_s == 10
    for before, after in zip(given, made, strict=True):
        assert after.request._replace(arrival_s=0, deadline_s=None) == before.request._replace(
            arrival_s=0, deadline_s=None
        )
        assert after[1:3] == before[1:3]
    assert (source.num_requests, source.last_arrival_s, source.patience_s) == (3, 9.0 / load, 4.0)


def test_what_follows_from_an_answer_does_so_as_fast_as_before():
    (follow_up,) = faster(ThreeRequests(), 4.0).follow_ups(Request(0, 1.0, Prompt(5)), 100.0, 7)
    assert follow_up.request.arrival_s == 120.0
