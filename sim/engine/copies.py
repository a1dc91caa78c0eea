"""Copies of KV into and out of the GPU memory of a replica."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.plan import Transfer
from sim.engine.links import Links


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
