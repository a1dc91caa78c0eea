"""Use and waste of the KV memory, cache hits, preemptions and their cost, and waiting times by cause.

Use and waste are shares of all KV token slots over time, which sum to 1:

    filled     slots that hold the KV of a token
    reserved empty slots of a sequence that it fills later internal empty slots of a sequence that it frees
    without filling them; with block-wise allocation,
               all empty slots in the last block of each sequence
    external   free slots while the first waiting request does not fit: too fragmented, or too few
    free       free slots while no request waits for memory

Follows Kwon et al., SOSP 2023, section 3.1, where "external" is measured in the same way. A slot with a token
shared by several sequences counts once. Example: 100 slots for 10 s; a sequence holds 60 for 5 s, fills 20 of
them evenly over this time and no more; no request waits. Filled 10 x 5 = 50, reserved 50, internal 40 x 5 =
200 of 1000 slot-seconds; wasted 250 / 300.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, per, times
from sim.metrics.distributions import Kept
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Floats, Part, of_pools
from sim.metrics.sums import Totals, weighted_sum
from sim.records.event_rows import TIERS, WAITS, Event
from sim.records.table import AnyTable, column


class KvUse(Figure):
    """Use and waste of the KV memory: mean shares over the window and all replicas; NaN in an empty window.

    An idle replica uses no block; between iterations all slots are free. peak_use_share: the maximum over the
    replicas. internal_waste_share = empty token slots in the last block of each sequence over all token slots
    in use: 10 tokens in 1 block of 16 waste 6 / 16 = 0.375. Empty slots of sequences that still run at the
    end count as reserved. wasted_share = (reserved + internal + external) / (1 - free): share of the memory
    in demand without KV.
    """

    name = "kv"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.unfilled: Unfilled | None = None
        """None while no replica reserves KV ahead."""

    def merge(self, other: KvUse) -> None:
        super().merge(other)
        if other.unfilled is not None:
            self.unfilled = self.unfilled or Unfilled(self.kept)
            self.unfilled.merge(other.unfilled)

    def forget_measured(self) -> None:
        super().forget_measured()
        self.unfilled = None

    def add(self, part: Part) -> None:
        iterations, inside_s, records = part.iterations, part.inside_s, part.setting.pool_records
        blocks, tokens = times(iterations, "kv_blocks_used"), times(iterations, "kv_tokens_used")
        block_size, all_blocks = (
            of_pools(records, name, part.pool) for name in ("block_size", "num_kv_blocks")
        )
        self.inside.add("place_s", blocks * block_size * inside_s)
        self.inside.add("token_s", tokens * inside_s)
        self.inside.add("block_s", blocks * inside_s)
        shares = np.divide(blocks, all_blocks, out=np.full_like(blocks, np.nan), where=all_blocks > 0)[
            inside_s > 0
        ]
        self.inside.add("unknown", np.isnan(shares))
        self.inside.raise_to("peak_share", shares[~np.isnan(shares)])
        held = blocks * block_size
        filled = np.minimum(tokens, held)
        unused = (all_blocks - blocks) * block_size
        self.inside.add("empty_s", (held - filled) * inside_s)
        self.inside.add("external_s", unused * times(iterations, "waits_for_memory") * inside_s)
        self.inside.add("filled_s", filled * inside_s)
        self._add_unfilled(part)

    def _add_unfilled(self, part: Part) -> None:
        if part.unfilled is not None:
            self.unfilled = self.unfilled or Unfilled(self.kept)
            self.unfilled.add_rows(part.unfilled)
        if self.unfilled is not None:
            self.unfilled.add_iterations(part.iterations, part.inside_s)
            if part.unfilled_upto is not None:
                self.unfilled.drop(part.unfilled_upto)

    def value(self, run: EndedRun) -> dict[str, float]:
        inside, pools = self.inside, run.records.pools
        num_blocks = [pool.num_kv_blocks for pool in pools]
        is_known = any(num_blocks) and not inside["unknown"]
        empty_s, external_s, filled_s = (inside[f"{name}_s"] for name in ("empty", "external", "filled"))
        internal_s = empty_s if run.records.unfilled is None else self._unfilled_s
        all_s = weighted_sum([pool.num_kv_blocks * pool.block_size for pool in pools], run.replica_s)
        free_s = all_s - filled_s - empty_s - external_s
        return {
            "mean_use_share": per(inside["block_s"], weighted_sum(num_blocks, run.replica_s)),
            "peak_use_share": float(inside.largest("peak_share")) if is_known else float("nan"),
            "internal_waste_share": 1 - per(inside["token_s"], inside["place_s"]),
            "filled_share": per(filled_s, all_s),
            "reserved_share": per(empty_s - internal_s, all_s),
            "internal_share": per(internal_s, all_s),
            "external_share": per(external_s, all_s),
            "free_share": per(free_s, all_s),
            "wasted_share": per(empty_s + external_s, all_s - free_s),
        }

    @property
    def _unfilled_s(self) -> float:
        """Slot-seconds of slots that were held and never filled."""
        return 0.0 if self.unfilled is None else self.unfilled.slot_seconds()


class _Seconds:
    """The last iterations of a replica: their seconds, and the unused slots held in each.

    Arrays begin with iteration `first`. The slots are stored as differences between consecutive iterations,
    because a row of `RunRecords.unfilled` is a range of iterations.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.inside_s: Floats = np.zeros(0)
        self.steps: Counts = np.zeros(0, np.int64)
        self.held = 0
        """Unused slots held in the iteration before `first`."""

    def reach(self, end: int) -> None:
        """Extends the arrays up to iteration end - 1, and the step after it."""
        missing = end - self.first - len(self.inside_s)
        if missing > 0:
            self.inside_s = np.append(self.inside_s, np.zeros(missing))
        missing = end - self.first + 1 - len(self.steps)
        if missing > 0:
            self.steps = np.append(self.steps, np.zeros(missing, np.int64))

    def take(self, end: int, totals: Totals) -> None:
        """Moves the slot-seconds of the iterations before `end` to the totals."""
        num_taken = min(end - self.first, len(self.inside_s))
        if num_taken <= 0:
            return
        self.reach(self.first + num_taken)
        held = self.held + np.cumsum(self.steps[:num_taken])
        totals.add("unfilled_s", self.inside_s[:num_taken] * held)
        self.held = int(held[-1])
        self.first += num_taken
        self.inside_s, self.steps = self.inside_s[num_taken:], self.steps[num_taken:]


class Unfilled:
    """Slot-seconds of slots that were held and never filled.

    A row of `RunRecords.unfilled` arrives when its slots are freed, so the seconds of iterations are kept
    until no row can begin before them (`Part.unfilled_upto`), or until the end.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.totals = kept.totals()
        self._replicas: dict[int, _Seconds] = {}

    def add_iterations(self, iterations: AnyTable, inside_s: Floats) -> None:
        """Adds iterations with their seconds inside the window; those of a replica need not be in order."""
        if not len(iterations):
            return
        replica, number = (column(iterations, name, np.int64) for name in ("replica", "iteration"))
        order = np.argsort(replica, kind="stable")
        found, starts = np.unique(replica[order], return_index=True)
        for index, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            own = number[rows]
            seconds = self._of(index, int(own.min()))
            seconds.reach(int(own.max()) + 1)
            seconds.inside_s[own - seconds.first] = inside_s[rows]

    def add_rows(self, unfilled: Counts) -> None:
        """Adds rows of `RunRecords.unfilled`, [n, 4]."""
        for index in np.unique(unfilled[:, 0]).tolist():
            _, first, end, num_slots = unfilled[unfilled[:, 0] == index].T
            seconds = self._of(index, int(first.min()))
            seconds.reach(int(end.max()))
            np.add.at(seconds.steps, first - seconds.first, num_slots)
            np.subtract.at(seconds.steps, end - seconds.first, num_slots)

    def drop(self, upto: Counts) -> None:
        """Adds up the iterations before `upto`, [R]."""
        for index, seconds in self._replicas.items():
            seconds.take(int(upto[index]), self.totals)

    def merge(self, other: Unfilled) -> None:
        """Adds the records of other, which is not changed.

        Both may have iterations of one replica only if none of these has been dropped.
        """
        self.totals.merge(other.totals)
        for index, theirs in other._replicas.items():
            mine = self._of(index, theirs.first)
            mine.reach(theirs.first + len(theirs.inside_s))
            at = theirs.first - mine.first
            mine.inside_s[at : at + len(theirs.inside_s)] += theirs.inside_s
            mine.reach(theirs.first + len(theirs.steps) - 1)
            mine.steps[at : at + len(theirs.steps)] += theirs.steps
            mine.held += theirs.held

    def slot_seconds(self) -> float:
        """Returns the slot-seconds so far."""
        totals = self._kept.totals()
        totals.merge(self.totals)
        for seconds in self._replicas.values():
            copied = _Seconds(seconds.first)
            copied.inside_s, copied.steps, copied.held = seconds.inside_s, seconds.steps, seconds.held
            copied.take(copied.first + len(copied.inside_s), totals)
        return totals["unfilled_s"]

    def _of(self, index: int, first: int) -> _Seconds:
        """Returns the seconds of a replica, with room for iterations from `first` on."""
        seconds = self._replicas.setdefault(index, _Seconds(first))
        if first < seconds.first:
            missing = seconds.first - first
            seconds.inside_s = np.append(np.zeros(missing), seconds.inside_s)
            seconds.steps = np.append(np.zeros(missing, np.int64), seconds.steps)
            seconds.first = first
        return seconds


_TIERS = {name: number for number, name in enumerate(TIERS) if name in ("host", "disk")}
_CAUSES = ("gateway", *WAITS)
_LIMITS = ("slot", "memory")
"""Waiting causes due to an engine limit: max_num_seqs, and the KV memory."""


class CacheUse(Figure):
    """Prefix cache hits, evictions, and copies between tiers.

    Hits count first admissions; with_resumptions includes admissions after preemptions. Example: a prompt of
    100 tokens with 64 found tokens is preempted and resumes with 120 tokens, 96 of them found: hit_share 64 /
    100, with_resumptions 160 / 220. Swapped-in KV counts neither as looked up nor as found. found_tokens
    includes tokens loaded from another tier; loaded and stored bytes exclude swapping. evicted_blocks always
    covers the whole run, because pools count evictions without their time.
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
    """Returns whether a table of requests includes waiting causes."""
    return f"wait_{WAITS[0]}_s" in requests


def held_back(requests: AnyTable) -> NDArray[np.bool_]:
    """Returns which requests of a table with waiting causes waited for a slot or KV memory."""
    slot_s, memory_s = (column(requests, f"wait_{cause}_s", np.float64) for cause in _LIMITS)
    return np.logical_or(slot_s > 0, memory_s > 0)


class Waiting(Figure):
    """Mean waiting time in seconds, in total and by cause, over the requests that were not rejected.

    Includes waiting times after preemptions and crashes, and requests that were never served. Cause gateway:
    the request was not yet at a replica. held_back_share: the share of requests that waited for a sequence
    slot or KV memory. All values are None unless the causes were recorded.
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
    """Returns a boolean mask of the events of given kinds in the window."""

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
