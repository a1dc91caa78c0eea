"""Flows share capacities max-min fair: by hand, by definition, and against a simulation in small steps."""

from collections import Counter
from functools import lru_cache
from math import inf
from random import Random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.clock import Clock, Interrupt, Phase
from sim.transfer.network import Capacity, Network, Route


class Wire:
    """A network, and a log of (name, seconds) of the flows that arrived."""

    def __init__(self):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.arrived = []
        self.flows = {}

    def send(self, at_s, name, route, num_bytes):
        def start(event):
            self.flows[name] = self.network.send(route, num_bytes, lambda: self._note(name))

        self.clock.at(at_s, Phase.arrive, start)

    def at(self, at_s, call):
        self.clock.at(at_s, Phase.arrive, lambda event: call())

    def run(self, until_s=inf):
        assert not self.clock.run_some(10**6, until_s, Interrupt())
        return self.arrived

    def under_way(self):
        """Counts the flows that have begun and not arrived, by route; without latencies."""
        arrived = {name for name, _ in self.arrived}
        return Counter(flow.route for name, flow in self.flows.items() if name not in arrived)

    def _note(self, name):
        self.arrived.append((name, self.clock.now))


@pytest.fixture
def wire():
    return Wire()


def between(*capacities, latency_s=0.0):
    return Route(capacities, latency_s)


def test_a_process_waits_for_a_flow(wire):
    route, log = between(Capacity("out", 10.0), latency_s=0.5), []

    def sender(network, clock):
        yield network.send(route, 20.0, lambda: log.append("done"))
        log.append(clock.now)
        flow = network.send(route, 20.0, lambda: log.append("never"))
        yield clock.timeout(1)
        assert network.cancel(flow) == 10.0
        assert not flow.processed

    wire.clock.begin(sender(wire.network, wire.clock))
    wire.run()
    assert log == ["done", 2.5]


def test_alone_a_flow_takes_latency_and_bytes_over_bandwidth(wire):
    wire.send(1.0, "a", between(Capacity("out", 10.0), Capacity("in", 4.0), latency_s=0.5), 20.0)
    assert wire.run() == [("a", 1.0 + 20.0 / 4.0 + 0.5)]


def test_two_flows_share_and_the_second_speeds_up_when_the_first_leaves(wire):
    """a alone for 2 s: 20 of 60 B. Then 5 B/s each: a needs 8 s more, b has 40 of its 100 B by then."""
    out = Capacity("out", 10.0)
    wire.send(0.0, "a", between(out, Capacity("in a", 100.0)), 60.0)
    wire.send(2.0, "b", between(out, Capacity("in b", 100.0)), 100.0)
    assert wire.run() == [("a", 10.0), ("b", 16.0)]


def test_a_flow_that_cannot_use_its_share_leaves_it_to_the_others(wire):
    """Egress 12 B/s of three flows: one is held at 2 by its receiver, the others get 5 each, not 4."""
    out = Capacity("out", 12.0)
    wire.send(0.0, "slow", between(out, Capacity("in 0", 2.0)), 20.0)
    wire.send(0.0, "b", between(out, Capacity("in 1", 50.0)), 50.0)
    wire.send(0.0, "c", between(out, Capacity("in 2", 50.0)), 25.0)
    # c ends at 5 s; b has 25 B left and gets 10 B/s
    assert wire.run() == [("c", 5.0), ("b", 7.5), ("slow", 10.0)]


def test_a_shared_fabric_is_one_more_capacity(wire):
    fabric = Capacity("fabric", 10.0)
    for name in "ab":
        wire.send(0.0, name, between(Capacity("out", 10.0), fabric, Capacity("in", 10.0)), 50.0)
    assert wire.run() == [("a", 10.0), ("b", 10.0)]


def test_flows_of_one_route_end_in_the_order_of_their_sizes(wire):
    """3 at 1/3 each until the smallest (10 B) is through at 3 s, then 2 at 1/2, ..."""
    route = between(Capacity("out", 10.0))
    for name, num_bytes in (("c", 30.0), ("a", 10.0), ("b", 20.0)):
        wire.send(0.0, name, route, num_bytes)
    assert wire.run() == [("a", pytest.approx(3.0)), ("b", pytest.approx(5.0)), ("c", pytest.approx(6.0))]


def test_a_lost_link_stalls_its_flows_until_it_is_back(wire):
    out = Capacity("out", 10.0)
    wire.send(0.0, "a", between(out), 100.0)
    wire.at(4.0, lambda: wire.network.set_capacity(out, 0.0))
    wire.at(9.0, lambda: wire.network.set_capacity(out, 20.0))
    assert wire.run(8.0) == []
    assert wire.network.carried_bytes(out, 8.0) == 40.0
    assert wire.run() == [("a", 12.0)]


def test_a_cancelled_flow_leaves_what_it_had_sent_and_makes_room(wire):
    out, sent = Capacity("out", 10.0), []
    wire.send(0.0, "a", between(out), 100.0)
    wire.send(0.0, "b", between(out), 30.0)
    wire.at(4.0, lambda: sent.append(wire.network.cancel(wire.flows["a"])))
    assert wire.run() == [("b", 5.0)]  # 20 B by 4 s, then 10 B at 10 B/s
    assert (sent, out.carried_bytes, out.num_flows, out.num_bytes) == ([20.0], 50.0, 0, 0.0)


def test_a_flow_cancelled_in_its_latency_never_arrives(wire):
    wire.send(0.0, "a", between(Capacity("out", 10.0), latency_s=2.0), 10.0)
    wire.at(2.0, lambda: wire.network.cancel(wire.flows["a"]))
    assert wire.run() == []


def test_bounded_flows_wait_for_their_turn(wire):
    """One at a time: the second begins when the first has left, not when it has arrived."""
    route = between(Capacity("in", 10.0, max_flows=1), latency_s=1.0)
    for name in "ab":
        wire.send(0.0, name, route, 20.0)
    assert wire.run() == [("a", 3.0), ("b", 5.0)]


def test_a_full_buffer_holds_back_only_flows_that_do_not_fit(wire):
    """40 B of buffer: the 30 B behind 20 B wait; the 20 B behind them, from elsewhere, do not.

    An oversized flow goes alone.
    """
    into = Capacity("in", 10.0, max_bytes=40.0)
    wire.send(0.0, "a", between(Capacity("1", 99.0), into), 20.0)
    wire.send(0.0, "b", between(Capacity("2", 99.0), into), 30.0)
    wire.send(0.0, "c", between(Capacity("3", 99.0), into), 20.0)
    wire.send(1.0, "d", between(Capacity("4", 99.0), into), 50.0)
    # a and c end at 4 s; b alone until 7 s; d alone until 12 s
    assert wire.run() == [("a", 4.0), ("c", 4.0), ("b", 7.0), ("d", 12.0)]


def test_a_waiting_flow_may_be_cancelled_and_does_not_hold_up_those_behind_it(wire):
    into = Capacity("in", 10.0, max_bytes=40.0)
    route = between(into)
    wire.send(0.0, "a", route, 30.0)
    wire.send(0.0, "big", route, 35.0)
    wire.send(0.0, "b", route, 10.0)
    wire.at(1.0, lambda: wire.network.cancel(wire.flows["big"]))
    assert wire.run() == [("b", 3.0), ("a", 4.0)]  # at 1 s: 20 and 10 B left, 5 B/s each
    assert not into.routes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Capacity("out", 0.0), r"bytes_per_s=0.0: must be a finite number > 0 bytes/s \(out\)"),
        (lambda: Capacity("out", 1.0, max_flows=0), "max_flows=0: must be >= 1"),
        (lambda: Capacity("out", 1.0, max_bytes=0.0), "max_bytes=0.0: must be > 0"),
        (lambda: Route([]), "capacities=.*: must not be empty"),
        (lambda: Route([Capacity("out", 1.0)], -1.0), "latency_s=-1.0: must be a finite number >= 0 s"),
        (lambda: Network(Clock()).send(Route([Capacity("o", 1.0)]), -1.0, print), "num_bytes=-1.0: must be"),
        (lambda: Network(Clock()).set_capacity(Capacity("o", 1.0), -1.0), "bytes_per_s=-1.0: must be"),
    ],
)
def test_refuses_what_is_no_network(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Random traffic over three senders, three receivers and a fabric

TICK_S = 0.25


@st.composite
def draw_traffic(draw):
    """Draws 7 capacities (3 outs, 3 ins, fabric), flows (at_s, path, bytes) and changes of capacities."""
    bandwidth = st.sampled_from([1.0, 2.0, 3.0, 7.0, 10.0])
    capacities = draw(st.lists(bandwidth, min_size=7, max_size=7))
    path = st.tuples(st.integers(0, 2), st.integers(3, 5), *([st.just(6)] if draw(st.booleans()) else []))
    at_s = st.integers(0, 40).map(lambda tick: tick * TICK_S)
    flow = st.tuples(at_s, path, st.sampled_from([0.5, 1.0, 4.0, 9.5, 20.0]))
    change = st.tuples(at_s, st.integers(0, 6), st.sampled_from([0.25, 0.5, 2.0]))
    return capacities, draw(st.lists(flow, min_size=1, max_size=12)), draw(st.lists(change, max_size=3))


def put_on(wire, traffic):
    bandwidths, flows, changes = traffic
    capacities = [Capacity(str(index), bandwidth) for index, bandwidth in enumerate(bandwidths)]
    routes = {path: between(*(capacities[index] for index in path)) for _, path, _ in flows}
    for number, (at_s, path, num_bytes) in enumerate(flows):
        wire.send(at_s, number, routes[path], num_bytes)
    for at_s, index, factor in changes:
        wire.at(at_s, lambda index=index, factor=factor: scale(wire, capacities[index], factor))
    return capacities


def scale(wire, capacity, factor):
    wire.network.set_capacity(capacity, capacity.bytes_per_s * factor)


@given(traffic=draw_traffic())
def test_rates_are_max_min_fair_at_every_instant(traffic):
    """Each flow has a bottleneck: a full capacity on which no flow gets more (the definition)."""
    wire = Wire()
    capacities = put_on(wire, traffic)
    at_s = TICK_S / 3
    while wire.clock.peek() < inf:
        wire.run(at_s)
        check_fairness(wire.under_way(), capacities)
        at_s += TICK_S


def check_fairness(num_flows, capacities):
    """Checks that the rates are max-min fair; num_flows: flows under way, by route."""
    routes = list(num_flows)
    used = {
        c: sum(num * r.rate_bytes_per_s for r, num in num_flows.items() if c in r.capacities)
        for c in capacities
    }
    for capacity in capacities:
        assert used[capacity] <= capacity.bytes_per_s * (1 + 1e-9)
    for route in routes:
        assert any(
            used[c] >= c.bytes_per_s * (1 - 1e-9)
            and all(
                other.rate_bytes_per_s <= route.rate_bytes_per_s * (1 + 1e-9)
                for other in routes
                if c in other.capacities
            )
            for c in route.capacities
        ), "a flow without a bottleneck could get more"


@given(traffic=draw_traffic())
def test_arrivals_agree_with_a_simulation_in_small_steps(traffic):
    step_s = TICK_S / 128
    wire = Wire()
    capacities = put_on(wire, traffic)
    arrived = dict(wire.run())
    stepped = arrivals_in_small_steps(traffic, step_s)
    assert arrived.keys() == stepped.keys()
    for number, (at_s, *_) in enumerate(traffic[1]):
        assert arrived[number] == pytest.approx(stepped[number], abs=14 * step_s), f"sent at {at_s}"
    # every byte has passed its sender, the fabric and its receiver
    sent = [0.0] * 7
    for _, path, num_bytes in traffic[1]:
        for index in path:
            sent[index] += num_bytes
    assert [capacity.carried_bytes for capacity in capacities] == pytest.approx(sent)
    assert not any(capacity.num_flows or capacity.num_bytes or capacity.routes for capacity in capacities)


def arrivals_in_small_steps(traffic, step_s):
    """Computes the end of each flow in small steps: new rates in every step, then bytes move."""
    bandwidths, flows, changes = traffic
    left = {}
    done_s = {}
    now, todo = 0.0, sorted(range(len(flows)), key=lambda number: flows[number][0])
    bandwidths, changes = list(bandwidths), sorted(changes, key=lambda change: change[0])
    while todo or left:
        while todo and flows[todo[0]][0] <= now:
            number = todo.pop(0)
            left[number] = flows[number][2]
        while changes and changes[0][0] <= now:
            _, index, factor = changes.pop(0)
            bandwidths[index] *= factor
        rates = water_filling(tuple((number, flows[number][1]) for number in left), tuple(bandwidths))
        now += step_s
        for number, rate in rates.items():
            left[number] -= rate * step_s
            if left[number] <= 1e-9:
                done_s[number] = now
                del left[number]
    return done_s


@lru_cache(100)
def water_filling(flows, bandwidths):
    """Computes the rate by flow: a common level rises until a capacity is full, and its flows stop there."""
    paths, rising = dict(flows), dict(flows)
    rates = {}
    while rising:
        slack = {}
        for index, bandwidth in enumerate(bandwidths):
            num_rising = sum(index in path for path in rising.values())
            if num_rising:
                frozen = sum(rate for number, rate in rates.items() if index in paths[number])
                slack[index] = (bandwidth - frozen) / num_rising
        level = min(slack.values())
        full = {index for index, value in slack.items() if value <= level * (1 + 1e-12)}
        for number in [number for number, path in rising.items() if full & set(path)]:
            rates[number] = level
            del rising[number]
    return rates


def test_ten_thousand_flows_cost_no_more_than_their_routes():
    """10,000 flows over 4 x 4 routes, thousands at once: a second; flow by flow it would take minutes."""
    wire, random = Wire(), Random(0)
    outs = [Capacity(f"out {i}", 1e9) for i in range(4)]
    ins = [Capacity(f"in {i}", 1e9, max_flows=500) for i in range(4)]
    routes = [between(out, into) for out in outs for into in ins]
    for number in range(10_000):
        wire.send(random.random(), number, random.choice(routes), random.expovariate(1e-6))
    begun_s = process_time()
    assert len(wire.run()) == 10_000
    assert process_time() - begun_s < 20
