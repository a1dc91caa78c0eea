"""Finds the bursts of runs that speculate: the passes in which several tokens of a request came together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.records.table import AnyTable, column, places_of

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
    """Returns how many tokens came at each time. row, time_s: of a token of each pass, sorted by both.

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
