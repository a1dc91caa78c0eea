"""Reconstructs the time of each token of each request from the tables of a run.

    first token          own gap                    own gap
         |------------------->|----|----|----|----|------------->|----|
       first_token_s       end_s   iterations with decodes    end_s  last_token_s

A request gets a token at the end of each iteration of its replica that has decodes, except in the gaps
recorded for the request itself (`RunRecords.own_gaps`): the gap after its first token, and gaps in which it
was preempted, idle or transferred. With speculation several tokens arrive together as a burst, which the
speculation records list (`SpeculationRecord.bursts`). For a request with several samples, the sample of a
token is unknown.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import times
from sim.records.table import AnyTable, column, places_of


class TokenTimes(NamedTuple):
    """Times of the tokens of all requests, request after request in the order of the table of requests.

    num_tokens: tokens of each request. begins: for each token, whether it is its request's first token at
    that time; None: tokens come one by one.
    """

    time_s: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None

    @property
    def first(self) -> NDArray[np.int64]:
        """Index in time_s of the first token of each request."""
        return np.cumsum(self.num_tokens) - self.num_tokens

    def gaps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Returns all gaps between a request's tokens, in seconds, and the row of their request.

        Tokens of a burst have no gap between them.
        """
        owner = np.repeat(np.arange(len(self.num_tokens)), self.num_tokens)
        same = owner[1:] == owner[:-1]
        if self.begins is not None:
            same &= self.begins[1:]
        return np.diff(self.time_s)[same], owner[1:][same]

    def of(self, row: int) -> NDArray[np.float64]:
        """Returns the times of the tokens of one request."""
        first = int(self.first[row])
        return self.time_s[first : first + int(self.num_tokens[row])]


def known_token_times(
    requests: AnyTable,
    iterations: AnyTable,
    own_gaps: AnyTable,
    bursts: AnyTable | None = None,
) -> TokenTimes | None:
    """Returns `token_times`, or None if a request has several samples."""
    if "samples" in requests and (column(requests, "samples") > 1).any():
        return None
    return token_times(requests, iterations, own_gaps, bursts)


def token_times(
    requests: AnyTable,
    iterations: AnyTable,
    own_gaps: AnyTable,
    bursts: AnyTable | None = None,
) -> TokenTimes:
    """Computes the times of all tokens from the tables of `RunRecords`.

    bursts: of runs that speculate. Raises ValueError if a request has several samples or if the tables
    contradict each other.
    """
    if "samples" in requests and (column(requests, "samples") > 1).any():
        raise ValueError(
            "requests have several samples: the records do not say to which sample a token belongs; "
            "run with workload.branching.width=1"
        )
    spans = _spans(requests, own_gaps)
    ends_by_replica = _decode_ends(iterations)
    counts, parts = np.zeros(len(spans.row), np.int64), []
    for replica, ends_s in ends_by_replica.items():
        mine = np.flatnonzero(spans.replica == replica)
        low = np.searchsorted(ends_s, spans.start_s[mine] + SAME_S, side="right")
        high = np.searchsorted(ends_s, spans.stop_s[mine] + SAME_S, side="right")
        counts[mine] = np.maximum(high - low, 0)
        parts.append((mine, low, ends_s))
    # Each span holds the token at its start, then one token for each iteration in it.
    num_by_span = 1 + counts
    first = np.cumsum(num_by_span) - num_by_span
    time_s = np.empty(int(num_by_span.sum()))
    time_s[first] = spans.start_s
    for mine, low, ends_s in parts:
        num = counts[mine]
        step = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
        time_s[np.repeat(first[mine] + 1, num) + step] = ends_s[np.repeat(low, num) + step]
    begins = None
    if bursts is not None:
        together = tokens_together(
            BurstTimes.of(bursts, requests, iterations), np.repeat(spans.row, num_by_span), time_s
        )
        time_s = np.repeat(time_s, together)
        begins = np.zeros(len(time_s), np.bool_)
        begins[np.cumsum(together) - together] = True
        num_by_span = np.add.reduceat(together, first) if len(first) else num_by_span
    num_tokens = np.bincount(spans.row, weights=num_by_span, minlength=len(requests)).astype(np.int64)
    counted = column(requests, "output_tokens")
    wrong = np.flatnonzero(num_tokens != counted)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"request {requests['request_id'].iloc[row]}: the tables of iterations and gaps give "
            f"{num_tokens[row]} token times, the table of requests {counted[row]} output tokens "
            f"({len(wrong)} of {len(counted)} requests differ); the tables are of several runs or incomplete"
        )
    return TokenTimes(time_s, num_tokens, begins)


class _Spans(NamedTuple):
    """Spans that begin with a first token or the end of an own gap, with a token at each iteration."""

    row: NDArray[np.int64]
    replica: NDArray[np.int64]
    start_s: NDArray[np.float64]
    stop_s: NDArray[np.float64]


def _spans(requests: AnyTable, own_gaps: AnyTable) -> _Spans:
    """Returns the spans, sorted by the row of the request, then by time.

    A first token is a span by itself, because the second token always ends an own gap.
    """
    first_s, last_s = (column(requests, f"{name}_token_s", np.float64) for name in ("first", "last"))
    gap_row = places_of(column(requests, "request_id"), column(own_gaps, "request_id"))
    end_s = column(own_gaps, "end_s", np.float64)
    # Gaps of failed attempts (crash, client timeout) lie before the first token of the last attempt.
    known = gap_row >= 0
    at = gap_row[known]
    known[known] = (end_s[known] > first_s[at]) & (end_s[known] <= last_s[at])
    begun = np.flatnonzero(~np.isnan(first_s))
    row = np.concatenate([begun, gap_row[known]])
    start_s = np.concatenate([first_s[begun], end_s[known]])
    since_s = np.concatenate([first_s[begun], column(own_gaps, "since_s", np.float64)[known]])
    replica = np.concatenate([np.full(len(begun), -1), column(own_gaps, "replica")[known]]).astype(np.int64)
    is_gap = np.repeat([False, True], [len(begun), int(np.count_nonzero(known))])
    order = np.lexsort((is_gap, start_s, row))
    row, replica, start_s, since_s = row[order], replica[order], start_s[order], since_s[order]
    is_last = np.append(row[1:] != row[:-1], [True] * bool(len(row)))
    stop_s = np.where(is_last, last_s[row], np.roll(since_s, -1))
    return _Spans(row, replica, start_s, stop_s)


def _decode_ends(iterations: AnyTable) -> dict[int, NDArray[np.float64]]:
    """Returns, for each replica, the sorted end times of its iterations with decodes."""
    decodes = column(iterations, "decode_seqs") > 0
    ends_s = decode_ends_s(iterations)[decodes]
    replica = column(iterations, "replica")[decodes]
    return {int(one): np.sort(ends_s[replica == one]) for one in np.unique(replica)}


def decode_ends_s(iterations: AnyTable) -> NDArray[np.float64]:
    """Returns the end times of iterations, at which their tokens arrive, in seconds."""
    ends_s: NDArray[np.float64] = times(iterations, "start_s") + times(iterations, "duration_s")
    return ends_s


SAME_S = 1e-9
"""Times closer than this are equal: the end of an iteration is a rounded sum of its start and duration."""


class BurstTimes(NamedTuple):
    """Bursts by the row of their request, with their times and their kept draft tokens."""

    row: NDArray[np.int64]
    time_s: NDArray[np.float64]
    kept: NDArray[np.int64]

    @classmethod
    def of(cls, bursts: AnyTable, requests: AnyTable, iterations: AnyTable) -> BurstTimes:
        """Returns the bursts of the requests, without those of attempts that failed.

        bursts: see `SpeculationRecord`. iterations: consecutive ones of each replica. The last attempt lies
        between first and last token of a request.
        """
        replica = column(iterations, "replica")
        first = np.searchsorted(replica, column(bursts, "replica"))
        at = first + column(bursts, "iteration") - column(iterations, "iteration")[first]
        end_s = (column(iterations, "start_s") + column(iterations, "duration_s"))[at]
        row = places_of(column(requests, "request_id"), column(bursts, "request_id"))
        first_s, last_s = (column(requests, f"{name}_token_s", np.float64) for name in ("first", "last"))
        known = row >= 0
        own = row[known]
        known[known] = (end_s[known] > first_s[own]) & (end_s[known] <= last_s[own] + SAME_S)
        kept = column(bursts, "kept_tokens", np.int64)
        return cls(row[known], end_s[known], kept[known])


def tokens_together(
    bursts: BurstTimes, row: NDArray[np.int64], time_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns how many tokens arrived at each time. row, time_s: of one token per pass, sorted by both.

    Raises ValueError if a burst is at none of these times.
    """
    num_passes = len(time_s)
    together = np.ones(num_passes, np.int64)
    if not len(bursts.row):
        return together
    all_rows, all_s = np.concatenate([row, bursts.row]), np.concatenate([time_s, bursts.time_s + SAME_S])
    order = np.lexsort((all_s, all_rows))
    is_burst = order >= num_passes
    before = np.maximum.accumulate(np.where(is_burst, -1, np.arange(len(order))))
    at = order[before[is_burst]]  # the last pass of the request until the burst
    burst = order[is_burst] - num_passes
    is_found = (before[is_burst] >= 0) & (row[at] == bursts.row[burst])
    is_found &= np.abs(time_s[at] - bursts.time_s[burst]) <= SAME_S
    if not is_found.all():
        time_of_burst_s = bursts.time_s[burst[~is_found]][0]
        raise ValueError(
            f"a burst at {time_of_burst_s:g} s is at no pass of its request ({int((~is_found).sum())} of "
            f"{len(burst)} bursts); the tables are of several runs or incomplete"
        )
    np.add.at(together, at, bursts.kept[burst])
    return together
