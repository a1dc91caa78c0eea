"""Accumulators of the sections that a workload adds to the summary: see `sim.workload.base`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from sim.metrics.definitions import Window
from sim.metrics.token_times import decode_ends_s
from sim.metrics.workload_records import WorkloadRecords
from sim.records.chunk import RecordChunk
from sim.records.table import AnyTable, column, joined

COLUMNS = ["replica", "iteration", "start_s", "duration_s", "decode_seqs"]
"""Columns of the table of iterations that the times of tokens follow from."""


class SectionFigure(Protocol):
    """An accumulator of sections of the summary."""

    @property
    def needs_tokens(self) -> bool:
        """Returns whether it reads iterations and gaps, for the times of tokens."""
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
    """The accumulators of a workload and of those inside it, from the innermost to the outermost.

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
        """Leaves out the records of earlier chunks: the copy can be merged only."""
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
        """Keeps what requests that come later may need. records: result of `joined`."""
        if chunk.end is not None:
            return
        # A later request gets its tokens at the ends of later iterations.
        ends_s = decode_ends_s(records.iterations)
        last_id = int(column(chunk.requests, "request_id").max()) if len(chunk.requests) else -1
        self._iterations = records.iterations[ends_s >= chunk.later_since_s]
        self._own_gaps = _later(records.own_gaps, last_id)
        self._bursts = None if records.bursts is None else _later(records.bursts, last_id)


def _later(table: AnyTable, last_id: int) -> AnyTable:
    """Returns the rows of requests behind an id."""
    return table[column(table, "request_id") > last_id]


def _joined(earlier: AnyTable | None, table: AnyTable) -> AnyTable:
    return table if earlier is None else joined([earlier, table])
