"""The interconnect of a run's replicas: the routes of its network, and the link failures on them."""

from __future__ import annotations

from hwmodels.devices.device import Device
from sim.engine.clock import Clock
from sim.records.run import LinkRecord
from sim.transfer.network import Network, Route
from sim.transfer.topology import NetworkSettings, Topology


class Interconnect:
    """A network whose replicas come and go, are slow to reach, or cannot be reached."""

    def __init__(self, settings: NetworkSettings, clock: Clock) -> None:
        self.network = Network(clock)
        self._clock = clock
        self._topology = Topology(settings)
        self._down: set[int] = set()  # replicas that cannot be reached
        self._slow: dict[int, float] = {}  # and how slow the links of others are
        self._gone: list[LinkRecord] = []  # ports of replicas that have gone

    def place(
        self,
        replica: int,
        device: Device,
        num_devices: int,
        host_bytes_per_s: float,
        instead_of: int | None = None,
    ) -> None:
        """A replica comes: see `Topology.place`."""
        self._topology.place(replica, device, num_devices, host_bytes_per_s, instead_of)

    def remove(self, replica: int) -> None:
        """A replica has gone, and nothing is under way to it or from it."""
        for capacity, bytes_per_s in self._topology.remove(replica):
            carried_bytes = self.network.carried_bytes(capacity, self._clock.now)
            self._gone.append(LinkRecord(capacity.name, bytes_per_s, carried_bytes))
        self._down.discard(replica)
        self._slow.pop(replica, None)

    def route(self, source: int, target: int, *, host: int | None = None) -> Route:
        """From one replica to another, slowed by the link failures of both; host: see `Topology.route`."""
        is_new = not self._topology.has_route(source, target, host)
        route = self._topology.route(source, target, host=host)
        if is_new and (self._down or self._slow):
            self._set_ports(source)
            self._set_ports(target)
        return route

    def reach(self, replica: int, *, is_reached: bool) -> None:
        """The link to a replica is lost, what is on it stands still; or it is there again."""
        if is_reached:
            self._down.discard(replica)
        else:
            self._down.add(replica)
        self._set_ports(replica)

    def slow_links(self, replica: int, factor: float) -> None:
        """What goes to a replica, or leaves it, takes `factor` times as long."""
        self._slow[replica] = factor
        self._set_ports(replica)

    def records(self, end_s: float) -> tuple[LinkRecord, ...]:
        """What each link has carried, and what it can carry if nothing is wrong with it."""
        sound = {
            capacity: bytes_per_s
            for replica in {*self._down, *self._slow}
            for capacity, bytes_per_s in self._topology.ports(replica)
        }
        there = (
            LinkRecord(
                name, sound.get(capacity, capacity.bytes_per_s), self.network.carried_bytes(capacity, end_s)
            )
            for name, capacity in self._topology.capacities.items()
        )
        return (*self._gone, *there)

    def _set_ports(self, replica: int) -> None:
        for capacity, bytes_per_s in self._topology.ports(replica):
            share = 0.0 if replica in self._down else 1 / self._slow.get(replica, 1.0)
            self.network.set_capacity(capacity, bytes_per_s * share)
