"""Replicates KV to the host memory of other replicas, for recovery from crashes.

    replica 0 --- what is new, every few iterations ---> host of replica 1     its neighbour, while it is up
    replica 0 crashes ... the router chooses replica 2
    replica 2 <-- what had arrived by then ---------------- host of replica 1   the rest is computed again

All KV that the sequences of a replica have computed since the last copy goes in one flow, which shares the
links with whatever else is on them. A flow that had not arrived when its replica crashed is lost. A replica
that holds a copy and goes down is replaced by the next replica that is up, to which all KV is sent again.
When a sequence gives up its KV, ended or preempted, its copy is dropped.

Left out: the copy costs the replica's iterations nothing (the GPU's copy engines do it); host memory has
room for all copies; what sequences share in a prefix cache is sent for each of them; branches are not
replicated, nor are replicas of a prefill pool, which have their sequences for the time of a prompt.
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
class _KvCopy:
    """The KV of one replica in another's host memory, as tokens by request id."""

    host: Replica
    sent: dict[int, int] = field(default_factory=dict)
    """Tokens that have arrived or are being sent, of the sequences that hold KV."""
    there: dict[int, int] = field(default_factory=dict)
    flows: dict[Flow, None] = field(default_factory=dict)
    """Under way."""


@dataclass(slots=True, eq=False)
class _Restore:
    """A request that was sent to `target` and reads its KV from `host`."""

    target: Replica
    host: Replica
    num_tokens: int = 0
    num_bytes: float = 0.0
    flow: Flow | None = None


class KvReplication:
    """All copies of KV of a run, made every `every_tokens` iterations."""

    def __init__(self, every_tokens: int, gateway: GatewayForTransfers, interconnect: Interconnect) -> None:
        self.every_tokens = every_tokens
        self.replicated_bytes = self.restored_bytes = 0.0
        self.num_restored_tokens = 0
        self._gateway = gateway
        self._interconnect = interconnect
        self._copies: dict[int, _KvCopy] = {}  # by replica whose KV it is
        self._left: dict[int, tuple[Replica, int]] = {}  # by request id: host, and tokens, after a crash
        self._restores: dict[int, _Restore] = {}  # by request id

    def copy(self, replica: Replica, computed: Mapping[int, int]) -> None:
        """Send what is new. computed: tokens of each sequence that holds KV, by request id."""
        kv_copy = self._copies.get(replica.index)
        if kv_copy is None:
            host = self._gateway.fleet.next_serving(replica)
            if host is None:
                return
            kv_copy = self._copies[replica.index] = _KvCopy(host)
        sent = kv_copy.sent
        new = {rid: tokens for rid, tokens in computed.items() if tokens > sent.get(rid, 0)}
        num_tokens = sum(tokens - sent.get(rid, 0) for rid, tokens in new.items())
        kv_copy.sent = {rid: max(tokens, sent.get(rid, 0)) for rid, tokens in computed.items()}
        kv_copy.there = {rid: tokens for rid, tokens in kv_copy.there.items() if rid in computed}
        if not num_tokens:
            return
        host = kv_copy.host
        route = self._interconnect.route(replica.index, host.index, host=host.index)
        num_bytes = num_tokens * replica.copies.links.bytes_per_token
        flow = self._interconnect.network.send(route, num_bytes, lambda: self._on_there(kv_copy, flow, new))
        kv_copy.flows[flow] = None

    def num_left(self, request_id: int) -> int:
        """Tokens of a request whose replica has crashed that can be read from a copy now."""
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
        kv_copy = self._copies.pop(replica.index, None)
        for request_id in lost:
            self._cancel(request_id)
            num_tokens = 0 if kv_copy is None else kv_copy.there.get(request_id, 0)
            if kv_copy is not None and num_tokens > self._left.get(request_id, (None, 0))[1]:
                self._left[request_id] = (kv_copy.host, num_tokens)
        if kv_copy is not None:
            self._stop(kv_copy)
        self._forget_host(replica)

    def gone(self, replica: Replica) -> None:
        """A replica has left the fleet, with its host."""
        kv_copy = self._copies.pop(replica.index, None)
        if kv_copy is not None:
            self._stop(kv_copy)
        self._forget_host(replica)

    def _forget_host(self, host: Replica) -> None:
        for index, kv_copy in list(self._copies.items()):
            if kv_copy.host is host:
                self._stop(kv_copy)
                del self._copies[index]
        for request_id, (where, _) in list(self._left.items()):
            if where is not host:
                continue
            del self._left[request_id]
            restore = self._restores.get(request_id)
            if restore is not None:
                self._cancel(request_id)
                go_on = partial(self._gateway.restart, request_id, is_resend=False)
                restore.target.abort(request_id, go_on)

    def _on_there(self, kv_copy: _KvCopy, flow: Flow, new: Mapping[int, int]) -> None:
        """A copy has arrived."""
        del kv_copy.flows[flow]
        self.replicated_bytes += flow.num_bytes
        kv_copy.there |= {rid: tokens for rid, tokens in new.items() if rid in kv_copy.sent}

    def _stop(self, kv_copy: _KvCopy) -> None:
        """Nothing more of a kv_copy is sent."""
        for flow in kv_copy.flows:
            self.replicated_bytes += self._interconnect.network.cancel(flow)
        kv_copy.flows.clear()

    def _cancel(self, request_id: int) -> None:
        """Cancel the restore of a request's KV, if there is one."""
        restore = self._restores.pop(request_id, None)
        if restore is not None and restore.flow is not None:
            self._interconnect.network.cancel(restore.flow)
