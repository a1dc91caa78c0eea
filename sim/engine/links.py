"""The memory tiers of a replica: the links between them, and the copies of KV over these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from policies.core.plan import AdapterLoad, Transfer


@dataclass(kw_only=True, slots=True)
class Links:
    """Bandwidths of one replica's links, and the time at which each direction is free again.

    In each direction there is one copy at a time. It begins when the direction is free, and takes latency +
    bytes / bandwidth. Host and GPU can send to each other at the same time (PCIe is full duplex); data from
    disk streams through host memory, at the lower of the two bandwidths.
    """

    bytes_per_token: float = 0.0
    """Bytes of KV per token, over all devices of the replica."""
    host_bytes_per_s: float = float("inf")
    """Bandwidth between GPUs and host in each direction, over all devices of the replica."""
    disk_bytes_per_s: float = float("inf")
    """Bandwidth between host and disk."""
    latency_s: float = 0.0
    overlapped: bool = True
    """Whether a step may run while KV is still being copied out of its blocks (through a staging buffer)."""
    slowdown: float = 1.0
    """Factor on the duration of copies that begin now; > 1 during a failure."""
    merge_s: float = 0.0
    """Seconds to merge an adapter into the weights in place of another, once it is in GPU memory."""
    _busy_until_s: dict[tuple[str, str], float] = field(default_factory=dict, init=False)

    def begin(self, transfer: Transfer, now: float) -> float:
        """Starts a copy of KV; returns the time at which it will be complete, s."""
        num_bytes = transfer.num_tokens * self.bytes_per_token
        return self._copied_s(transfer.source, transfer.target, num_bytes, now)

    def load(self, load: AdapterLoad, now: float) -> float:
        """Starts loading an adapter into GPU memory; returns the time at which it can be used, s."""
        copied_s = self._copied_s(load.source, "gpu", load.num_bytes, now) if load.num_bytes else now
        return copied_s + self.merge_s if load.merges else copied_s

    def _copied_s(self, source: str, target: str, num_bytes: float, now: float) -> float:
        direction = (source, target)
        bandwidth = self.host_bytes_per_s
        if "disk" in direction:
            bandwidth = (
                self.disk_bytes_per_s if "host" in direction else min(bandwidth, self.disk_bytes_per_s)
            )
        start_s = max(now, self._busy_until_s.get(direction, now))
        done_s = start_s + self.slowdown * (self.latency_s + num_bytes / bandwidth)
        self._busy_until_s[direction] = done_s
        return done_s


class Copies:
    """Begins the transfers of one replica's plans.

    links: the links between its own memory tiers. sources: the functions that begin copies from other
    sources, by `Transfer.source`. on_done(request_id, done_s) is called for every load over the links for
    which a sequence waits.
    """

    def __init__(self, links: Links, on_done: Callable[[int, float], None]) -> None:
        self.links = links
        self.sources: dict[str, Callable[[Transfer], None]] = {}
        self._on_done = on_done

    def begin(self, transfers: list[Transfer], now: float) -> float:
        """Begins transfers in order.

        Returns the seconds by which the step is delayed, as blocks that it writes to are still being read.
        """
        delay_s = 0.0
        for transfer in transfers:
            begin_copy = self.sources.get(transfer.source)
            if begin_copy is not None:
                begin_copy(transfer)
                continue
            done_s = self.links.begin(transfer, now)
            if transfer.seq is not None:
                self._on_done(transfer.seq.request_id, done_s)
            elif not self.links.overlapped:
                delay_s = max(delay_s, done_s - now)
        return delay_s
