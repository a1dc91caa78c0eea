"""Requests, tokens and iterations of a run: counts and rates, and the check that none is missing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window, per, times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part, batch_tokens
from sim.metrics.sums import Totals, weighted_sum
from sim.records.run import RecordChunk, RunRecords
from sim.records.table import AnyTable, column


class Output(NamedTuple):
    """Output of the run inside the window."""

    requests: int
    output_tokens: int
    input_tokens: int
    """A complete prompt counts at the time of its first output token, regardless of cached or recomputed
    tokens.
    """


class OutputFigure(Figure):
    """Finished requests and output tokens per second of the window.

    Output tokens are first tokens, ends of gaps, and kept draft tokens. output_tokens_per_s_and_gpu: divided
    by the rented GPU-seconds.
    """

    name = "throughput"

    def add(self, part: Part) -> None:
        requests, window = part.requests, part.window
        first_inside = window.holds(times(requests, "first_token_s"))
        finished_inside = window.holds(times(requests, "finished_s")) & (
            column(requests, "status") == "finished"
        )
        self.inside.add("requests", finished_inside)
        self.inside.add("output_tokens", first_tokens(requests, first_inside))
        self.inside.add("output_tokens", part.gaps_inside)
        if "kept_tokens" in part.iterations:
            self.inside.add("output_tokens", column(part.iterations, "kept_tokens")[part.ends_inside])
        self.inside.add("input_tokens", column(requests, "prompt_tokens")[first_inside])

    @property
    def output(self) -> Output:
        """Returns the numbers of requests and of tokens."""
        return Output(*(int(self.inside[name]) for name in Output._fields))

    def value(self, run: EndedRun) -> dict[str, float]:
        output, seconds = self.output, run.window.duration_s
        gpu_s = weighted_sum([pool.num_devices for pool in run.setting.pools], run.replica_s)
        return {
            "requests_per_s": per(output.requests, seconds),
            "requests_per_minute": per(60 * output.requests, seconds),
            "output_tokens_per_s": per(output.output_tokens, seconds),
            "output_tokens_per_s_and_gpu": per(output.output_tokens, gpu_s),
            "input_tokens_per_s": per(output.input_tokens, seconds),
        }


def first_tokens(requests: AnyTable, rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns the first tokens of the selected requests: one per sample."""
    return column(requests, "samples")[rows] if "samples" in requests else rows


class IterationCounts(Figure):
    """Iterations in the window: number, mean duration, batch; and the tokens discarded in the whole run."""

    name = "iterations"

    def add(self, part: Part) -> None:
        iterations, inside = part.iterations, part.inside_s > 0
        seqs = (column(iterations, "decode_seqs") + column(iterations, "prefill_seqs"))[inside]
        self.inside.add("count", inside)
        self.inside.add("duration_s", times(iterations, "duration_s")[inside])
        self.inside.add("seqs", seqs)
        self.inside.raise_to("seqs", seqs)
        self.inside.add("tokens", batch_tokens(iterations)[inside])
        self.inside.add("preempted", column(iterations, "preempted")[inside])

    @property
    def preemptions(self) -> float:
        """Number of sequences that were preempted by the plans of these iterations."""
        return self.inside["preempted"]

    def value(self, run: EndedRun) -> dict[str, float]:
        count = self.inside["count"]
        return {
            "count": count,
            "mean_s": per(self.inside["duration_s"], count),
            "mean_batch_seqs": per(self.inside["seqs"], count),
            "max_batch_seqs": self.inside.largest("seqs"),
            "mean_batch_tokens": per(self.inside["tokens"], count),
            "discarded_tokens": run.records.num_discarded_tokens,
        }


COUNTS = ("arrived", "finished", "rejected", "aborted", "unfinished")
STATUSES = ("finished", "rejected", "aborted", "unfinished")


class RequestCounts(Figure):
    """Requests of the whole run, in total and by status.

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


def add_status_counts(totals: Totals, requests: AnyTable) -> None:
    """Adds the number of requests, in total and by status."""
    status = column(requests, "status")
    totals.add("arrived", np.ones(len(requests), np.bool_))
    for name in COUNTS[1:]:
        totals.add(name, np.asarray(status == name, np.bool_))


def check_rows(requests: AnyTable) -> None:
    """Raises AssertionError if a request has two rows, or its times are not in order."""
    ids = np.sort(column(requests, "request_id"))
    assert (ids[1:] != ids[:-1]).all(), "two rows for one request"
    moments = [f"{name}_s" for name in ("arrival", "scheduled", "first_token", "last_token", "finished")]
    for earlier, later in pairwise(moments):
        early = np.flatnonzero(times(requests, earlier) > times(requests, later))
        assert not len(early), f"row {early[0]}: {later} is before {earlier}"
