"""The ways of KV and adapters between a replica's memory tiers: one copy at a time in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.plan import AdapterLoad, Transfer


@dataclass(kw_only=True, slots=True)
class Links:
    """Bandwidths of one replica, and until when each way is busy.

    A copy begins when its way is free, and takes latency + bytes / bandwidth. Host and GPU can send to each
    other at the same time (PCIe is full duplex); what is read from disk passes through host memory, as a
    stream, and so at the slower of the two bandwidths.
    """

    bytes_per_token: float = 0.0
    """Of KV, over all devices of the replica."""
    host_bytes_per_s: float = float("inf")
    """Between GPUs and host, each direction, all devices of the replica together."""
    disk_bytes_per_s: float = float("inf")
    """Between host and disk."""
    latency_s: float = 0.0
    overlapped: bool = True
    """Whether a step may run while KV is still copied out of blocks that it takes: from a staging buffer."""
    slowdown: float = 1.0
    """Copies that begin now take so many times as long: something is wrong with the ways."""
    merge_s: float = 0.0
    """To put an adapter into the weights in the place of another, once it is there."""
    _busy_until_s: dict[tuple[str, str], float] = field(default_factory=dict, init=False)

    def begin(self, transfer: Transfer, now: float) -> float:
        """Start a copy; returns when it will be done."""
        num_bytes = transfer.num_tokens * self.bytes_per_token
        return self._copied_s(transfer.source, transfer.target, num_bytes, now)

    def load(self, load: AdapterLoad, now: float) -> float:
        """Start to bring an adapter to the GPU; returns when it can be used."""
        copied_s = self._copied_s(load.source, "gpu", load.num_bytes, now) if load.num_bytes else now
        return copied_s + self.merge_s if load.merges else copied_s

    def _copied_s(self, source: str, target: str, num_bytes: float, now: float) -> float:
        way = (source, target)
        bandwidth = self.host_bytes_per_s
        if "disk" in way:
            bandwidth = self.disk_bytes_per_s if "host" in way else min(bandwidth, self.disk_bytes_per_s)
        start_s = max(now, self._busy_until_s.get(way, now))
        done_s = start_s + self.slowdown * (self.latency_s + num_bytes / bandwidth)
        self._busy_until_s[way] = done_s
        return done_s
