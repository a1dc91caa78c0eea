"""The network between replicas: links and routes from data sheets, and flows of bytes that share them.

Concurrent flows share bandwidth, max-min fair, in simulated time.

This is a fluid model: a flow has a rate at every instant. Rates are max-min fair (Bertsekas and Gallager,
Data Networks, 6.5.2): no flow can get a higher rate without lowering the rate of an equally fast or slower
flow. They are computed by progressive filling, whenever a flow begins or ends or a capacity changes, for the
affected flows.

    egress of A --+                   route A -> B: (egress of A, fabric, ingress of B)
                  +-- fabric --+
    egress of C --+            +-- ingress of B

All flows of one route have the same rate, so a route counts the bytes sent per flow, and a flow ends when
that count has grown by its bytes: the work depends on the number of routes in use, not on the number of
flows.

`Topology` places replicas on nodes and derives routes from data sheets. Replicas are placed in the order of
their indices: devices of one kind fill one node after the other.

    replica 0 (2 devices)  replica 1 (2 devices)          replica 2 (4 devices)
    |---- out, in ----|    |---- out, in ----|            |---- out, in ----|
    |================= node 0 =================|          |===== node 1 ====|   (ports: ethernet)

The bandwidth of a replica's port is the sum over its devices, because each device sends its own share of the
KV. `Interconnect` combines these routes with link failures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Annotated

from simpy import Event

from fieldlimits import Checked, NonNegative, OneOf, Positive, PositiveInt, PositiveShare, Unit, check
from hwmodels.device import Device, Link
from hwmodels.host import GIB
from sim.engine.clock import Clock, Moment, Phase
from sim.records.run import LinkRecord


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
        self._sent_bytes = 0.0  # bytes sent by each flow since the route was idle, as of _since_s
        self._since_s = 0.0
        self._active_flows: list[tuple[float, int, Flow]] = []  # a heap by the count at the end of a flow
        self._queue: deque[Flow] = deque()

    @property
    def bytes_per_s(self) -> float:
        """Rate of a single flow on all capacities of the route."""
        return min(capacity.bytes_per_s for capacity in self.capacities)

    @property
    def next_end_s(self) -> float:
        """Time at which the first of its flows ends at the current rate, s; inf: never."""
        if not self._active_flows or not self.rate_bytes_per_s:
            return inf
        return self._since_s + (self._active_flows[0][0] - self._sent_bytes) / self.rate_bytes_per_s

    def sent_bytes_per_flow(self, now: float) -> float:
        """Returns the bytes sent by `now` by a flow that began when the route was idle."""
        return self._sent_bytes + self.rate_bytes_per_s * (now - self._since_s)


class Flow(Moment):
    """An active or waiting transfer of bytes, which is also the event of the arrival of its last byte.

    on_done is called at that time. A process waits for it with `yield flow`.
    """

    def __init__(
        self, clock: Clock, number: int, route: Route, num_bytes: float, on_done: Callable[[], None] | None
    ) -> None:
        Moment.__init__(self, clock, None if on_done is None else lambda event: on_done())
        self.number = number
        self.route = route
        self.num_bytes = num_bytes
        self.began_s: float | None = None
        self._end_count: float | None = None  # while active: its route's count at its end
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
        """Sets the bandwidth of a capacity from now on; 0: a lost link, on which flows stop."""
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
        """Counts bytes that have passed a route outside of flows as carried."""
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
        """Begins the flows that waited for these capacities and now fit, in the order of sending."""
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
        """Computes the rates of all flows affected by changes on these routes, and sets the timer."""
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


KINDS = ("auto", "nvlink", "pcie", "infiniband", "ethernet")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings(Checked):
    """Settings of the network between replicas."""

    kind: Annotated[str, OneOf(KINDS)] = "auto"
    """nvlink, pcie, infiniband: this link of the devices, between any two replicas. ethernet: one port per
    node, shared by its replicas. auto: within a node nvlink if the device has it, else pcie; between nodes
    infiniband.
    """
    bandwidth_bytes_per_s: Annotated[Positive | None, Unit("bytes/s")] = None
    """Bandwidth per direction of a device's port (with ethernet, of a node's port); None: from the data
    sheet.
    """
    latency_s: Annotated[NonNegative | None, Unit("s")] = None
    """Seconds until the first byte arrives; None: from the device's data sheet."""
    reached_share: PositiveShare = 0.8
    """Share of these bandwidths reached by copies; Mooncake: 87 of 100 GB/s on 4 ports, 190 of 400 on 8."""
    fabric_bytes_per_s: Annotated[Positive | None, Unit("bytes/s")] = None
    """Total bandwidth between all nodes; None: no such limit."""
    max_transfers: Annotated[PositiveInt | None, "null for no limit"] = None
    """Maximum number of concurrent transfers from, and to, one replica; others wait. None: no limit."""
    buffer_gib: Annotated[Positive | None, Unit("GiB")] = None
    """Transfer buffer of a replica in each direction, which limits the KV in flight; None: no limit."""

    def __post_init__(self) -> None:
        check(self)
        if self.kind == "auto" and (self.bandwidth_bytes_per_s is not None or self.latency_s is not None):
            raise ValueError(
                "kind=auto: bandwidth_bytes_per_s and latency_s must be null, as auto uses two links; "
                "to set them, choose kind=nvlink, pcie, infiniband or ethernet"
            )
        if self.kind == "ethernet" and (self.bandwidth_bytes_per_s is None or self.latency_s is None):
            raise ValueError(
                "kind=ethernet: bandwidth_bytes_per_s and latency_s must be set, as the data sheets of "
                "devices do not have them"
            )

    def check(self, device: Device) -> None:
        """Raises ValueError if a device does not have a link of this kind."""
        self.link_of(device, is_same_node=False)

    def link_of(self, device: Device, *, is_same_node: bool) -> Link:
        """Returns the link between two devices of this kind. Raises ValueError if there is none."""
        kind = self.kind
        if kind == "auto":
            kind = "infiniband" if not is_same_node else "pcie" if device.scale_up is None else "nvlink"
        own = {"nvlink": device.scale_up, "infiniband": device.inter_node}.get(kind, device.pcie)
        bandwidth_bytes_per_s, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        if own is not None:
            bandwidth_bytes_per_s = bandwidth_bytes_per_s or own.bandwidth_bytes_per_s
            latency_s = own.latency_s if latency_s is None else latency_s
        if bandwidth_bytes_per_s is None or latency_s is None:
            raise ValueError(
                f"network.kind={self.kind}: {device.name} has no such link; set "
                "network.bandwidth_bytes_per_s and network.latency_s, or choose another kind"
            )
        return Link(name=kind, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)


@dataclass(frozen=True, slots=True)
class _Site:
    """The placement of a replica."""

    device: Device
    num_devices: int
    nodes: range
    host_bytes_per_s: float
    """Bandwidth between its GPUs and the memory of its host."""


class Topology:
    """The ports of replicas, and the routes between them."""

    def __init__(self, settings: NetworkSettings) -> None:
        self.settings = settings
        self._sites: dict[int, _Site] = {}
        self._next_node = 0
        self._num_unused = 0  # devices of the last filled node
        self._unused_device: Device | None = None  # the kind of these
        self._capacities: dict[str, Capacity] = {}
        self._ports: dict[int, list[tuple[Capacity, float]]] = {}  # by replica index
        self._routes: dict[tuple[int, int, int | None], Route] = {}
        self._free: list[_Site] = []  # of removed replicas

    @property
    def capacities(self) -> dict[str, Capacity]:
        """Capacities that routes have used so far, by name."""
        return self._capacities

    def place(
        self,
        replica: int,
        device: Device,
        num_devices: int,
        host_bytes_per_s: float = inf,
        instead_of: int | None = None,
    ) -> None:
        """Places a replica on devices left by an equal one, or else on the next unused ones.

        instead_of: a replica being removed, whose devices it takes over.
        """
        if instead_of is not None:
            self._sites[replica] = self._sites.pop(instead_of)
            return
        reused = next(
            (site for site in self._free if (site.device, site.num_devices) == (device, num_devices)), None
        )
        if reused is not None:
            self._free.remove(reused)
            self._sites[replica] = replace(reused, host_bytes_per_s=host_bytes_per_s)
            return
        self.settings.check(device)
        if device != self._unused_device or num_devices > self._num_unused:
            num_nodes = -(-num_devices // device.gpus_per_node)
            nodes = range(self._next_node, self._next_node + num_nodes)
            self._num_unused = num_nodes * device.gpus_per_node - num_devices
            self._next_node += num_nodes
            self._unused_device = device
        else:
            nodes = range(self._next_node - 1, self._next_node)
            self._num_unused -= num_devices
        self._sites[replica] = _Site(device, num_devices, nodes, host_bytes_per_s)

    def remove(self, replica: int) -> list[tuple[Capacity, float]]:
        """Removes a replica, which frees its devices; returns its ports, as `ports` does."""
        site = self._sites.pop(replica, None)
        if site is not None:  # None: another replica has taken its devices
            self._free.append(site)
        ports = self._ports.pop(replica, [])
        for capacity, _ in ports:
            del self._capacities[capacity.name]
        self._routes = {ends: route for ends, route in self._routes.items() if replica not in ends[:2]}
        return ports

    def ports(self, replica: int) -> list[tuple[Capacity, float]]:
        """Returns the used ports of a replica, with their bandwidths without failures."""
        return self._ports.get(replica, [])

    def has_route(self, source: int, target: int, host: int | None = None) -> bool:
        """Returns whether `route` has been called with these arguments before."""
        return (source, target, host) in self._routes

    def route(self, source: int, target: int, *, host: int | None = None, num_senders: float = inf) -> Route:
        """Returns the route from the GPUs of one replica to those of another.

        host: one of the two replicas, for which the route ends in the memory of its host instead of its GPUs.
        num_senders: GPUs of the source that send, if not all do; equal in all calls for two replicas.
        Raises KeyError for a replica that was not placed.
        """
        route = self._routes.get((source, target, host))
        if route is None:
            route = self._routes[source, target, host] = self._make_route(source, target, host, num_senders)
        return route

    def _make_route(self, source: int, target: int, host: int | None, num_senders: float) -> Route:
        sites = (self._sites[source], self._sites[target])
        is_same_node = sites[0].nodes == sites[1].nodes and len(sites[0].nodes) == 1
        links = [self.settings.link_of(site.device, is_same_node=is_same_node) for site in sites]
        kind = links[0].name
        is_shared = kind == "ethernet"
        carriers = (
            [site.device.pcie for site in sites] if is_shared else links
        )  # PCIe leads to the node's port
        capacities = [self._port(source, "out", sites[0], carriers[0])]
        if num_senders < sites[0].num_devices:
            name = f"replica {source} out from {num_senders:.3g} devices, {carriers[0].name}"
            bytes_per_s = carriers[0].bandwidth_bytes_per_s * num_senders * self.settings.reached_share
            capacities.append(self._own(source, name, bytes_per_s))
        if is_shared:
            capacities.append(self._node_port(sites[0], "out", links[0]))
        if kind in ("infiniband", "ethernet") and self.settings.fabric_bytes_per_s is not None:
            capacities.append(self._capacity("fabric", self.settings.fabric_bytes_per_s))
        if is_shared:
            capacities.append(self._node_port(sites[1], "in", links[1]))
        capacities.append(self._port(target, "in", sites[1], carriers[1]))
        if host is not None and self._sites[host].host_bytes_per_s < inf:
            capacities.append(self._host_port(host, "out" if host == source else "in"))
        return Route(capacities, max(link.latency_s for link in links))

    def _host_port(self, replica: int, direction: str) -> Capacity:
        """Returns the capacity for reads (out) or writes (in) of a host's memory by other replicas."""
        bytes_per_s = self._sites[replica].host_bytes_per_s
        return self._own(replica, f"replica {replica} host {direction}", bytes_per_s)

    def _port(self, replica: int, direction: str, site: _Site, link: Link) -> Capacity:
        """Returns the capacity for all bytes that leave or reach a replica over one kind of link."""
        bytes_per_s = link.bandwidth_bytes_per_s * site.num_devices * self.settings.reached_share
        return self._own(replica, f"replica {replica} {direction}, {link.name}", bytes_per_s, is_bounded=True)

    def _own(self, replica: int, name: str, bytes_per_s: float, *, is_bounded: bool = False) -> Capacity:
        """Returns a port of a replica, which is created at its first use."""
        is_new = name not in self._capacities
        port = self._capacity(name, bytes_per_s, is_bounded=is_bounded)
        if is_new:
            self._ports.setdefault(replica, []).append((port, bytes_per_s))
        return port

    def _node_port(self, site: _Site, direction: str, link: Link) -> Capacity:
        bytes_per_s = link.bandwidth_bytes_per_s * len(site.nodes) * self.settings.reached_share
        return self._capacity(f"node {site.nodes[0]} {direction}, {link.name}", bytes_per_s)

    def _capacity(self, name: str, bytes_per_s: float, *, is_bounded: bool = False) -> Capacity:
        capacity = self._capacities.get(name)
        if capacity is None:
            max_bytes = inf if self.settings.buffer_gib is None else self.settings.buffer_gib * GIB
            bounds = (self.settings.max_transfers, max_bytes) if is_bounded else (None, None)
            capacity = self._capacities[name] = Capacity(name, bytes_per_s, *bounds)
        return capacity


class Interconnect:
    """A network with replicas that are added and removed, and with links that may be slow or down."""

    def __init__(self, settings: NetworkSettings, clock: Clock) -> None:
        self.network = Network(clock)
        self._clock = clock
        self._topology = Topology(settings)
        self._down: set[int] = set()  # replicas with a lost link
        self._slow: dict[int, float] = {}  # factor on durations, by replica
        self._gone: list[LinkRecord] = []  # ports of removed replicas

    def place(
        self,
        replica: int,
        device: Device,
        num_devices: int,
        host_bytes_per_s: float,
        instead_of: int | None = None,
    ) -> None:
        """Adds a replica: see `Topology.place`."""
        self._topology.place(replica, device, num_devices, host_bytes_per_s, instead_of)

    def remove(self, replica: int) -> None:
        """Removes a replica to and from which there are no flows."""
        for capacity, bytes_per_s in self._topology.remove(replica):
            carried_bytes = self.network.carried_bytes(capacity, self._clock.now)
            self._gone.append(LinkRecord(capacity.name, bytes_per_s, carried_bytes))
        self._down.discard(replica)
        self._slow.pop(replica, None)

    def route(self, source: int, target: int, *, host: int | None = None, num_senders: float = inf) -> Route:
        """Returns the route from one replica to another, with link failures; see `Topology.route`."""
        is_new = not self._topology.has_route(source, target, host)
        route = self._topology.route(source, target, host=host, num_senders=num_senders)
        if is_new and (self._down or self._slow):
            self._set_ports(source)
            self._set_ports(target)
        return route

    def set_reached(self, replica: int, *, is_reached: bool) -> None:
        """Sets whether the link to a replica is up; while it is down, its flows stop."""
        if is_reached:
            self._down.discard(replica)
        else:
            self._down.add(replica)
        self._set_ports(replica)

    def slow_links(self, replica: int, factor: float) -> None:
        """Multiplies the duration of transfers to and from a replica by `factor`; 1: normal speed."""
        self._slow[replica] = factor
        self._set_ports(replica)

    def records(self, end_s: float) -> tuple[LinkRecord, ...]:
        """Returns the bytes that each link has carried by end_s, and its bandwidth without failures."""
        nominal = {
            capacity: bytes_per_s
            for replica in {*self._down, *self._slow}
            for capacity, bytes_per_s in self._topology.ports(replica)
        }
        present = (
            LinkRecord(
                name, nominal.get(capacity, capacity.bytes_per_s), self.network.carried_bytes(capacity, end_s)
            )
            for name, capacity in self._topology.capacities.items()
        )
        return (*self._gone, *present)

    def _set_ports(self, replica: int) -> None:
        for capacity, bytes_per_s in self._topology.ports(replica):
            share = 0.0 if replica in self._down else 1 / self._slow.get(replica, 1.0)
            self.network.set_capacity(capacity, bytes_per_s * share)
