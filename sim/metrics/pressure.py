"""Computes cache hits, preemptions and their cost, and waits of requests by cause, from a run's events."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, Part
from sim.records.event_rows import TIERS, WAITS, Event
from sim.records.table import AnyTable, column

_TIERS = {name: number for number, name in enumerate(TIERS) if name in ("host", "disk")}
_CAUSES = ("gateway", *WAITS)
_LIMITS = ("slot", "memory")
"""Causes of a wait for a limit of the engine: max_num_seqs, and the KV memory."""


class CacheUse(Figure):
    """Prefix cache hits, evictions, and copies between tiers.

    The hits are those of first admissions; with_resumptions includes admissions after preemptions. Example: a
    prompt of 100 tokens of which 64 are found is preempted and resumes with 120 tokens of which 96 are found:
    hit_share 64 / 100, with_resumptions 160 / 220. Swapped-in KV is neither looked up nor found.
    found_tokens includes tokens loaded from another tier; loaded and stored bytes exclude swapping.
    evicted_blocks always covers the whole run, because pools count evictions without their time.
    """

    name = "cache"

    def add(self, part: Part) -> None:
        events, rows = part.events, _rows(part)
        for name, kinds in (("first", (Event.admit,)), ("again", (Event.admit, Event.resume))):
            chosen = rows(*kinds)
            self.inside.add(f"{name}_found", column(events, "tokens")[chosen])
            self.inside.add(f"{name}_looked_up", column(events, "of_tokens")[chosen])
        tier, tokens = column(events, "tier"), column(events, "tokens")
        loads, stores = rows(Event.load), rows(Event.store)
        moved_bytes = _bytes(part)
        for name, number in _TIERS.items():
            for way, moves in (("loaded", loads), ("stored", stores)):
                chosen = moves & (tier == number)
                self.inside.add(f"{way}_{name}_tokens", tokens[chosen])
                self.inside.add(f"{way}_{name}_bytes", moved_bytes[chosen])
        swapped_out = rows(Event.preempt_swap)
        self.inside.add("swapped_out_tokens", tokens[swapped_out])
        self.inside.add("swapped_out_bytes", moved_bytes[swapped_out])

    def value(self, run: EndedRun) -> dict[str, Any]:
        totals = self.inside
        moved = {
            f"{way}_{unit}": {name: totals[f"{way}_{name}_{unit}"] for name in _TIERS}
            for way in ("loaded", "stored")
            for unit in ("tokens", "bytes")
        }
        stored, stored_bytes = moved["stored_tokens"], moved["stored_bytes"]
        stored["host"] = max(stored["host"] - totals["swapped_out_tokens"], 0)
        stored_bytes["host"] = max(stored_bytes["host"] - totals["swapped_out_bytes"], 0.0)
        return {
            **self._hits("first"),
            "with_resumptions": self._hits("again"),
            "evicted_blocks": run.records.num_evicted_blocks,
            **moved,
        }

    def _hits(self, name: str) -> dict[str, Any]:
        found, looked_up = self.inside[f"{name}_found"], self.inside[f"{name}_looked_up"]
        return {"found_tokens": found, "looked_up_tokens": looked_up, "hit_share": per(found, looked_up)}


class PreemptionUse(Figure):
    """Preemptions by kind, recomputed tokens, and swapped tokens and bytes."""

    name = "preemption"

    def add(self, part: Part) -> None:
        rows, moved_bytes = _rows(part), _bytes(part)
        tokens = column(part.events, "tokens")
        self.inside.add("recompute", rows(Event.preempt))
        self.inside.add("swap", rows(Event.preempt_swap))
        again = rows(Event.resume, Event.resume_swapped)
        self.inside.add("recomputed_tokens", column(part.events, "recomputed_tokens")[again])
        for way, kind in (("out", Event.preempt_swap), ("in", Event.swap_in)):
            self.inside.add(f"swapped_{way}_tokens", tokens[rows(kind)])
            self.inside.add(f"swapped_{way}_bytes", moved_bytes[rows(kind)])

    def value(self, run: EndedRun) -> dict[str, Any]:
        swapped = [f"swapped_{way}_{unit}" for unit in ("tokens", "bytes") for way in ("out", "in")]
        return {name: self.inside[name] for name in ("recompute", "swap", "recomputed_tokens", *swapped)}


def knows_waits(requests: AnyTable) -> bool:
    """Returns whether a table of requests has the causes of their waits."""
    return f"wait_{WAITS[0]}_s" in requests


def held_back(requests: AnyTable) -> NDArray[np.bool_]:
    """Returns which requests of a table with the causes of waits waited for a slot or KV memory."""
    slot_s, memory_s = (column(requests, f"wait_{cause}_s", np.float64) for cause in _LIMITS)
    return np.logical_or(slot_s > 0, memory_s > 0)


class Waiting(Figure):
    """Mean seconds of waiting, in total and by cause, over the requests that were not rejected.

    Includes waits after preemptions and crashes, and requests that were never served. Cause gateway: the
    request was not yet at a replica. held_back_share: the share of them that waited for a sequence slot or KV
    memory. All are None unless the causes were recorded.
    """

    name = "waiting"

    def add(self, part: Part) -> None:
        waited = part.measured[column(part.measured, "status") != "rejected"]
        if knows_waits(waited):
            self.inside.add("waited", np.ones(len(waited), np.bool_))
            self.inside.add("held_back", held_back(waited))
            for cause in _CAUSES:
                self.inside.add(f"wait_{cause}_s", times(waited, f"wait_{cause}_s"))

    def value(self, run: EndedRun) -> dict[str, Any]:
        if not knows_waits(run.records.requests):
            return {"mean_s": None, "by_cause_s": dict.fromkeys(_CAUSES), "held_back_share": None}
        count = self.inside["waited"]
        mean_s = {cause: per(self.inside[f"wait_{cause}_s"], count) for cause in _CAUSES}
        share = per(self.inside["held_back"], count)
        return {"mean_s": sum(mean_s.values()), "by_cause_s": mean_s, "held_back_share": share}


class _Rows:
    """Selects the events of given kinds in the window, as an array of booleans."""

    def __init__(self, events: AnyTable, inside: NDArray[np.bool_]) -> None:
        self._event = column(events, "event")
        self._inside = inside

    def __call__(self, *kinds: Event) -> NDArray[np.bool_]:
        return np.isin(self._event, [int(kind) for kind in kinds]) & self._inside


def _rows(part: Part) -> _Rows:
    return _Rows(part.events, part.window.holds(times(part.events, "time_s")))


def _bytes(part: Part) -> NDArray[np.float64]:
    """Returns the bytes of KV of the tokens of each event."""
    bytes_per_token = part.by_replica("kv_bytes_per_token")
    found: NDArray[np.float64] = (
        column(part.events, "tokens") * bytes_per_token[column(part.events, "replica")]
    )
    return found
