"""When each token of each request came, from the tables that a run leaves.

    first token          own gap                    own gap
         |------------------->|----|----|----|----|------------->|----|
       first_token_s       end_s   iterations with decodes    end_s  last_token_s

A request's tokens come at the iterations with decodes of its replica, one behind the other, but for the gaps
of its own (`RunRecords.own_gaps`): the first one behind its prompt, those over which it was preempted, idle
or transferred. Of requests with several answers it is not known which answer a token belongs to.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

SAME_S = 1e-9
"""Times that differ by less are the same: ends of iterations are sums of a start and a duration."""


class TokenTimes(NamedTuple):
    """Of all requests, one behind the other in the order of their table; num_tokens: of each."""

    time_s: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def first(self) -> NDArray[np.int64]:
        """Where each request begins in time_s."""
        return np.cumsum(self.num_tokens) - self.num_tokens

    def gaps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """All gaps between two tokens of a request in seconds, and the row of each one's request."""
        owner = np.repeat(np.arange(len(self.num_tokens)), self.num_tokens)
        same = owner[1:] == owner[:-1]
        return np.diff(self.time_s)[same], owner[1:][same]

    def of(self, row: int) -> NDArray[np.float64]:
        """One request's."""
        first = int(self.first[row])
        return self.time_s[first : first + int(self.num_tokens[row])]


def known_token_times(
    requests: pd.DataFrame, iterations: pd.DataFrame, own_gaps: pd.DataFrame
) -> TokenTimes | None:
    """`token_times`; None where a request has several answers."""
    if "samples" in requests and (requests["samples"] > 1).any():
        return None
    return token_times(requests, iterations, own_gaps)


def token_times(requests: pd.DataFrame, iterations: pd.DataFrame, own_gaps: pd.DataFrame) -> TokenTimes:
    """The tables of `RunRecords`. Raises ValueError for several answers and for tables that do not fit."""
    if "samples" in requests and (requests["samples"] > 1).any():
        raise ValueError(
            "requests have several answers: which of them a token belongs to is not recorded; "
            "workload.branching.width=1 asks for one"
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
    # Each span: the token at its start, then those of the iterations behind it.
    num_by_span = 1 + counts
    first = np.cumsum(num_by_span) - num_by_span
    time_s = np.empty(int(num_by_span.sum()))
    time_s[first] = spans.start_s
    for mine, low, ends_s in parts:
        num = counts[mine]
        step = np.arange(int(num.sum())) - np.repeat(np.cumsum(num) - num, num)
        time_s[np.repeat(first[mine] + 1, num) + step] = ends_s[np.repeat(low, num) + step]
    num_tokens = np.bincount(spans.row, weights=num_by_span, minlength=len(requests)).astype(np.int64)
    counted = requests["output_tokens"].to_numpy()
    wrong = np.flatnonzero(num_tokens != counted)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"request {requests['request_id'].iloc[row]}: iterations and gaps give {num_tokens[row]} times "
            f"of tokens, the requests say {counted[row]} output tokens ({len(wrong)} of {len(counted)} "
            "requests do not fit); the tables are not of one run, or not whole"
        )
    return TokenTimes(time_s, num_tokens)


class _Spans(NamedTuple):
    """Begun by a first token or by the end of an own gap: tokens come at every iteration until stop_s."""

    row: NDArray[np.int64]
    replica: NDArray[np.int64]
    start_s: NDArray[np.float64]
    stop_s: NDArray[np.float64]


def _spans(requests: pd.DataFrame, own_gaps: pd.DataFrame) -> _Spans:
    """By row of the request, then by time. A first token is its own span: the next one ends an own gap."""
    first_s, last_s = (requests[f"{name}_token_s"].to_numpy(np.float64) for name in ("first", "last"))
    row_of = pd.Series(np.arange(len(requests)), index=requests["request_id"].to_numpy())
    gap_row = row_of.reindex(own_gaps["request_id"].to_numpy()).to_numpy(np.float64)
    end_s = own_gaps["end_s"].to_numpy(np.float64)
    # What a crash or an impatient client has cost lies before the first token of the attempt that counts.
    known = ~np.isnan(gap_row)
    at = gap_row[known].astype(np.int64)
    known[known] = (end_s[known] > first_s[at]) & (end_s[known] <= last_s[at])
    gaps = own_gaps[known]
    begun = np.flatnonzero(~np.isnan(first_s))
    row = np.concatenate([begun, gap_row[known].astype(np.int64)])
    start_s = np.concatenate([first_s[begun], gaps["end_s"].to_numpy(np.float64)])
    since_s = np.concatenate([first_s[begun], gaps["since_s"].to_numpy(np.float64)])
    replica = np.concatenate([np.full(len(begun), -1), gaps["replica"].to_numpy()]).astype(np.int64)
    is_gap = np.repeat([False, True], [len(begun), len(gaps)])
    order = np.lexsort((is_gap, start_s, row))
    row, replica, start_s, since_s = row[order], replica[order], start_s[order], since_s[order]
    is_last = np.append(row[1:] != row[:-1], [True] * bool(len(row)))
    stop_s = np.where(is_last, last_s[row], np.roll(since_s, -1))
    return _Spans(row, replica, start_s, stop_s)


def _decode_ends(iterations: pd.DataFrame) -> dict[int, NDArray[np.float64]]:
    """By replica, when the iterations with decodes ended, in order."""
    decodes = iterations[iterations["decode_seqs"].to_numpy() > 0]
    ends_s = (decodes["start_s"] + decodes["duration_s"]).to_numpy(np.float64)
    replica = decodes["replica"].to_numpy()
    return {int(one): np.sort(ends_s[replica == one]) for one in np.unique(replica)}
