"""A part of a fleet in windows whose records are written and added up while it runs.

Its memory holds what is in flight only. What it leaves is merged as the files of shards that stream are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.streamed import StreamedSimulation
from sim.engine.replica_pool import ReplicaPool
from sim.records.chunk import GROUP_ROWS, RecordChunk
from sim.records.timed_rows import SORTED_BY, Interval, TimedRows
from sim.shards.intervals import MEMBERS, IntervalWriter
from sim.shards.request_windows import WindowWriter
from sim.shards.shard_file import ShardFile, ShardMember, shard_bytes
from sim.shards.streamed import ROWS, NewSetting, ShardFigures
from sim.shards.traffic import Bounds
from sim.shards.window_part import CountTable, FedSource, PartHere, Replicas
from sim.workload.base import Source


class CountedSource(FedSource):
    """The traffic of a part, which knows the groups of which all requests have come."""

    def __init__(self, source: Source, bounds: Bounds, group_rows: int) -> None:
        """Creates the traffic. group_rows: see `sim.records.chunk`."""
        super().__init__(source, bounds)
        self._group_rows = group_rows
        self._num_come: dict[int, int] = {}

    def _note(self, request_ids: NDArray[np.int64]) -> None:
        groups, counts = np.unique(request_ids // self._group_rows, return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            self._num_come[group] = self._num_come.get(group, 0) + count

    def group_has_come(self, first: int) -> bool:
        """Returns whether all requests of the group that begins with id `first` have been read."""
        return self._num_come.get(first // self._group_rows, 0) == self._group_rows


class _StreamedSimulation(PartHere, StreamedSimulation):
    """A part of a fleet that hands its records on while it runs. group_rows: see `StreamedSimulation`."""

    def __init__(self, *, group_rows: int, **others: Any) -> None:
        self._group_rows = group_rows
        super().__init__(group_rows=group_rows, **others)

    def _fed_source(self, source: Source, bounds: Bounds) -> CountedSource:
        self._counted = CountedSource(source, bounds, self._group_rows)
        return self._counted

    def begin(self, replicas: Replicas, until_s: float) -> None:
        super().begin(replicas, until_s)
        if self._is_due():
            self.flush()

    def _group_has_come(self, first: int) -> bool:
        return self._counted.group_has_come(first)

    def _open_ids(self) -> Iterator[int]:
        yield from super()._open_ids()
        yield from self._counted.due_ids()
        if self._next is not None:
            yield self._next.request.request_id

    def _pool_by_replica(self) -> list[int]:
        return self._pool_of

    def _unfilled_since(self) -> NDArray[np.int64]:
        since = np.zeros(len(self._pool_of), np.int64)
        own = super()._unfilled_since()
        since[self._first : self._first + len(own)] = own
        return since

    def _chunk(self, *settings: Any) -> RecordChunk:
        chunk = super()._chunk(*settings)
        chunk.events["replica"] = chunk.events["replica"].to_numpy() + np.int32(self._first)
        return chunk


class StreamedPart:
    """A part of a fleet that writes the rows of its requests to a file, and adds up its figures.

    rows: the file, which is made. new_setting: makes the setting of the figures. width_s: of the intervals of
    iterations and gaps, which are written to files beside it (`file_of_table`); None: they are left out.
    group_rows: see `sim.records.chunk`. Others as for `PartHere`. Raises OSError.
    """

    def __init__(
        self,
        *,
        source: Source,
        pools: Sequence[ReplicaPool],
        bounds: Bounds,
        cluster: ClusterSettings,
        sim: SimSettings,
        new_setting: NewSetting,
        rows: Path,
        width_s: float | None = None,
        group_rows: int = GROUP_ROWS,
    ) -> None:
        self._bounds, self._notes, self._path = bounds, source.notes, rows
        self._simulation = _StreamedSimulation(
            source=source,
            pools=pools,
            bounds=bounds,
            cluster=cluster,
            sim=sim,
            take=self._take,
            group_rows=group_rows,
        )
        self._figures = ShardFigures(new_setting(self._simulation.fleet.records(0.0)[0]))
        self._file = rows.open("wb")
        self._writer = WindowWriter(self._file, group_rows)
        self._timed = None if width_s is None else TimedRows(width_s)
        self._tables: dict[str, tuple[IO[bytes], IntervalWriter]] = {}

    @property
    def num_ended(self) -> int:
        """Requests of the part that have ended."""
        return self._simulation.num_ended

    def begin(self, replicas: Replicas, until_s: float) -> None:
        """Simulates the part's own of the next requests, up to a fetch at until_s."""
        self._simulation.begin(replicas, until_s)

    def counts(self) -> CountTable:
        """Returns the counts of the part's replicas at the fetch."""
        return self._simulation.counts()

    def finish(self, replicas: Replicas, report: Callable[[float, int], None] | None = None) -> bytes:
        """Simulates the last requests to the end of the run; returns what a `PartFile` reads.

        report: see `Simulation.run`.
        """
        shard = self._simulation.finish(replicas, report)
        with self._named_in_errors():
            self._writer.close()
            self._file.close()
            for file, writer in self._tables.values():
                writer.close()
                file.close()
        return shard_bytes(shard, self._notes, self._figures.parts(shard.records, self._bounds))

    def _take(self, chunk: RecordChunk) -> None:
        rows = self._figures.add(chunk)
        with self._named_in_errors():
            self._writer.add(rows)
            if self._timed is not None:
                self._add_intervals(self._timed.add(chunk, is_last=chunk.end is not None))

    def _add_intervals(self, intervals: Iterator[Interval]) -> None:
        for name, number, rows in intervals:
            if name not in self._tables:
                file = file_of_table(self._path, name).open("wb")
                self._tables[name] = file, IntervalWriter(file)
            self._tables[name][1].add(number, rows)

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Names the file in an OSError of an open file, which has only the reason."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self._path)) from error


def file_of_table(rows: Path, name: str) -> Path:
    """Returns the file of a table of iterations or gaps of a part. rows: that of its requests."""
    return rows.with_suffix(f".{name}.arrow")


class RowsFile(ShardMember):
    """The rows of a part, in a file of their own."""

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Opens the rows, to read from any place in them."""
        assert isinstance(self.file, Path)
        with self.file.open("rb") as content:
            yield content


class PartFile(ShardFile):
    """The result of a part: what `StreamedPart.finish` has returned, and the file of its rows."""

    def __init__(self, content: bytes, rows: Path) -> None:
        super().__init__(BytesIO(content))
        self._rows = rows

    @property
    def names(self) -> Collection[str]:
        """Returns the names of the members, with the tables in files of their own."""
        tables = (name for name in SORTED_BY if file_of_table(self._rows, name).exists())
        return [*super().names, *(MEMBERS + name for name in tables)]

    def member(self, name: str) -> ShardMember:
        """Returns the rows or a table, to be opened after this file is closed."""
        if name == ROWS:
            return RowsFile(self._rows, name)
        if name.startswith(MEMBERS):
            return RowsFile(file_of_table(self._rows, name.removeprefix(MEMBERS)), name)
        return super().member(name)
