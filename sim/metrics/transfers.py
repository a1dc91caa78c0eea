"""Computes the figures of KV transfers from prefill to decode replicas: tokens, bytes, seconds, link use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sim.metrics.definitions import describe
from sim.records.event_rows import TIERS, Event
from sim.records.run import RunRecords


def transfer_use(records: RunRecords, measured: pd.DataFrame) -> dict[str, Any] | None:
    """Computes the transfer figures of the measured requests; returns None if no KV was transferred.

    tokens, cached_tokens: tokens of the sequences transferred in the whole run, and how many of these the
    decode replica had in its cache. seconds: from the allocation on the decode replica to the last byte.
    share_of_e2e: transfer seconds of finished requests over their E2E. links: carried bytes over what the
    link could have carried in the whole run; mean over the ports and switches in use, and of the fullest.
    """
    if "prefill_replica" not in measured or not (records.requests["prefill_replica"] >= 0).any():
        return None
    rows = measured[measured["prefill_replica"] >= 0]
    seconds = rows["kv_transfer_s"].to_numpy(dtype=np.float64)
    finished = rows[rows["e2e_s"].notna()]
    e2e_s = float(finished["e2e_s"].sum())
    used = {
        link.name: link.carried_bytes / (link.bytes_per_s * records.end_s)
        for link in records.links
        if link.bytes_per_s and records.end_s
    }
    fullest = max(used, key=lambda name: used[name], default="")
    return {
        **_cached(records),
        "requests": int(np.isfinite(seconds).sum()),
        "bytes": float(rows["kv_transfer_bytes"].sum()),
        "seconds": describe(seconds),
        "share_of_e2e": float(finished["kv_transfer_s"].sum()) / e2e_s if e2e_s else float("nan"),
        "links": {
            "mean_share": float(np.mean(list(used.values()))) if used else float("nan"),
            "fullest_share": used.get(fullest, float("nan")),
            "fullest": fullest,
        },
    }


def _cached(records: RunRecords) -> dict[str, int]:
    """Computes the tokens of transferred sequences and how many of these did not have to be copied."""
    event, tokens = (records.events[name].to_numpy() for name in ("event", "tokens"))
    is_copied = (event == Event.load) & (records.events["tier"].to_numpy() == TIERS.index("remote"))
    num_tokens = int(tokens[event == Event.adopt].sum())
    return {"tokens": num_tokens, "cached_tokens": max(num_tokens - int(tokens[is_copied].sum()), 0)}
