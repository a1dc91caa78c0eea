"""Routers, asked directly."""

from types import SimpleNamespace

from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin


def replicas(*num_outstanding):
    return [SimpleNamespace(num_outstanding=count) for count in num_outstanding]


def test_round_robin_goes_around_whatever_the_load(make_request):
    routing = RoundRobin()
    chosen = [routing.choose(make_request(), replicas(9, 0, 5), 0.0) for _ in range(7)]
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_least_outstanding_takes_the_shortest_queue_and_the_first_of_equals(make_request):
    choose = LeastOutstanding().choose
    assert choose(make_request(), replicas(3, 2, 4), 0.0) == 1
    assert choose(make_request(), replicas(3, 2, 2), 0.0) == 1
    assert choose(make_request(), replicas(0, 0, 0), 0.0) == 0
