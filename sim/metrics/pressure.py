"""Computes cache hits, preemptions and their cost, and waits of requests by cause, from a run's events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.window import Window
from sim.records.event_rows import TIERS, WAITS, Event
from sim.records.run import RunRecords


def cache_use(records: RunRecords, window: Window) -> dict[str, Any]:
    """Computes prefix cache hits, evictions, and copies between tiers.

    The hits are those of first admissions; with_resumptions includes admissions after preemptions. Example: a
    prompt of 100 tokens of which 64 are found is preempted and resumes with 120 tokens of which 96 are found:
    hit_share 64 / 100, with_resumptions 160 / 220. Swapped-in KV is neither looked up nor found.
    found_tokens includes tokens loaded from another tier; loaded and stored bytes exclude swapping.
    evicted_blocks always covers the whole run, because pools count evictions without their time.
    """
    events, rows = _rows(records, window)
    first, again = rows(Event.admit), rows(Event.admit, Event.resume)
    tier, tokens = events["tier"].to_numpy(), events["tokens"].to_numpy()
    loads, stores = rows(Event.load), rows(Event.store)
    swapped_out = rows(Event.preempt_swap)
    moved_bytes = tokens * records.by_replica("kv_bytes_per_token")[events["replica"].to_numpy()]
    by_tier = {name: i for i, name in enumerate(TIERS) if name in ("host", "disk")}
    stored = {name: int(tokens[stores & (tier == i)].sum()) for name, i in by_tier.items()}
    stored_bytes = {name: float(moved_bytes[stores & (tier == i)].sum()) for name, i in by_tier.items()}
    stored["host"] = max(stored["host"] - int(tokens[swapped_out].sum()), 0)
    stored_bytes["host"] = max(stored_bytes["host"] - float(moved_bytes[swapped_out].sum()), 0.0)
    return {
        **_hits(events[first]),
        "with_resumptions": _hits(events[again]),
        "evicted_blocks": records.num_evicted_blocks,
        "loaded_tokens": {name: int(tokens[loads & (tier == i)].sum()) for name, i in by_tier.items()},
        "loaded_bytes": {name: float(moved_bytes[loads & (tier == i)].sum()) for name, i in by_tier.items()},
        "stored_tokens": stored,
        "stored_bytes": stored_bytes,
    }


def preemption_use(records: RunRecords, window: Window) -> dict[str, Any]:
    """Computes preemptions by kind, recomputed tokens, and swapped tokens and bytes."""
    events, rows = _rows(records, window)
    tokens = events["tokens"].to_numpy()
    moved_bytes = tokens * records.by_replica("kv_bytes_per_token")[events["replica"].to_numpy()]
    out, back = rows(Event.preempt_swap), rows(Event.swap_in)
    return {
        "recompute": int(rows(Event.preempt).sum()),
        "swap": int(rows(Event.preempt_swap).sum()),
        "recomputed_tokens": int(events["recomputed_tokens"][rows(Event.resume, Event.resume_swapped)].sum()),
        "swapped_out_tokens": int(tokens[out].sum()),
        "swapped_in_tokens": int(tokens[back].sum()),
        "swapped_out_bytes": float(moved_bytes[out].sum()),
        "swapped_in_bytes": float(moved_bytes[back].sum()),
    }


def waiting_use(measured: pd.DataFrame) -> dict[str, Any]:
    """Computes the mean seconds of waiting, in total and by cause, over the requests that were not rejected.

    Includes waits after preemptions and crashes, and requests that were never served. Cause gateway: the
    request was not yet at a replica.
    """
    waited = measured[measured["status"] != "rejected"]
    causes = ("gateway", *WAITS)
    if f"wait_{WAITS[0]}_s" not in waited:
        return {"mean_s": None, "by_cause_s": dict.fromkeys(causes)}
    mean_s = {cause: float(waited[f"wait_{cause}_s"].mean()) for cause in causes}
    return {"mean_s": sum(mean_s.values()), "by_cause_s": mean_s}


def _hits(rows: pd.DataFrame) -> dict[str, Any]:
    found, looked_up = int(rows["tokens"].sum()), int(rows["of_tokens"].sum())
    return {
        "found_tokens": found,
        "looked_up_tokens": looked_up,
        "hit_share": found / looked_up if looked_up else float("nan"),
    }


class _Rows:
    """Selects the events of given kinds in the window, as an array of booleans."""

    def __init__(self, events: pd.DataFrame, inside: NDArray[np.bool_]) -> None:
        self._event = events["event"].to_numpy()
        self._inside = inside

    def __call__(self, *kinds: Event) -> NDArray[np.bool_]:
        return np.isin(self._event, [int(kind) for kind in kinds]) & self._inside


def _rows(records: RunRecords, window: Window) -> tuple[pd.DataFrame, _Rows]:
    events = records.events
    return events, _Rows(events, window.holds(events["time_s"].to_numpy(dtype=np.float64)))
