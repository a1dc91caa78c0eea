"""Copies of KV in the host memory of other replicas, for the day on which a replica crashes.

    replica 0 --- what is new, every few iterations ---> host of replica 1     its neighbour, while it is up
    replica 0 crashes ... the router chooses replica 2
    replica 2 <-- what had arrived by then ---------------- host of replica 1   the rest is computed again

All that the sequences of a replica have computed since the last copy goes in one flow, which shares the
links with whatever else is on them. A flow that had not arrived when its replica crashed is lost. A mirror
that goes is replaced by the next replica that is up, to which everything is sent anew. What a sequence gives
up, ended or preempted, its mirror gives up.

Left out: the copy costs the replica's iterations nothing (the GPU's copy engines do it); mirrors have room
for all KV; what sequences share in a prefix cache is sent for each of them; branches are not mirrored, nor
are replicas of a prefill pool, which have their sequences for the time of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from sim.engine.replica import Replica
from sim.transfer.gateway import GatewayForTransfers
from sim.transfer.interconnect import Interconnect
from sim.transfer.network import Flow


@dataclass(slots=True, eq=False)
class _Mirror:
    """What one replica has at another's host. Tokens by request id."""

    host: Replica
    sent: dict[int, int] = field(default_factory=dict)
    """Of those that hold KV: there, or on the way."""
    there: dict[int, int] = field(default_factory=dict)
    flows: dict[Flow, None] = field(default_factory=dict)
    """Under way."""


@dataclass(slots=True, eq=False)
class _Restore:
    """A request that was sent to `target`, to have its KV from `host`."""

    target: Replica
    host: Replica
    num_tokens: int = 0
    num_bytes: float = 0.0
    flow: Flow | None = None


class Mirrors:
    """All those of a run."""

    def __init__(self, every_tokens: int, gateway: GatewayForTransfers, interconnect: Interconnect) -> None:
        self.every_tokens = every_tokens
        self.mirrored_bytes = self.restored_bytes = 0.0
        self.num_restored_tokens = 0
        self._gateway = gateway
        self._interconnect = interconnect
        self._mirrors: dict[int, _Mirror] = {}  # by replica whose KV it is
        self._left: dict[int, tuple[Replica, int]] = {}  # by request id: host, and tokens, after a crash
        self._restores: dict[int, _Restore] = {}  # by request id

    def copy(self, replica: Replica, computed: Mapping[int, int]) -> None:
        """Send what is new. computed: tokens of each sequence that holds KV, by request id."""
        mirror = self._mirrors.get(replica.index)
        if mirror is None:
            host = self._gateway.fleet.next_serving(replica)
            if host is None:
                return
            mirror = self._mirrors[replica.index] = _Mirror(host)
        sent = mirror.sent
        new = {rid: tokens for rid, tokens in computed.items() if tokens > sent.get(rid, 0)}
        num_tokens = sum(tokens - sent.get(rid, 0) for rid, tokens in new.items())
        mirror.sent = {rid: max(tokens, sent.get(rid, 0)) for rid, tokens in computed.items()}
        mirror.there = {rid: tokens for rid, tokens in mirror.there.items() if rid in computed}
        if not num_tokens:
            return
        host = mirror.host
        route = self._interconnect.route(replica.index, host.index, host=host.index)
        num_bytes = num_tokens * replica.copies.links.bytes_per_token
        flow = self._interconnect.network.send(route, num_bytes, lambda: self._on_there(mirror, flow, new))
        mirror.flows[flow] = None

    def num_left(self, request_id: int) -> int:
        """Tokens of a request whose replica has crashed that can be read from a mirror now."""
        host, num_tokens = self._left.get(request_id, (None, 0))
        return num_tokens if host is not None and self._gateway.fleet.is_reached(host) else 0

    def expect(self, request_id: int, target: Replica) -> None:
        """A request goes to a replica that is to read its KV."""
        self._restores[request_id] = _Restore(target, self._left[request_id][0])

    def fetch(self, request_id: int, num_tokens: int) -> bool:
        """A replica has slot and blocks for so many tokens; False: it has them in its own host's memory."""
        restore = self._restores[request_id]
        host, target = restore.host, restore.target
        restore.num_tokens = num_tokens
        restore.num_bytes = num_tokens * target.copies.links.bytes_per_token
        if host is target:
            return False
        route = self._interconnect.route(host.index, target.index, host=host.index)
        restore.flow = self._interconnect.network.send(
            route, restore.num_bytes, partial(self.fetched, request_id)
        )
        return True

    def fetched(self, request_id: int) -> None:
        """KV has come to where it was wanted, unless that is over."""
        restore = self._restores.pop(request_id, None)
        if restore is None:
            return
        self.num_restored_tokens += restore.num_tokens
        self.restored_bytes += restore.num_bytes
        del self._left[request_id]
        restore.target.loaded(request_id)

    def admitted(self, request_id: int) -> None:
        """Work on a request goes on: it has its KV, perhaps all from a cache."""
        if self._restores.pop(request_id, None) is not None:
            del self._left[request_id]

    def ended(self, request_id: int) -> None:
        """A request has ended, or begins again: nothing of it is wanted any more."""
        self._left.pop(request_id, None)
        self._cancel(request_id)

    def crashed(self, replica: Replica, lost: list[int]) -> None:
        """A replica has lost these requests; what others had in its host's memory is gone."""
        mirror = self._mirrors.pop(replica.index, None)
        for request_id in lost:
            self._cancel(request_id)
            num_tokens = 0 if mirror is None else mirror.there.get(request_id, 0)
            if mirror is not None and num_tokens > self._left.get(request_id, (None, 0))[1]:
                self._left[request_id] = (mirror.host, num_tokens)
        if mirror is not None:
            self._stop(mirror)
        self._forget_host(replica)

    def gone(self, replica: Replica) -> None:
        """A replica has left the fleet, with its host."""
        mirror = self._mirrors.pop(replica.index, None)
        if mirror is not None:
            self._stop(mirror)
        self._forget_host(replica)

    def _forget_host(self, host: Replica) -> None:
        for index, mirror in list(self._mirrors.items()):
            if mirror.host is host:
                self._stop(mirror)
                del self._mirrors[index]
        for request_id, (where, _) in list(self._left.items()):
            if where is not host:
                continue
            del self._left[request_id]
            restore = self._restores.get(request_id)
            if restore is not None:
                self._cancel(request_id)
                go_on = partial(self._gateway.begin_again, request_id, is_resend=False)
                restore.target.abort(request_id, go_on)

    def _on_there(self, mirror: _Mirror, flow: Flow, new: Mapping[int, int]) -> None:
        """A copy has arrived."""
        del mirror.flows[flow]
        self.mirrored_bytes += flow.num_bytes
        mirror.there |= {rid: tokens for rid, tokens in new.items() if rid in mirror.sent}

    def _stop(self, mirror: _Mirror) -> None:
        """Nothing more of a mirror is sent."""
        for flow in mirror.flows:
            self.mirrored_bytes += self._interconnect.network.cancel(flow)
        mirror.flows.clear()

    def _cancel(self, request_id: int) -> None:
        """A request is not to have its KV from a mirror any more."""
        restore = self._restores.pop(request_id, None)
        if restore is not None and restore.flow is not None:
            self._interconnect.network.cancel(restore.flow)
