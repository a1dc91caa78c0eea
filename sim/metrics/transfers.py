"""Computes the figures of KV transfers from prefill to decode replicas: tokens, bytes, seconds, link use."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.records.event_rows import TIERS, Event
from sim.records.table import AnyTable, column


def transferred(requests: AnyTable) -> AnyTable:
    """Returns the rows of requests with a prefill replica; none if the table does not name it."""
    if "prefill_replica" not in requests:
        return requests[:0]
    return requests[column(requests, "prefill_replica") >= 0]


class KvTransferUse(Figure):
    """KV transfers of the measured requests, and the use of the links; None if no KV was transferred.

    seconds: from the allocation on the decode replica to the last byte. tokens, cached_tokens: tokens of the
    sequences transferred in the whole run, and how many of these the decode replica had in its cache.
    share_of_e2e: transfer seconds of finished requests over their E2E. links: carried bytes over what the
    link could have carried in the whole run; mean over the ports and switches in use, and of the fullest.
    """

    name = "kv_transfer"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.seconds = self.kept.values()

    def merge(self, other: KvTransferUse) -> None:
        super().merge(other)
        self.seconds.merge(other.seconds)

    def forget_measured(self) -> None:
        super().forget_measured()
        self.seconds = self.kept.values()

    def add(self, part: Part) -> None:
        self.whole.add("transferred", np.ones(len(transferred(part.requests)), np.bool_))
        event, tokens, tier = (column(part.events, name) for name in ("event", "tokens", "tier"))
        is_copied = (event == Event.load) & (tier == TIERS.index("remote"))
        self.whole.add("adopted_tokens", tokens[event == Event.adopt])
        self.whole.add("copied_tokens", tokens[is_copied])
        rows = transferred(part.measured)
        if len(rows):
            finished = rows[~np.isnan(times(rows, "e2e_s"))]
            seconds = times(rows, "kv_transfer_s")
            self.seconds.add(seconds)
            self.inside.add("transfers", np.isfinite(seconds))
            self.inside.add("bytes", times(rows, "kv_transfer_bytes"))
            of_finished_s = times(finished, "kv_transfer_s")
            self.inside.add("transfer_s_of_finished", of_finished_s[~np.isnan(of_finished_s)])
            self.inside.add("e2e_s", times(finished, "e2e_s"))

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        if not self.whole["transferred"]:
            return None
        inside, end_s = self.inside, run.records.end_s
        used = {
            link.name: link.carried_bytes / (link.bytes_per_s * end_s)
            for link in run.records.links
            if link.bytes_per_s and end_s
        }
        fullest = max(used, key=lambda name: used[name], default="")
        num_tokens = self.whole["adopted_tokens"]
        return {
            "tokens": num_tokens,
            "cached_tokens": max(num_tokens - self.whole["copied_tokens"], 0),
            "requests": inside["transfers"],
            "bytes": float(inside["bytes"]),
            "seconds": self.seconds.describe(),
            "share_of_e2e": per(inside["transfer_s_of_finished"], inside["e2e_s"]),
            "links": {
                "mean_share": float(np.mean(list(used.values()))) if used else float("nan"),
                "fullest_share": used.get(fullest, float("nan")),
                "fullest": fullest,
            },
        }
