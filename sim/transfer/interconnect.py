"""The interconnect of the replicas of a run: routes of the network, and link failures on them."""

from __future__ import annotations

from math import inf

from hwmodels.devices.device import Device
from sim.engine.clock import Clock
from sim.records.run import LinkRecord
from sim.transfer.network import Network, Route
from sim.transfer.topology import NetworkSettings, Topology


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
