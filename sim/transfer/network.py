"""Flows of bytes over shared links in simulated time; concurrent flows share bandwidth, max-min fair.

A fluid model: a flow has a rate at every instant. Rates are max-min fair (Bertsekas and Gallager, Data
Networks, 6.5.2): no flow can get a higher rate without lowering that of a flow that is no faster. They are
computed by progressive filling, whenever a flow begins or ends or a capacity changes, for the affected flows.

    egress of A --+                   route A -> B: (egress of A, fabric, ingress of B)
                  +-- fabric --+
    egress of C --+            +-- ingress of B

All flows of one route have the same rate, so a route counts the bytes that each of them has sent, and a flow
ends when that count has grown by its bytes: the work depends on the number of routes in use, not of flows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from simpy import Event

from sim.engine.clock import Clock, Moment, Phase


class Capacity:
    """A shared bandwidth: a port in one direction, or a switch. routes: the routes that use it.

    max_flows, max_bytes: limits on the concurrent flows through it; other flows wait. A flow of more than
    max_bytes passes alone.
    """

    __slots__ = (
        "bytes_per_s",
        "carried_bytes",
        "max_bytes",
        "max_flows",
        "name",
        "num_bytes",
        "num_flows",
        "routes",
    )

    def __init__(
        self, name: str, bytes_per_s: float, max_flows: int | None = None, max_bytes: float | None = None
    ) -> None:
        if not 0 < bytes_per_s < inf:
            raise ValueError(f"bytes_per_s={bytes_per_s}: must be a finite number > 0 bytes/s ({name})")
        if max_flows is not None and max_flows < 1:
            raise ValueError(f"max_flows={max_flows}: must be >= 1; null for no limit ({name})")
        if max_bytes is not None and not max_bytes > 0:
            raise ValueError(f"max_bytes={max_bytes}: must be > 0; null for no limit ({name})")
        self.name = name
        self.bytes_per_s = bytes_per_s
        self.max_flows = inf if max_flows is None else max_flows
        self.max_bytes = inf if max_bytes is None else max_bytes
        self.num_flows = 0
        self.num_bytes = 0.0  # total size of those flows
        self.carried_bytes = 0.0  # by flows that have ended
        self.routes: dict[Route, None] = {}  # routes with active or waiting flows, in order

    def has_room(self, num_bytes: float) -> bool:
        """Returns whether a flow of num_bytes bytes may begin."""
        if self.num_flows >= self.max_flows:
            return False
        return not self.num_flows or self.num_bytes + num_bytes <= self.max_bytes


class Route:
    """The capacities between two endpoints, and the latency of the last byte in seconds.

    One object serves all flows between the endpoints.
    """

    __slots__ = (
        "_active_flows",
        "_queue",
        "_sent_bytes",
        "_since_s",
        "capacities",
        "latency_s",
        "rate_bytes_per_s",
    )

    def __init__(self, capacities: Sequence[Capacity], latency_s: float = 0.0) -> None:
        if not capacities:
            raise ValueError("capacities=[]: must not be empty")
        if not 0 <= latency_s < inf:
            raise ValueError(f"latency_s={latency_s}: must be a finite number >= 0 s")
        self.capacities = tuple(dict.fromkeys(capacities))
        self.latency_s = latency_s
        self.rate_bytes_per_s = 0.0  # rate of each of its flows
        self._sent_bytes = 0.0  # by each flow since the route was idle, as of _since_s
        self._since_s = 0.0
        self._active_flows: list[tuple[float, int, Flow]] = []  # a heap by the count at the end of a flow
        self._queue: deque[Flow] = deque()

    @property
    def bytes_per_s(self) -> float:
        """Rate of a flow that is alone on all capacities of the route."""
        return min(capacity.bytes_per_s for capacity in self.capacities)

    @property
    def next_end_s(self) -> float:
        """Time at which the first of its flows ends at the present rate, s; inf: none does."""
        if not self._active_flows or not self.rate_bytes_per_s:
            return inf
        return self._since_s + (self._active_flows[0][0] - self._sent_bytes) / self.rate_bytes_per_s

    def sent_bytes_per_flow(self, now: float) -> float:
        """Returns the bytes that a flow that began when the route was idle would have sent by `now`."""
        return self._sent_bytes + self.rate_bytes_per_s * (now - self._since_s)


class Flow(Moment):
    """An active or waiting transfer of bytes: the event of the arrival of its last byte.

    on_done is called then. A process waits for it with `yield flow`.
    """

    def __init__(
        self, clock: Clock, number: int, route: Route, num_bytes: float, on_done: Callable[[], None] | None
    ) -> None:
        Moment.__init__(self, clock, None if on_done is None else lambda event: on_done())
        self.number = number
        self.route = route
        self.num_bytes = num_bytes
        self.began_s: float | None = None
        self._end_count: float | None = None  # while it is active: the count of its route at its end
        self._is_cancelled = False


class Network:
    """All flows of a run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = count()
        self._active: dict[Route, None] = {}  # routes with active flows
        self._timer: Event | None = None  # the valid event
        self._timer_s = inf

    def send(self, route: Route, num_bytes: float, on_done: Callable[[], None] | None = None) -> Flow:
        """Starts a flow, or queues it until every capacity of the route has room for one more flow.

        Flows of one route begin in the order in which they were sent.
        """
        if not 0 <= num_bytes < inf:
            raise ValueError(f"num_bytes={num_bytes}: must be a finite number >= 0 bytes")
        flow = Flow(self._clock, next(self._numbers), route, num_bytes, on_done)
        if route._queue or not self._may_begin(flow):
            route._queue.append(flow)
            for capacity in route.capacities:
                capacity.routes[route] = None
        else:
            self._begin(flow)
            self._update_rates([route])
        return flow

    def cancel(self, flow: Flow) -> float:
        """Cancels a flow: its on_done will not be called. Returns the number of bytes that it has sent."""
        if flow._is_cancelled:
            return 0.0
        flow._is_cancelled = True
        if flow.callbacks is not None:  # its last byte has not arrived
            flow.callbacks.clear()
        if flow.began_s is None:  # it waits; a flow queued after it may fit now
            self._update_rates(self._begin_queued(flow.route.capacities))
            return 0.0
        if flow._end_count is None:
            return flow.num_bytes  # all bytes are sent, and the last ones have not arrived yet
        route, now = flow.route, self._clock.now
        left_bytes = flow._end_count - route.sent_bytes_per_flow(now)
        sent_bytes = min(max(flow.num_bytes - left_bytes, 0.0), flow.num_bytes)
        route._active_flows.remove((flow._end_count, flow.number, flow))
        route._active_flows.sort()  # a sorted list is a heap
        self._remove(flow, sent_bytes)
        self._begin_queued(route.capacities)
        self._update_rates([route])
        return sent_bytes

    def set_capacity(self, capacity: Capacity, bytes_per_s: float) -> None:
        """Sets the bandwidth of a capacity from now on; 0: a lost link, on which flows stand still."""
        if not 0 <= bytes_per_s < inf:
            raise ValueError(
                f"bytes_per_s={bytes_per_s}: must be a finite number >= 0 bytes/s ({capacity.name})"
            )
        capacity.bytes_per_s = bytes_per_s
        self._update_rates([route for route in capacity.routes if route in self._active])

    @staticmethod
    def carried_bytes(capacity: Capacity, now: float) -> float:
        """Returns the bytes that have passed a capacity up to now."""
        carried_bytes = capacity.carried_bytes
        for route in capacity.routes:
            sent_bytes_per_flow = route.sent_bytes_per_flow(now)
            for end_count, _, flow in route._active_flows:
                carried_bytes += flow.num_bytes - max(end_count - sent_bytes_per_flow, 0.0)
        return carried_bytes

    @staticmethod
    def count_carried(route: Route, num_bytes: float) -> None:
        """Counts bytes that have passed a route outside of flows, as carried."""
        for capacity in route.capacities:
            capacity.carried_bytes += num_bytes

    def _may_begin(self, flow: Flow) -> bool:
        return all(capacity.has_room(flow.num_bytes) for capacity in flow.route.capacities)

    def _begin(self, flow: Flow) -> None:
        """Makes a flow active; the caller updates the rates."""
        route, now = flow.route, self._clock.now
        if route not in self._active:
            route._sent_bytes, route._since_s, route.rate_bytes_per_s = 0.0, now, 0.0
            self._active[route] = None
        flow.began_s = now
        flow._end_count = route.sent_bytes_per_flow(now) + flow.num_bytes
        heappush(route._active_flows, (flow._end_count, flow.number, flow))
        for capacity in route.capacities:
            capacity.routes[route] = None
            capacity.num_flows += 1
            capacity.num_bytes += flow.num_bytes

    def _remove(self, flow: Flow, sent_bytes: float) -> None:
        """Removes a flow that is no longer active from the counts; the caller updates the rates."""
        route = flow.route
        flow._end_count = None
        for capacity in route.capacities:
            capacity.num_flows -= 1
            capacity.num_bytes = capacity.num_bytes - flow.num_bytes if capacity.num_flows else 0.0
            capacity.carried_bytes += sent_bytes
        if not route._active_flows:
            del self._active[route]
            route.rate_bytes_per_s = 0.0
            if not route._queue:
                for capacity in route.capacities:
                    del capacity.routes[route]

    def _begin_queued(self, freed: Sequence[Capacity]) -> list[Route]:
        """Begins the flows that waited for these capacities and fit now, in the order of sending."""
        begun: dict[Route, None] = {}
        while True:
            heads = [
                route._queue[0] for route in self._queued_routes(freed) if self._may_begin(route._queue[0])
            ]
            if not heads:
                return list(begun)
            flow = min(heads, key=lambda head: head.number)
            flow.route._queue.popleft()
            self._begin(flow)
            begun[flow.route] = None

    def _queued_routes(self, capacities: Sequence[Capacity]) -> list[Route]:
        """Returns the routes through these capacities with waiting flows, after removing cancelled flows."""
        routes = dict.fromkeys(route for capacity in capacities for route in capacity.routes if route._queue)
        for route in routes:
            while route._queue and route._queue[0]._is_cancelled:
                route._queue.popleft()
            if not route._queue and route not in self._active:
                for capacity in route.capacities:
                    del capacity.routes[route]
        return [route for route in routes if route._queue]

    def _update_rates(self, changed: Sequence[Route]) -> None:
        """Computes the rates of all flows that changes on these routes affect, and sets the timer."""
        now = self._clock.now
        routes = self._affected_routes(changed)
        for route, rate_bytes_per_s in _fair_rates(routes).items():
            if rate_bytes_per_s != route.rate_bytes_per_s:
                route._sent_bytes = route.sent_bytes_per_flow(now)
                route._since_s = now
                route.rate_bytes_per_s = rate_bytes_per_s
        self._set_timer()

    def _affected_routes(self, changed: Sequence[Route]) -> list[Route]:
        """Returns the active routes that share a capacity with these, directly or through other routes."""
        found: dict[Route, None] = {}
        seen: set[Capacity] = set()
        capacities = [capacity for route in changed for capacity in route.capacities]
        while capacities:
            capacity = capacities.pop()
            if capacity in seen:
                continue
            seen.add(capacity)
            for route in capacity.routes:
                if route in self._active and route not in found:
                    found[route] = None
                    capacities.extend(route.capacities)
        return list(found)

    def _set_timer(self) -> None:
        next_s = min((route.next_end_s for route in self._active), default=inf)
        if next_s == inf:
            self._timer, self._timer_s = None, inf
        elif self._timer is None or next_s != self._timer_s:
            self._timer_s = max(next_s, self._clock.now)
            self._timer = self._clock.at(self._timer_s, Phase.arrive, self._on_timer)

    def _on_timer(self, event: Event) -> None:
        """Ends the flows that are due now, and begins those that waited for them."""
        if event is not self._timer:
            return
        self._timer = None
        now = self._clock.now
        due = [route for route in self._active if route.next_end_s <= now]
        for route in due:
            end_count = route._active_flows[0][0]
            route._sent_bytes, route._since_s = end_count, now
            while route._active_flows and route._active_flows[0][0] <= end_count:
                flow = heappop(route._active_flows)[2]
                self._remove(flow, flow.num_bytes)
                self._clock.place(flow, now + route.latency_s, Phase.arrive)
        self._begin_queued(list(dict.fromkeys(capacity for route in due for capacity in route.capacities)))
        self._update_rates(due)


def _fair_rates(routes: Sequence[Route]) -> dict[Route, float]:
    """Returns the max-min fair rate of a flow on each route; no other route may use their capacities."""
    left = {capacity: capacity.bytes_per_s for route in routes for capacity in route.capacities}
    num_flows = dict.fromkeys(left, 0)
    for route in routes:
        for capacity in route.capacities:
            num_flows[capacity] += len(route._active_flows)
    rates: dict[Route, float] = {}
    while len(rates) < len(routes):
        tightest = min(
            (capacity for capacity in left if num_flows[capacity]),
            key=lambda capacity: left[capacity] / num_flows[capacity],
        )
        rate = left[tightest] / num_flows[tightest]
        for route in tightest.routes:
            if not route._active_flows or route in rates:
                continue
            rates[route] = rate
            for capacity in route.capacities:
                num_flows[capacity] -= len(route._active_flows)
                left[capacity] = max(left[capacity] - rate * len(route._active_flows), 0.0)
    return rates
