"""A part of the records of a run that streams them: what has ended since the part before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sim.records.run import RunRecords
from sim.records.table import AnyTable

GROUP_ROWS: Final = 1 << 16
"""Requests of a group: group k has the ids from k * GROUP_ROWS to (k + 1) * GROUP_ROWS - 1.

The rows of a group are handed on together, when all its requests have ended, so that the parts of the table
of requests do not depend on the moments at which a run was cut.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordChunk:
    """The records of a run since the chunk before, or all of them; the chunks together are `RunRecords`.

    The tables and arrays have the columns and dtypes of the same fields of `RunRecords`, and hold every row
    in exactly one chunk. Which rows a chunk has depends on the moments at which the run was cut, so figures
    must not depend on it.

    requests: the complete groups (see `GROUP_ROWS`) since the chunk before, by request id; ids ascend from
      chunk to chunk. The last chunk has the rest, also the requests that have not ended.
    iterations: by (replica, iteration), of all replicas; the first iteration of a replica follows the last
      one of the chunks before. The steps that run at the time of the cut are in a later chunk, so an
      iteration may have ended before until_s and come later.
    gap_s, gap_count, gap_end_s: the gaps of these iterations and of `own_gaps`, in any order.
    own_gaps, events, bursts: what was logged since the chunk before. The rows of a request are in the chunk
      of its row of `requests` or in earlier ones. bursts: None if no replica speculates.
    unfilled: as `RunRecords.unfilled`. The range of iterations of a row may begin in earlier chunks; its last
      iteration is in this chunk or an earlier one.
    unfilled_since: for each replica, the first iteration with which rows of `unfilled` of later chunks may
      begin, [R]; None: it is not known, or no KV is reserved ahead.
    pool_by_replica: as `RunRecords.pool_by_replica`, for the replicas that the run has had so far.
    until_s: the last end of a request before the cut, s; the run does not end before it.
    later_since_s: earliest time at which a request of a later chunk may have got a token, s; -inf: it is not
      known.
    iterations_since_s: earliest time at which an iteration of a later chunk may begin, s; -inf: it is not
      known.
    own_s: latencies of `requests` that only the workload knows and the SLO limits, by name, s: see
      `sim.metrics.workload.OwnLatencies`.
    end: None, but in the last chunk: the records of the whole run with tables without rows, for all other
      fields. `end.speculation.acceptance` is that of the whole run.
    """

    requests: AnyTable
    iterations: AnyTable
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
    own_gaps: AnyTable
    events: AnyTable
    bursts: AnyTable | None
    unfilled: NDArray[np.int64] | None
    pool_by_replica: NDArray[np.int64]
    until_s: float
    unfilled_since: NDArray[np.int64] | None = None
    later_since_s: float = -np.inf
    iterations_since_s: float = -np.inf
    own_s: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    end: RunRecords | None = None

    @classmethod
    def of(cls, records: RunRecords, *, ends: bool = True) -> RecordChunk:
        """Returns all records as one chunk. ends: whether the run ends with it; that of a shard does not."""
        return cls(
            requests=records.requests,
            iterations=records.iterations,
            gap_s=records.gap_s,
            gap_count=records.gap_count,
            gap_end_s=records.gap_end_s,
            own_gaps=records.own_gaps,
            events=records.events,
            bursts=records.bursts,
            unfilled=records.unfilled,
            pool_by_replica=records.pool_by_replica,
            until_s=records.end_s,
            end=records if ends else None,
        )


def without_rows(records: RunRecords) -> RunRecords:
    """Returns the records with tables without rows."""
    speculation = records.speculation
    return replace(
        records,
        requests=records.requests[:0],
        iterations=records.iterations[:0],
        gap_s=records.gap_s[:0],
        gap_count=records.gap_count[:0],
        gap_end_s=records.gap_end_s[:0],
        own_gaps=records.own_gaps[:0],
        events=records.events[:0],
        unfilled=None if records.unfilled is None else records.unfilled[:0],
        speculation=None if speculation is None else replace(speculation, bursts=speculation.bursts[:0]),
    )
