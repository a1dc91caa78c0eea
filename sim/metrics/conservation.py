"""Checks that the records of a run are consistent: no request and no token is missing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sim.metrics.by_class import COUNTS, add_status_counts
from sim.metrics.definitions import Window, times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.metrics.output import first_tokens
from sim.metrics.sums import Totals
from sim.records.chunk import RecordChunk
from sim.records.run import RunRecords
from sim.records.table import AnyTable, column

STATUSES = ("finished", "rejected", "aborted", "unfinished")


class RequestCounts(Figure):
    """Requests of the whole run, in all and by status.

    `value` raises AssertionError if records are missing: see `check_conservation`.
    """

    name = "requests"

    def add(self, part: Part) -> None:
        check_rows(part.requests)
        add_status_counts(self.whole, part.requests)
        has_begun = ~np.isnan(times(part.requests, "first_token_s"))
        self.whole.add("first_tokens", first_tokens(part.requests, has_begun))
        self.whole.add("tokens", column(part.requests, "output_tokens"))
        if "lost_tokens" in part.requests:
            self.whole.add("tokens", column(part.requests, "lost_tokens"))
        self.whole.add("rows", np.ones(len(part.requests), np.bool_))
        if "kept_tokens" in part.iterations:
            self.whole.add("kept_draft_tokens", column(part.iterations, "kept_tokens"))
        self.whole.add("gap_count", part.gap_count)

    def value(self, run: EndedRun) -> dict[str, int]:
        return checked_counts(self.whole, run.records.num_lost_first_tokens)


def check_conservation(records: RunRecords) -> dict[str, int]:
    """Counts the requests by status; raises AssertionError if the records are inconsistent.

    Checks that arrived = finished + rejected + aborted + unfinished, that every output token, including those
    lost in a crash, is the first token of a request (or sample), ends a gap, or is a kept draft token, and
    that the times of a request are in order.
    """
    setting = FigureSetting(pools=(), pool_records=records.pools)
    whole = Window(0.0, records.end_s)
    counts = RequestCounts(setting)
    counts.add(Part.of(setting, whole, RecordChunk.of(records), records.requests))
    return counts.value(EndedRun(setting=setting, records=records, window=whole))


def checked_counts(totals: Totals, num_lost_first_tokens: int) -> dict[str, int]:
    """Returns the requests by status; raises AssertionError if requests or tokens are missing."""
    counts = {name: int(totals[name]) for name in COUNTS}
    num_rows = int(totals["rows"])
    by_status = {status: counts[status] for status in STATUSES}
    assert sum(by_status.values()) == num_rows, f"{num_rows} requests arrived, but by status: {by_status}"
    first = int(totals["first_tokens"]) + num_lost_first_tokens
    emitted = int(totals["tokens"])
    seen = first + int(totals["gap_count"]) + int(totals["kept_draft_tokens"])
    assert emitted == seen, (
        f"{emitted} output tokens, but {first} first tokens + gaps + kept draft tokens = {seen}"
    )
    return counts


def check_rows(requests: AnyTable) -> None:
    """Raises AssertionError if a request has two rows, or its times are not in order."""
    ids = np.sort(column(requests, "request_id"))
    assert (ids[1:] != ids[:-1]).all(), "two rows for one request"
    moments = [f"{name}_s" for name in ("arrival", "scheduled", "first_token", "last_token", "finished")]
    for earlier, later in pairwise(moments):
        early = np.flatnonzero(times(requests, earlier) > times(requests, later))
        assert not len(early), f"row {early[0]}: {later} is before {earlier}"
