"""Cuts the records of a whole run into the chunks of a streamed run."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from sim.metrics.token_times import decode_ends_s
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords, without_rows
from sim.records.table import column


def chunks_of(
    records: RunRecords, cuts_s: Sequence[float], group_rows: int = GROUP_ROWS
) -> list[RecordChunk]:
    """Returns the records cut at ascending simulated times, in seconds, and at the end of the run."""
    iterations, bursts = records.iterations, records.bursts
    end_s = decode_ends_s(iterations)
    request_cut = _cut_of_requests(records, cuts_s, group_rows)
    iteration_cut = _cut_of(end_s, cuts_s)
    gap_cut = _cut_of(records.gap_end_s, cuts_s)
    own_gap_cut = _cut_of(column(records.own_gaps, "end_s"), cuts_s)
    event_cut = _cut_of(column(records.events, "time_s"), cuts_s)
    ends_s = {
        (replica, iteration): time_s
        for replica, iteration, time_s in zip(
            iterations["replica"], iterations["iteration"], end_s, strict=True
        )
    }
    burst_cut = unfilled_cut = None
    if bursts is not None:
        keys = zip(bursts["replica"], bursts["iteration"], strict=True)
        burst_cut = _cut_of(np.array([ends_s[key] for key in keys], np.float64), cuts_s)
    if records.unfilled is not None:
        keys = ((replica, end - 1) for replica, _, end, _ in records.unfilled.tolist())
        unfilled_cut = _cut_of(np.array([ends_s[key] for key in keys], np.float64), cuts_s)
    chunks = []
    for index, until_s in enumerate((*cuts_s, records.end_s)):
        of_gaps = gap_cut == index
        chunks.append(
            RecordChunk(
                requests=records.requests[request_cut == index],
                iterations=iterations[iteration_cut == index],
                gap_s=records.gap_s[of_gaps],
                gap_count=records.gap_count[of_gaps],
                gap_end_s=records.gap_end_s[of_gaps],
                own_gaps=records.own_gaps[own_gap_cut == index],
                events=records.events[event_cut == index],
                bursts=None if bursts is None else bursts[burst_cut == index],
                unfilled=None if records.unfilled is None else records.unfilled[unfilled_cut == index],
                pool_by_replica=records.pool_by_replica,
                until_s=until_s,
                iterations_since_s=column(iterations, "start_s")[iteration_cut > index].min(initial=inf),
                end=without_rows(records) if index == len(cuts_s) else None,
            )
        )
    return chunks


def _cut_of(times_s: np.ndarray, cuts_s: Sequence[float]) -> np.ndarray:
    """Returns the index of the first cut at or after each time."""
    return np.searchsorted(np.array(cuts_s, np.float64), times_s)


def _cut_of_requests(records: RunRecords, cuts_s: Sequence[float], group_rows: int) -> np.ndarray:
    """Returns the cut at which the group of each request, and all earlier groups, have ended."""
    ended_s = column(records.requests, "finished_s")
    ended_s = np.where(np.isnan(ended_s), inf, ended_s)
    group = column(records.requests, "request_id") // group_rows
    groups, at = np.unique(group, return_inverse=True)
    complete_s = np.zeros(len(groups))
    np.maximum.at(complete_s, at, ended_s)
    if len(groups):
        complete_s[-1] = inf  # it is not known that no further request comes
    return _cut_of(np.maximum.accumulate(complete_s)[at], cuts_s)
