"""Metrics that only the workload of a run can compute: its records, summary sections and latencies.

See `sim.workload.base`. The latency of a task is known when its last call has ended, so the rows of earlier
calls are held back until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.definitions import Window
from sim.metrics.token_times import TokenTimes, decode_ends_s, known_token_times
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords
from sim.records.table import AnyTable, column, joined, places_of


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRecords:
    """Records of the requests of one workload: of a whole run, or of a part of a mix.

    requests: see `RequestLog.table`. iterations: of the whole run. own_gaps, bursts: see `RunRecords`; rows
    of other requests may be included. window: the measured part of the run.
    """

    requests: AnyTable
    iterations: AnyTable
    own_gaps: AnyTable
    bursts: AnyTable | None
    window: Window
    is_part: bool = False
    """Whether these are the requests of a part of a mix."""

    @classmethod
    def of(cls, records: RunRecords, window: Window) -> WorkloadRecords:
        """Returns the records of all requests of a run."""
        return cls(
            requests=records.requests,
            iterations=records.iterations,
            own_gaps=records.own_gaps,
            bursts=records.bursts,
            window=window,
        )

    def token_times(self) -> TokenTimes | None:
        """Returns the times of all tokens, or None if a request has several samples."""
        return known_token_times(self.requests, self.iterations, self.own_gaps, self.bursts)

    def plain_latencies(self) -> dict[str, NDArray[np.float64]]:
        """Returns default latencies of requests, for which the workload has no special rule, in seconds.

        publish: TTFT, NaN without a token; task: E2E, NaN if the request has not finished.
        """
        arrival_s, first_s, last_s = (
            column(self.requests, f"{name}_s", np.float64)
            for name in ("arrival", "first_token", "last_token")
        )
        finished = column(self.requests, "status") == "finished"
        return {
            "publish": definitions.ttft_s(arrival_s, first_s),
            "task": np.where(finished, definitions.e2e_s(arrival_s, last_s), np.nan),
        }

    def part(
        self, rows: NDArray[np.bool_], name: str, index: int, num_parts: int, first: int = 0
    ) -> WorkloadRecords:
        """Returns the records of the requests of one part of a mix, with the part's own numbering.

        Requests are numbered from `first` on in their order in the run. Tenants and session ids are converted
        back to the part's own: in the mix, tenants begin with its name, and sessions are id * num_parts +
        index (-1: none).
        """
        requests = self.requests[rows]
        ids = column(requests, "request_id")
        session = column(requests, "session_id")
        tenants = [one.removeprefix(name).removeprefix("/") for one in column(requests, "tenant").tolist()]
        return WorkloadRecords(
            requests=requests.assign(
                request_id=first + np.arange(len(requests)),
                tenant=np.array(tenants, dtype=object),
                session_id=np.where(session < 0, session, (session - index) // num_parts),
            ),
            iterations=self.iterations,
            own_gaps=_renumbered(self.own_gaps, ids, first),
            bursts=None if self.bursts is None else _renumbered(self.bursts, ids, first),
            window=self.window,
            is_part=True,
        )


def _renumbered(table: AnyTable, ids: NDArray[np.int64], first: int) -> AnyTable:
    """Returns the rows of the requests with the ids, numbered from `first` on in the order of these."""
    place = places_of(ids, column(table, "request_id"))
    return table[place >= 0].assign(request_id=first + place[place >= 0])


COLUMNS = ["replica", "iteration", "start_s", "duration_s", "decode_seqs"]
"""Columns of the iterations table from which token times are derived."""


class SectionFigure(Protocol):
    """An accumulator of sections of the summary."""

    @property
    def needs_tokens(self) -> bool:
        """Returns whether it reads iterations and gaps, for token times."""
        ...

    @property
    def lack(self) -> str | None:
        """Returns why its sections cannot be computed; None: they can."""
        ...

    def add(self, records: WorkloadRecords) -> None:
        """Adds requests, in the order of their ids."""
        ...

    def merge(self, other: Any) -> None:
        """Adds the requests of another accumulator of this kind, which is not changed."""
        ...

    def value(self, window: Window) -> Mapping[str, Any]:
        """Returns the sections by name."""
        ...


class Sections:
    """The accumulators of a workload and its nested workloads, from the innermost to the outermost.

    The chunks of a replica go to one object, in order of time; objects with different replicas can be merged.
    """

    def __init__(self, figures: Sequence[SectionFigure]) -> None:
        self._figures = figures
        self._earlier = EarlierTokens() if any(one.needs_tokens for one in figures) else None

    def add(self, chunk: RecordChunk, window: Window) -> None:
        """Adds the requests of a chunk."""
        records = WorkloadRecords(
            requests=chunk.requests,
            iterations=chunk.iterations,
            own_gaps=chunk.own_gaps,
            bursts=chunk.bursts,
            window=window,
        )
        if self._earlier is not None:
            records = self._earlier.joined(chunk, records)
        for one in self._figures:
            one.add(records)
        if self._earlier is not None:
            self._earlier.keep(chunk, records)

    def merge(self, other: Sections) -> None:
        """Adds the requests of other, which is not changed."""
        for mine, theirs in zip(self._figures, other._figures, strict=True):
            mine.merge(theirs)

    def value(self, window: Window) -> dict[str, Any]:
        """Returns the sections by name; those of outer workloads take precedence."""
        found: dict[str, Any] = {}
        for one in self._figures:
            found |= one.value(window)
        return found

    @property
    def lack(self) -> str | None:
        """Returns why sections cannot be computed; None: they can."""
        return next((one.lack for one in self._figures if one.lack is not None), None)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the records of earlier chunks: the copy can only be merged."""
        return {"_figures": self._figures, "_earlier": None}


class EarlierTokens:
    """The iterations, gaps and bursts of earlier chunks that requests of later ones may need."""

    def __init__(self) -> None:
        self._iterations: AnyTable | None = None
        self._own_gaps: AnyTable | None = None
        self._bursts: AnyTable | None = None

    def joined(self, chunk: RecordChunk, records: WorkloadRecords) -> WorkloadRecords:
        """Returns the records of a chunk with those of earlier ones."""
        if chunk.end is not None and self._iterations is None:
            return records
        iterations = _joined(self._iterations, chunk.iterations[COLUMNS])
        if self._iterations is not None:
            order = np.lexsort((column(iterations, "iteration"), column(iterations, "replica")))
            iterations = iterations.take(order)
        return WorkloadRecords(
            requests=records.requests,
            iterations=iterations,
            own_gaps=_joined(self._own_gaps, chunk.own_gaps),
            bursts=None if chunk.bursts is None else _joined(self._bursts, chunk.bursts),
            window=records.window,
        )

    def keep(self, chunk: RecordChunk, records: WorkloadRecords) -> None:
        """Keeps the data that later requests may need. records: result of `joined`."""
        if chunk.end is not None:
            return
        # A later request gets its tokens at the ends of later iterations.
        ends_s = decode_ends_s(records.iterations)
        last_id = int(column(chunk.requests, "request_id").max()) if len(chunk.requests) else -1
        self._iterations = records.iterations[ends_s >= chunk.later_since_s]
        self._own_gaps = _later(records.own_gaps, last_id)
        self._bursts = None if records.bursts is None else _later(records.bursts, last_id)


def _later(table: AnyTable, last_id: int) -> AnyTable:
    """Returns the rows of requests after an id."""
    return table[column(table, "request_id") > last_id]


def _joined(earlier: AnyTable | None, table: AnyTable) -> AnyTable:
    return table if earlier is None else joined([earlier, table])


WHOLE_RUN = Window(0.0, np.inf)


class OwnLatency(Protocol):
    """Computes latencies of the requests of a workload."""

    @property
    def needs_tokens(self) -> bool:
        """Returns whether it reads iterations and gaps, for token times."""
        ...

    @property
    def numbers_matter(self) -> bool:
        """Returns whether it needs numbers of requests in sessions or parts, which shards do not know."""
        ...

    def see(self, records: WorkloadRecords) -> None:
        """Records requests, in the order of their ids, possibly long before their latencies are computed."""
        ...

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns which requests have final latencies. records: ended requests that have been added.

        open_sessions: sessions of all other requests.
        """
        ...

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns, by name, the latency of each request in seconds; NaN: it has none.

        Every request is passed once, in the order of ids.
        """
        ...


def no_sessions(request_id: int) -> Collection[int]:
    """Returns an empty set: no session of a later request matters."""
    return ()


class OwnLatencies:
    """Adds the workload's latencies to the chunks of a run.

    computed: of the workload and its nested workloads, from the innermost to the outermost. terms: the
    required latencies, in the order of the columns. sessions_after: returns the sessions with requests after
    an id. group_rows: see `sim.records.run`.
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

        Requests come in complete groups, some of them delayed; the last chunk has all remaining ones.
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
        """Returns the requests to pass on and the requests to hold back; None: none."""
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
