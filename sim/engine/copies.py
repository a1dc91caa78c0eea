"""Copies of KV into and out of a replica's GPU memory, begun where their bytes come from."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.plan import Transfer
from sim.engine.links import Links


class Copies:
    """Begins the transfers of one replica's plans.

    links: between its own memory tiers. sources: what begins a copy from elsewhere, by `Transfer.source`.
    on_done(request_id, done_s) is called with every load on the links for which a sequence waits.
    """

    def __init__(self, links: Links, on_done: Callable[[int, float], None]) -> None:
        self.links = links
        self.sources: dict[str, Callable[[Transfer], None]] = {}
        self._on_done = on_done

    def begin(self, transfers: list[Transfer], now: float) -> float:
        """Begin them in order; returns for how many seconds the step waits for copies out of its blocks."""
        delay_s = 0.0
        for transfer in transfers:
            from_elsewhere = self.sources.get(transfer.source)
            if from_elsewhere is not None:
                from_elsewhere(transfer)
                continue
            done_s = self.links.begin(transfer, now)
            if transfer.seq is not None:
                self._on_done(transfer.seq.request_id, done_s)
            elif not self.links.overlapped:
                delay_s = max(delay_s, done_s - now)
        return delay_s
