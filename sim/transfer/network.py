"""Flows of bytes over shared capacities, in simulated time: who sends at the same time shares, max-min fair.

A fluid model: a flow has a rate at every instant. Rates are max-min fair (Bertsekas and Gallager, Data
Networks, 6.5.2): no flow can get more without taking from one that has no more itself. They are found by
progressive filling, whenever a flow begins or ends or a capacity changes, among those that could be affected.

    egress of A --+                   route A -> B: (egress of A, fabric, ingress of B)
                  +-- fabric --+
    egress of C --+            +-- ingress of B

All flows of one route have the same rate, so a route counts what each of them has got, and a flow ends when
that count has grown by its bytes: the work depends on the routes in use, not on their flows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from sim.engine.clock import Clock, Phase


class Capacity:
    """What can pass one place in a second: a port in one direction, a switch. In use by the routes listed.

    max_flows, max_bytes: of flows under way through it; others wait for their turn. A flow of more bytes
    than that goes alone.
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
        self.num_bytes = 0.0  # of those flows, as they were when they began
        self.carried_bytes = 0.0  # of flows that have ended
        self.routes: dict[Route, None] = {}  # with flows under way or waiting, in the order of their first

    def has_room(self, num_bytes: float) -> bool:
        """Whether a flow of so many bytes may begin."""
        if self.num_flows >= self.max_flows:
            return False
        return not self.num_flows or self.num_bytes + num_bytes <= self.max_bytes


class Route:
    """The capacities that bytes from here to there pass, and how long the last of them is on its way.

    Made once for two endpoints and used for all their flows.
    """

    __slots__ = (
        "_got_bytes",
        "_since_s",
        "_under_way",
        "_waiting",
        "capacities",
        "latency_s",
        "rate_bytes_per_s",
    )

    def __init__(self, capacities: Sequence[Capacity], latency_s: float = 0.0) -> None:
        if not capacities:
            raise ValueError("capacities=[]: a route must pass at least one")
        if not 0 <= latency_s < inf:
            raise ValueError(f"latency_s={latency_s}: must be a finite number >= 0 s")
        self.capacities = tuple(dict.fromkeys(capacities))
        self.latency_s = latency_s
        self.rate_bytes_per_s = 0.0  # of each of its flows
        self._got_bytes = 0.0  # by each flow, since the route was idle: as of _since_s
        self._since_s = 0.0
        self._under_way: list[tuple[float, int, Flow]] = []  # a heap: what the count will be at a flow's end
        self._waiting: deque[Flow] = deque()

    @property
    def bytes_per_s(self) -> float:
        """What a flow gets that is alone."""
        return min(capacity.bytes_per_s for capacity in self.capacities)

    @property
    def next_end_s(self) -> float:
        """When the first of its flows ends, at the present rate."""
        if not self._under_way or not self.rate_bytes_per_s:
            return inf
        return self._since_s + (self._under_way[0][0] - self._got_bytes) / self.rate_bytes_per_s

    def got_bytes(self, now: float) -> float:
        """What each flow would have got since the route was idle."""
        return self._got_bytes + self.rate_bytes_per_s * (now - self._since_s)


class Flow:
    """Bytes on their way, or waiting for their turn. on_done is called when the last has arrived."""

    __slots__ = ("_end_count", "_is_cancelled", "began_s", "num_bytes", "number", "on_done", "route")

    def __init__(self, number: int, route: Route, num_bytes: float, on_done: Callable[[], None]) -> None:
        self.number = number
        self.route = route
        self.num_bytes = num_bytes
        self.on_done = on_done
        self.began_s: float | None = None
        self._end_count: float | None = None  # while bytes are flowing: its route's count at its end
        self._is_cancelled = False

    def _arrive(self, event: int) -> None:
        if not self._is_cancelled:
            self.on_done()


class Network:
    """All flows of a run, on its clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = count()
        self._active: dict[Route, None] = {}  # routes with flows under way
        self._timer: int | None = None  # the one event that counts
        self._timer_s = inf

    def send(self, route: Route, num_bytes: float, on_done: Callable[[], None]) -> Flow:
        """Send bytes; they begin to flow as soon as every capacity on their way has room for one more flow.

        Those of one route go in the order in which they were sent.
        """
        if not 0 <= num_bytes < inf:
            raise ValueError(f"num_bytes={num_bytes}: must be a finite number >= 0")
        flow = Flow(next(self._numbers), route, num_bytes, on_done)
        if route._waiting or not self._may_begin(flow):
            route._waiting.append(flow)
            for capacity in route.capacities:
                capacity.routes[route] = None
        else:
            self._begin(flow)
            self._share_anew([route])
        return flow

    def cancel(self, flow: Flow) -> float:
        """Give a flow up; its on_done will not be called. Returns the bytes that had been sent."""
        if flow._is_cancelled:
            return 0.0
        flow._is_cancelled = True
        if flow.began_s is None:  # it waits; who stood behind it may fit
            self._share_anew(self._begin_waiting(flow.route.capacities))
            return 0.0
        if flow._end_count is None:
            return flow.num_bytes  # all sent; the last bytes were on their way
        route, now = flow.route, self._clock.now
        left_bytes = flow._end_count - route.got_bytes(now)
        sent_bytes = min(max(flow.num_bytes - left_bytes, 0.0), flow.num_bytes)
        route._under_way.remove((flow._end_count, flow.number, flow))
        route._under_way.sort()  # a sorted list is a heap
        self._leave(flow, sent_bytes)
        self._begin_waiting(route.capacities)
        self._share_anew([route])
        return sent_bytes

    def set_capacity(self, capacity: Capacity, bytes_per_s: float) -> None:
        """From now on so much passes; 0 is a lost link: its flows stand still until it is back."""
        if not 0 <= bytes_per_s < inf:
            raise ValueError(f"bytes_per_s={bytes_per_s}: must be a finite number >= 0 ({capacity.name})")
        capacity.bytes_per_s = bytes_per_s
        self._share_anew([route for route in capacity.routes if route in self._active])

    @staticmethod
    def carried_bytes(capacity: Capacity, now: float) -> float:
        """What has passed up to now."""
        carried_bytes = capacity.carried_bytes
        for route in capacity.routes:
            got_bytes = route.got_bytes(now)
            for end_count, _, flow in route._under_way:
                carried_bytes += flow.num_bytes - max(end_count - got_bytes, 0.0)
        return carried_bytes

    @staticmethod
    def note_carried(route: Route, num_bytes: float) -> None:
        """Count bytes that went this way before, in no flow."""
        for capacity in route.capacities:
            capacity.carried_bytes += num_bytes

    def _may_begin(self, flow: Flow) -> bool:
        return all(capacity.has_room(flow.num_bytes) for capacity in flow.route.capacities)

    def _begin(self, flow: Flow) -> None:
        """Count a flow in; rates are the caller's."""
        route, now = flow.route, self._clock.now
        if route not in self._active:
            route._got_bytes, route._since_s, route.rate_bytes_per_s = 0.0, now, 0.0
            self._active[route] = None
        flow.began_s = now
        flow._end_count = route.got_bytes(now) + flow.num_bytes
        heappush(route._under_way, (flow._end_count, flow.number, flow))
        for capacity in route.capacities:
            capacity.routes[route] = None
            capacity.num_flows += 1
            capacity.num_bytes += flow.num_bytes

    def _leave(self, flow: Flow, sent_bytes: float) -> None:
        """Count a flow out."""
        route = flow.route
        flow._end_count = None
        for capacity in route.capacities:
            capacity.num_flows -= 1
            capacity.num_bytes = capacity.num_bytes - flow.num_bytes if capacity.num_flows else 0.0
            capacity.carried_bytes += sent_bytes
        if not route._under_way:
            del self._active[route]
            route.rate_bytes_per_s = 0.0
            if not route._waiting:
                for capacity in route.capacities:
                    del capacity.routes[route]

    def _begin_waiting(self, freed: Sequence[Capacity]) -> list[Route]:
        """Let those begin that waited for these capacities and fit now, the longest wait first."""
        begun: dict[Route, None] = {}
        while True:
            heads = [route._waiting[0] for route in self._queues(freed) if self._may_begin(route._waiting[0])]
            if not heads:
                return list(begun)
            flow = min(heads, key=lambda head: head.number)
            flow.route._waiting.popleft()
            self._begin(flow)
            begun[flow.route] = None

    def _queues(self, capacities: Sequence[Capacity]) -> list[Route]:
        """Routes through any of these on which somebody waits; who was given up leaves the queue here."""
        routes = dict.fromkeys(
            route for capacity in capacities for route in capacity.routes if route._waiting
        )
        for route in routes:
            while route._waiting and route._waiting[0]._is_cancelled:
                route._waiting.popleft()
            if not route._waiting and route not in self._active:
                for capacity in route.capacities:
                    del capacity.routes[route]
        return [route for route in routes if route._waiting]

    def _share_anew(self, changed: Sequence[Route]) -> None:
        """Work out the rates of all flows that changes on these routes can reach, and when the next ends."""
        now = self._clock.now
        routes = self._reached_from(changed)
        for route, rate_bytes_per_s in _fair_rates(routes).items():
            if rate_bytes_per_s != route.rate_bytes_per_s:
                route._got_bytes = route.got_bytes(now)
                route._since_s = now
                route.rate_bytes_per_s = rate_bytes_per_s
        self._set_timer()

    def _reached_from(self, changed: Sequence[Route]) -> list[Route]:
        """The active routes that share a capacity with these, or with one that does, and so on."""
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

    def _on_timer(self, event: int) -> None:
        """Flows end that were due now."""
        if event != self._timer:
            return
        self._timer = None
        now = self._clock.now
        due = [route for route in self._active if route.next_end_s <= now]
        for route in due:
            end_count = route._under_way[0][0]
            route._got_bytes, route._since_s = end_count, now
            while route._under_way and route._under_way[0][0] <= end_count:
                flow = heappop(route._under_way)[2]
                self._leave(flow, flow.num_bytes)
                self._clock.at(now + route.latency_s, Phase.arrive, flow._arrive)
        self._begin_waiting(list(dict.fromkeys(capacity for route in due for capacity in route.capacities)))
        self._share_anew(due)


def _fair_rates(routes: Sequence[Route]) -> dict[Route, float]:
    """The max-min fair rate of each flow on these routes: nobody else uses their capacities."""
    left = {capacity: capacity.bytes_per_s for route in routes for capacity in route.capacities}
    num_flows = dict.fromkeys(left, 0)
    for route in routes:
        for capacity in route.capacities:
            num_flows[capacity] += len(route._under_way)
    rates: dict[Route, float] = {}
    while len(rates) < len(routes):
        tightest = min(
            (capacity for capacity in left if num_flows[capacity]),
            key=lambda capacity: left[capacity] / num_flows[capacity],
        )
        rate = left[tightest] / num_flows[tightest]
        for route in tightest.routes:
            if not route._under_way or route in rates:
                continue
            rates[route] = rate
            for capacity in route.capacities:
                num_flows[capacity] -= len(route._under_way)
                left[capacity] = max(left[capacity] - rate * len(route._under_way), 0.0)
    return rates
