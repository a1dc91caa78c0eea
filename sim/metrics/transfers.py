"""Computes the figures of KV transfers from prefill to decode replicas: tokens, bytes, seconds, link use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sim.metrics.sums import Totals
from sim.records.event_rows import TIERS, Event
from sim.records.run import LinkRecord


def transferred(requests: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of requests with a prefill replica; none if the table does not name it."""
    if "prefill_replica" not in requests:
        return requests[:0]
    return requests[requests["prefill_replica"] >= 0]


def add_transfers(totals: Totals, measured: pd.DataFrame) -> None:
    """Adds the terms of `transfer_figures` of measured requests."""
    rows = transferred(measured)
    if len(rows):
        finished = rows[rows["e2e_s"].notna()]
        seconds = rows["kv_transfer_s"].to_numpy(dtype=np.float64)
        totals.add("transfers", np.isfinite(seconds))
        totals.add("transferred_bytes", rows["kv_transfer_bytes"].to_numpy(dtype=np.float64))
        of_finished_s = finished["kv_transfer_s"].to_numpy(dtype=np.float64)
        totals.add("transfer_s_of_finished", of_finished_s[~np.isnan(of_finished_s)])
        totals.add("e2e_s_of_transferred", finished["e2e_s"].to_numpy(dtype=np.float64))


def add_cached_tokens(totals: Totals, events: pd.DataFrame) -> None:
    """Adds the tokens of transferred sequences, and those that were copied."""
    event, tokens = (events[name].to_numpy() for name in ("event", "tokens"))
    is_copied = (event == Event.load) & (events["tier"].to_numpy() == TIERS.index("remote"))
    totals.add("adopted_tokens", tokens[event == Event.adopt])
    totals.add("copied_tokens", tokens[is_copied])


def transfer_figures(
    whole: Totals, inside: Totals, seconds: dict[str, float | int], links: Sequence[LinkRecord], end_s: float
) -> dict[str, Any]:
    """Computes the transfer figures of the measured requests from sums over the whole run and the window.

    seconds: statistics of the transfers, from the allocation on the decode replica to the last byte. tokens,
    cached_tokens: tokens of the sequences transferred in the whole run, and how many of these the decode
    replica had in its cache.
    share_of_e2e: transfer seconds of finished requests over their E2E. links: carried bytes over what the
    link could have carried in the whole run; mean over the ports and switches in use, and of the fullest.
    """
    e2e_s = inside["e2e_s_of_transferred"]
    used = {
        link.name: link.carried_bytes / (link.bytes_per_s * end_s)
        for link in links
        if link.bytes_per_s and end_s
    }
    fullest = max(used, key=lambda name: used[name], default="")
    num_tokens = whole["adopted_tokens"]
    return {
        "tokens": num_tokens,
        "cached_tokens": max(num_tokens - whole["copied_tokens"], 0),
        "requests": inside["transfers"],
        "bytes": float(inside["transferred_bytes"]),
        "seconds": seconds,
        "share_of_e2e": inside["transfer_s_of_finished"] / e2e_s if e2e_s else float("nan"),
        "links": {
            "mean_share": float(np.mean(list(used.values()))) if used else float("nan"),
            "fullest_share": used.get(fullest, float("nan")),
            "fullest": fullest,
        },
    }
