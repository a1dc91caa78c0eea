"""Where replicas stand and what lies between them: from data sheets to the routes of `sim.transfer.network`.

Replicas are placed in the order of their numbers: devices of one kind fill a node, then the next.

    replica 0 (2 devices)  replica 1 (2 devices)          replica 2 (4 devices)
    |---- out, in ----|    |---- out, in ----|            |---- out, in ----|
    |================= node 0 =================|          |===== node 1 ====|   (ports: ethernet)

A port of a replica is as wide as those of its devices together: each sends the share of the KV that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from hwmodels.checks import check_finite, check_whole
from hwmodels.devices.device import Device
from hwmodels.devices.interconnect import Link
from hwmodels.iterations.memory import GIB
from sim.transfer.network import Capacity, Route

KINDS = ("auto", "nvlink", "pcie", "infiniband", "ethernet")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """What KV travels on between replicas."""

    kind: str = "auto"
    """nvlink, pcie, infiniband: that link of the devices, between any two replicas. ethernet: a port a node,
    which all its replicas share. auto: within a node nvlink, or else pcie, between nodes infiniband."""
    bandwidth_bytes_per_s: float | None = None
    """Per direction, of a device's port, or of a node's with ethernet; None: the device's data sheet."""
    latency_s: float | None = None
    """Until the first byte arrives; None: the device's data sheet."""
    reached_share: float = 0.8
    """Of these bandwidths that copies reach: Mooncake's engine 87 of 100 GB/s on 4 ports, 190 of 400 on 8."""
    fabric_bytes_per_s: float | None = None
    """What all nodes together can send each other; None: no such limit."""
    max_transfers: int | None = None
    """Sent, or received, by one replica at the same time; others wait for their turn. None: no limit."""
    buffer_gib: float | None = None
    """Memory of a replica, in each direction, that the KV under way must fit into; None: no limit."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind}: must be one of {', '.join(KINDS)}")
        for name in ("bandwidth_bytes_per_s", "fabric_bytes_per_s"):
            if getattr(self, name) is not None:
                check_finite(name, getattr(self, name), unit="bytes/s")
        if self.latency_s is not None:
            check_finite("latency_s", self.latency_s, unit="s", zero_allowed=True)
        if self.buffer_gib is not None:
            check_finite("buffer_gib", self.buffer_gib, unit="GiB")
        if not 0 < self.reached_share <= 1:
            raise ValueError(f"reached_share={self.reached_share}: must be > 0 and <= 1")
        if self.max_transfers is not None:
            check_whole("max_transfers", self.max_transfers, remedy="; null for no limit")
        if self.kind == "auto" and (self.bandwidth_bytes_per_s is not None or self.latency_s is not None):
            raise ValueError(
                "kind=auto, bandwidth_bytes_per_s or latency_s set: two links have one each; "
                "set them for kind=nvlink, pcie, infiniband or ethernet"
            )
        if self.kind == "ethernet" and (self.bandwidth_bytes_per_s is None or self.latency_s is None):
            raise ValueError(
                "kind=ethernet: bandwidth_bytes_per_s and latency_s must be set, no data sheet of a device "
                "has them"
            )

    def check(self, device: Device) -> None:
        """Raise ValueError where a device does not have such a link."""
        self.link_of(device, is_same_node=False)

    def link_of(self, device: Device, *, is_same_node: bool) -> Link:
        """From a device to another one's."""
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
    """Where a replica stands."""

    device: Device
    num_devices: int
    nodes: range
    host_bytes_per_s: float
    """Between its GPUs and its host's memory."""


class Topology:
    """The ports of replicas, and the routes between them."""

    def __init__(self, settings: NetworkSettings) -> None:
        self.settings = settings
        self._sites: dict[int, _Site] = {}
        self._next_node = 0
        self._num_left = 0  # devices of the node begun last
        self._begun: Device | None = None  # what they are
        self._capacities: dict[str, Capacity] = {}
        self._ports: dict[int, list[tuple[Capacity, float]]] = {}  # by replica
        self._routes: dict[tuple[int, int, int | None], Route] = {}
        self._free: list[_Site] = []  # left by replicas that have gone

    @property
    def capacities(self) -> dict[str, Capacity]:
        """Those in use so far, by name."""
        return self._capacities

    def place(
        self,
        replica: int,
        device: Device,
        num_devices: int,
        host_bytes_per_s: float = inf,
        instead_of: int | None = None,
    ) -> None:
        """A replica comes, to devices that one like it has left, or else to the next free ones.

        instead_of: to those of another one that is just going.
        """
        if instead_of is not None:
            self._sites[replica] = self._sites.pop(instead_of)
            return
        left = next(
            (site for site in self._free if (site.device, site.num_devices) == (device, num_devices)), None
        )
        if left is not None:
            self._free.remove(left)
            self._sites[replica] = replace(left, host_bytes_per_s=host_bytes_per_s)
            return
        self.settings.check(device)
        if device != self._begun or num_devices > self._num_left:
            num_nodes = -(-num_devices // device.gpus_per_node)
            nodes = range(self._next_node, self._next_node + num_nodes)
            self._num_left = num_nodes * device.gpus_per_node - num_devices
            self._next_node += num_nodes
            self._begun = device
        else:
            nodes = range(self._next_node - 1, self._next_node)
            self._num_left -= num_devices
        self._sites[replica] = _Site(device, num_devices, nodes, host_bytes_per_s)

    def remove(self, replica: int) -> list[tuple[Capacity, float]]:
        """A replica has gone, its devices are free; returns the ports that it had, as `ports`."""
        site = self._sites.pop(replica, None)
        if site is not None:  # else another one has taken its place
            self._free.append(site)
        ports = self._ports.pop(replica, [])
        for capacity, _ in ports:
            del self._capacities[capacity.name]
        self._routes = {ends: route for ends, route in self._routes.items() if replica not in ends[:2]}
        return ports

    def ports(self, replica: int) -> list[tuple[Capacity, float]]:
        """Those of a replica that are in use so far, and what passes them when nothing is wrong."""
        return self._ports.get(replica, [])

    def has_route(self, source: int, target: int, host: int | None = None) -> bool:
        """Whether there is one already."""
        return (source, target, host) in self._routes

    def route(self, source: int, target: int, *, host: int | None = None) -> Route:
        """From one replica's GPUs to another's. Raises KeyError for a replica that was not placed.

        host: that one of the two whose host's memory is meant instead.
        """
        route = self._routes.get((source, target, host))
        if route is None:
            route = self._routes[source, target, host] = self._make_route(source, target, host)
        return route

    def _make_route(self, source: int, target: int, host: int | None) -> Route:
        sites = (self._sites[source], self._sites[target])
        is_same_node = sites[0].nodes == sites[1].nodes and len(sites[0].nodes) == 1
        links = [self.settings.link_of(site.device, is_same_node=is_same_node) for site in sites]
        kind = links[0].name
        is_shared = kind == "ethernet"
        carriers = (
            [site.device.pcie for site in sites] if is_shared else links
        )  # PCIe leads to the node's port
        capacities = [self._port(source, "out", sites[0], carriers[0])]
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

    def _host_port(self, replica: int, way: str) -> Capacity:
        """All that is read from, or written to, its host's memory for others."""
        bytes_per_s = self._sites[replica].host_bytes_per_s
        return self._own(replica, f"replica {replica} host {way}", bytes_per_s)

    def _port(self, replica: int, way: str, site: _Site, link: Link) -> Capacity:
        """All that leaves, or reaches, a replica over one kind of link."""
        bytes_per_s = link.bandwidth_bytes_per_s * site.num_devices * self.settings.reached_share
        return self._own(replica, f"replica {replica} {way}, {link.name}", bytes_per_s, is_bounded=True)

    def _own(self, replica: int, name: str, bytes_per_s: float, *, is_bounded: bool = False) -> Capacity:
        """A port of a replica."""
        is_new = name not in self._capacities
        port = self._capacity(name, bytes_per_s, is_bounded=is_bounded)
        if is_new:
            self._ports.setdefault(replica, []).append((port, bytes_per_s))
        return port

    def _node_port(self, site: _Site, way: str, link: Link) -> Capacity:
        bytes_per_s = link.bandwidth_bytes_per_s * len(site.nodes) * self.settings.reached_share
        return self._capacity(f"node {site.nodes[0]} {way}, {link.name}", bytes_per_s)

    def _capacity(self, name: str, bytes_per_s: float, *, is_bounded: bool = False) -> Capacity:
        capacity = self._capacities.get(name)
        if capacity is None:
            max_bytes = inf if self.settings.buffer_gib is None else self.settings.buffer_gib * GIB
            bounds = (self.settings.max_transfers, max_bytes) if is_bounded else (None, None)
            capacity = self._capacities[name] = Capacity(name, bytes_per_s, *bounds)
        return capacity
