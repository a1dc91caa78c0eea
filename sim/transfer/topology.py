"""Places replicas on nodes and derives the routes of `sim.transfer.network` from data sheets.

Replicas are placed in the order of their indices: devices of one kind fill a node, then the next one.

    replica 0 (2 devices)  replica 1 (2 devices)          replica 2 (4 devices)
    |---- out, in ----|    |---- out, in ----|            |---- out, in ----|
    |================= node 0 =================|          |===== node 1 ====|   (ports: ethernet)

The bandwidth of a replica's port is the sum over its devices, as each device sends its own share of the KV.

The interconnect of the replicas of a run has these routes, and the link failures on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, OneOf, Positive, PositiveInt, PositiveShare, Unit, check
from hwmodels.devices.device import Device
from hwmodels.devices.interconnect import Link
from hwmodels.iterations.memory_profile import GIB
from sim.engine.clock import Clock
from sim.records.run import LinkRecord
from sim.transfer.network import Capacity, Network, Route

KINDS = ("auto", "nvlink", "pcie", "infiniband", "ethernet")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings(Checked):
    """Settings of the network between replicas."""

    kind: Annotated[str, OneOf(KINDS)] = "auto"
    """nvlink, pcie, infiniband: that link of the devices, between any two replicas. ethernet: one port per
    node, shared by its replicas. auto: within a node nvlink if the device has it, else pcie; between nodes
    infiniband."""
    bandwidth_bytes_per_s: Annotated[Positive | None, Unit("bytes/s")] = None
    """Bandwidth per direction of the port of a device, with ethernet of a node; None: see its data sheet."""
    latency_s: Annotated[NonNegative | None, Unit("s")] = None
    """Seconds until the first byte arrives; None: as in the data sheet of the device."""
    reached_share: PositiveShare = 0.8
    """Share of these bandwidths that copies reach; Mooncake: 87 of 100 GB/s on 4 ports, 190 of 400 on 8."""
    fabric_bytes_per_s: Annotated[Positive | None, Unit("bytes/s")] = None
    """Bandwidth between all nodes together; None: no such limit."""
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
        self._num_unused = 0  # devices of the node that was filled last
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
        """Places a replica on devices that an equal one has left, else on the next unused ones.

        instead_of: a replica that is being removed, on the devices of which it is placed.
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
        """Returns the ports of a replica that routes have used, with their bandwidths without failures."""
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
    """A network to which replicas are added and removed, and in which links may be slow or down."""

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
        """Sets whether the link to a replica is up; while it is down, its flows stand still."""
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
