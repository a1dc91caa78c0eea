"""Latencies of requests that only the workload knows: see `sim.workload.base`.

The latency of a task is known when the last of its calls has ended, so the rows of earlier calls are held
back until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.sections import EarlierTokens
from sim.metrics.workload_records import WorkloadRecords
from sim.records.chunk import GROUP_ROWS, RecordChunk
from sim.records.table import AnyTable, column, joined

WHOLE_RUN = Window(0.0, np.inf)


class OwnLatency(Protocol):
    """Computes latencies of the requests of a workload."""

    @property
    def needs_tokens(self) -> bool:
        """Returns whether it reads iterations and gaps, for the times of tokens."""
        ...

    @property
    def numbers_matter(self) -> bool:
        """Returns whether it needs the numbers of requests in their sessions or parts, unknown in shards."""
        ...

    def see(self, records: WorkloadRecords) -> None:
        """Notes requests, in the order of their ids, perhaps long before their latencies are asked for."""
        ...

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns which requests have latencies that do not change any more.

        records: requests that have ended and have been seen. open_sessions: those of other requests.
        """
        ...

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns, by name, the latency of each request in seconds; NaN: it has none.

        Every request comes once, in the order of their ids.
        """
        ...


def no_sessions(request_id: int) -> Collection[int]:
    """Returns that no later request has a session that matters."""
    return ()


class OwnLatencies:
    """Completes the chunks of a run by the latencies that its workload knows.

    computed: of the workload and of those inside it, from the innermost to the outermost. terms: those
    that are wanted, in the order of the columns. sessions_after: returns the sessions with requests behind an
    id. group_rows: see `sim.records.chunk`.
    """

    def __init__(
        self,
        computed: Sequence[OwnLatency],
        terms: Sequence[str],
        sessions_after: Callable[[int], Collection[int]] = no_sessions,
        group_rows: int = GROUP_ROWS,
    ) -> None:
        self._computed, self._terms, self._group_rows = computed, terms, group_rows
        self._sessions_after = sessions_after
        self._earlier = EarlierTokens() if any(one.needs_tokens for one in computed) else None
        self._held: AnyTable | None = None

    def completed(self, chunk: RecordChunk) -> RecordChunk:
        """Returns the chunk with the requests whose latencies are known, and these latencies.

        Requests come in complete groups, some later than without this; the last chunk has all that remain.
        """
        if not self._terms:  # as in most runs
            return chunk
        for one in self._computed:
            one.see(_records(chunk, chunk.requests))
        requests, held = self._ready(chunk)
        later_since_s = chunk.later_since_s
        if held is not None:
            later_since_s = min(later_since_s, float(column(held, "arrival_s").min()))
        self._held = held
        completed = replace(chunk, requests=requests, later_since_s=later_since_s)
        records = _records(completed, requests)
        if self._earlier is not None:
            records = self._earlier.joined(completed, records)
        found: dict[str, NDArray[np.float64]] = {}
        for one in self._computed:
            found |= one.latencies(records)
        if self._earlier is not None:
            self._earlier.keep(completed, records)
        return replace(completed, own_s={term: found[term] for term in self._terms})

    def _ready(self, chunk: RecordChunk) -> tuple[AnyTable, AnyTable | None]:
        """Returns the requests that are handed on, and those that are held back; None: there are none."""
        rows = chunk.requests
        if self._held is not None:
            rows = joined([self._held, rows])
        if chunk.end is not None or not len(rows):
            return rows, None
        records = _records(chunk, rows)
        open_sessions = self._sessions_after(int(column(rows, "request_id")[-1]))
        known = np.ones(len(rows), np.bool_)
        for one in self._computed:
            known &= one.known(records, open_sessions)
        if known.all():
            return rows, None
        group = column(rows, "request_id") // self._group_rows
        num_ready = int(np.searchsorted(group, group[np.argmin(known)]))
        return rows[:num_ready], rows[num_ready:]


def _records(chunk: RecordChunk, requests: AnyTable) -> WorkloadRecords:
    return WorkloadRecords(
        requests=requests,
        iterations=chunk.iterations,
        own_gaps=chunk.own_gaps,
        bursts=chunk.bursts,
        window=WHOLE_RUN,
    )
