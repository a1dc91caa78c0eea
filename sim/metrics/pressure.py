"""Computes cache hits, preemptions and their cost, and waits of requests by cause, from a run's events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.sums import Totals
from sim.metrics.window import Window
from sim.records.event_rows import TIERS, WAITS, Event

_TIERS = {name: number for number, name in enumerate(TIERS) if name in ("host", "disk")}
_CAUSES = ("gateway", *WAITS)
_LIMITS = ("slot", "memory")
"""Causes of a wait for a limit of the engine: max_num_seqs, and the KV memory."""


def add_cache_use(
    totals: Totals, events: pd.DataFrame, window: Window, bytes_per_token: NDArray[np.float64]
) -> None:
    """Adds the terms of `cache_figures`. bytes_per_token: of KV, for each replica."""
    rows = _rows(events, window)
    for name, kinds in (("first", (Event.admit,)), ("again", (Event.admit, Event.resume))):
        chosen = rows(*kinds)
        totals.add(f"{name}_found", events["tokens"].to_numpy()[chosen])
        totals.add(f"{name}_looked_up", events["of_tokens"].to_numpy()[chosen])
    tier, tokens = events["tier"].to_numpy(), events["tokens"].to_numpy()
    loads, stores = rows(Event.load), rows(Event.store)
    moved_bytes = tokens * bytes_per_token[events["replica"].to_numpy()]
    for name, number in _TIERS.items():
        for way, moves in (("loaded", loads), ("stored", stores)):
            chosen = moves & (tier == number)
            totals.add(f"{way}_{name}_tokens", tokens[chosen])
            totals.add(f"{way}_{name}_bytes", moved_bytes[chosen])
    swapped_out = rows(Event.preempt_swap)
    totals.add("swapped_out_tokens", tokens[swapped_out])
    totals.add("swapped_out_bytes", moved_bytes[swapped_out])


def cache_figures(totals: Totals, num_evicted_blocks: int) -> dict[str, Any]:
    """Computes prefix cache hits, evictions, and copies between tiers.

    The hits are those of first admissions; with_resumptions includes admissions after preemptions. Example: a
    prompt of 100 tokens of which 64 are found is preempted and resumes with 120 tokens of which 96 are found:
    hit_share 64 / 100, with_resumptions 160 / 220. Swapped-in KV is neither looked up nor found.
    found_tokens includes tokens loaded from another tier; loaded and stored bytes exclude swapping.
    evicted_blocks always covers the whole run, because pools count evictions without their time.
    """
    moved = {
        f"{way}_{unit}": {name: totals[f"{way}_{name}_{unit}"] for name in _TIERS}
        for way in ("loaded", "stored")
        for unit in ("tokens", "bytes")
    }
    stored, stored_bytes = moved["stored_tokens"], moved["stored_bytes"]
    stored["host"] = max(stored["host"] - totals["swapped_out_tokens"], 0)
    stored_bytes["host"] = max(stored_bytes["host"] - totals["swapped_out_bytes"], 0.0)
    return {
        **_hits(totals, "first"),
        "with_resumptions": _hits(totals, "again"),
        "evicted_blocks": num_evicted_blocks,
        **moved,
    }


def add_preemption_use(
    totals: Totals, events: pd.DataFrame, window: Window, bytes_per_token: NDArray[np.float64]
) -> None:
    """Adds the terms of `preemption_figures`. bytes_per_token: of KV, for each replica."""
    rows = _rows(events, window)
    tokens = events["tokens"].to_numpy()
    moved_bytes = tokens * bytes_per_token[events["replica"].to_numpy()]
    totals.add("recompute", rows(Event.preempt))
    totals.add("swap", rows(Event.preempt_swap))
    again = rows(Event.resume, Event.resume_swapped)
    totals.add("recomputed_tokens", events["recomputed_tokens"].to_numpy()[again])
    for way, kind in (("out", Event.preempt_swap), ("in", Event.swap_in)):
        totals.add(f"preempted_{way}_tokens", tokens[rows(kind)])
        totals.add(f"preempted_{way}_bytes", moved_bytes[rows(kind)])


def preemption_figures(totals: Totals) -> dict[str, Any]:
    """Computes preemptions by kind, recomputed tokens, and swapped tokens and bytes."""
    return {
        "recompute": totals["recompute"],
        "swap": totals["swap"],
        "recomputed_tokens": totals["recomputed_tokens"],
        **{
            f"swapped_{way}_{unit}": totals[f"preempted_{way}_{unit}"]
            for unit in ("tokens", "bytes")
            for way in ("out", "in")
        },
    }


def knows_waits(requests: pd.DataFrame) -> bool:
    """Returns whether a table of requests has the causes of their waits."""
    return f"wait_{WAITS[0]}_s" in requests


def held_back(requests: pd.DataFrame) -> NDArray[np.bool_]:
    """Returns which requests of a table with the causes of waits waited for a slot or KV memory."""
    slot_s, memory_s = (requests[f"wait_{cause}_s"].to_numpy(dtype=np.float64) for cause in _LIMITS)
    return np.logical_or(slot_s > 0, memory_s > 0)


def add_waiting_use(totals: Totals, measured: pd.DataFrame) -> None:
    """Adds the terms of `waiting_figures`."""
    waited = measured[measured["status"] != "rejected"]
    if knows_waits(waited):
        totals.add("waited", np.ones(len(waited), np.bool_))
        totals.add("held_back", held_back(waited))
        for cause in _CAUSES:
            totals.add(f"wait_{cause}_s", waited[f"wait_{cause}_s"].to_numpy(dtype=np.float64))


def waiting_figures(totals: Totals, *, is_known: bool) -> dict[str, Any]:
    """Computes the mean seconds of waiting, in total and by cause, over the requests that were not rejected.

    held_back_share: the share of them that waited for a sequence slot or KV memory.

    Includes waits after preemptions and crashes, and requests that were never served. Cause gateway: the
    request was not yet at a replica. is_known: whether the causes were recorded.
    """
    if not is_known:
        return {"mean_s": None, "by_cause_s": dict.fromkeys(_CAUSES), "held_back_share": None}
    count = totals["waited"]
    mean_s = {cause: totals[f"wait_{cause}_s"] / count if count else float("nan") for cause in _CAUSES}
    share = totals["held_back"] / count if count else float("nan")
    return {"mean_s": sum(mean_s.values()), "by_cause_s": mean_s, "held_back_share": share}


def _hits(totals: Totals, name: str) -> dict[str, Any]:
    found, looked_up = totals[f"{name}_found"], totals[f"{name}_looked_up"]
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


def _rows(events: pd.DataFrame, window: Window) -> _Rows:
    return _Rows(events, window.holds(events["time_s"].to_numpy(dtype=np.float64)))
