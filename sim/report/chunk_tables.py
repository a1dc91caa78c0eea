"""Tables that are written during a run, each as a folder of Parquet files.

A Parquet file cannot be read before its end is written, so a single-file table would be lost if the run is
killed. A folder of complete files can be read at any time: pandas, Polars, DuckDB and Spark read a folder
`requests.parquet` as one table. It also needs no second copy on disk, unlike joining the files at the end.
Each file of requests.parquet has the requests of one group (see `sim.records.run`), so its bytes depend only
on the run, not on the times at which it was divided.

Exact percentiles are computed from the rows of the requests on the disk. One column is read at a time, 8
bytes per request, so that 10^8 requests take 0.8 GB.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.dataset
from numpy.typing import NDArray

from sim.metrics.definitions import PERCENTILES, Window, plain_json, speeds_of
from sim.metrics.distributions import Values
from sim.metrics.measured import request_metrics, speed_figures
from sim.metrics.result import RunSums
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords
from sim.records.table import AnyTable, column
from sim.records.timed_rows import SORTED_BY, TimedRows, empty_tables
from sim.report.files import remove_folder_of_table, table_bytes, write_table, write_whole
from sim.report.numbers import number
from sim.report.run_files import BURSTS, GAPS, saved_records

REQUESTS, SERIES, REPLICAS = "requests.parquet", "series.parquet", "replicas.parquet"
EARLIER: Final = ("requests", "iterations", "gaps", "itl", "bursts", "events")
"""All tables of streamed and unstreamed runs, which would otherwise remain next to those of a new run."""
REQUEST_BYTES: Final = 120
"""Approximate maximum bytes per request in requests.parquet: 82 to 93 with chat traffic."""
ITERATIONS_BYTES: Final = 500
"""Approximate bytes of iterations and gaps per request: 395 with 16 iterations per request."""


class TableFolder:
    """A table as a folder of numbered Parquet files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_files = 0

    def add(self, rows: AnyTable) -> None:
        """Writes the next file, completely or not at all. Raises OSError."""
        self._path.mkdir(parents=True, exist_ok=True)
        write_whole(self._path / f"part-{self._num_files:06}.parquet", table_bytes(rows))
        self._num_files += 1

    @property
    def is_empty(self) -> bool:
        """True if no file has been written."""
        return not self._num_files


class ChunkTables:
    """The tables of a run that streams its records.

    width_s: length of the intervals in which the iterations and gaps are written, see
    `sim.records.timed_rows`; None: they are not written. The tables of an earlier run in the folder are
    removed. Methods raise OSError.
    """

    def __init__(self, folder: Path, *, width_s: float | None, group_rows: int = GROUP_ROWS) -> None:
        self._folder, self._group_rows = folder, group_rows
        for name in EARLIER:
            remove_folder_of_table(folder / f"{name}.parquet")
            (folder / f"{name}.parquet").unlink(missing_ok=True)
        self._requests = TableFolder(folder / REQUESTS)
        self._timed = None if width_s is None else TimedRows(width_s)
        self._others = {name: TableFolder(folder / f"{name}.parquet") for name in SORTED_BY}

    def add(self, chunk: RecordChunk) -> None:
        """Writes the rows of a chunk. Its requests have `request_metrics`."""
        group = column(chunk.requests, "request_id") // self._group_rows
        borders = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
        for first, end in pairwise(borders):
            if end > first:
                self.add_group(chunk.requests[first:end])
        if self._timed is not None:
            for name, _, rows in self._timed.add(chunk, is_last=chunk.end is not None):
                self.add_interval(name, rows)

    def add_group(self, requests: AnyTable) -> None:
        """Writes the rows of the next group of requests."""
        self._requests.add(requests)

    def add_interval(self, name: str, rows: AnyTable) -> None:
        """Writes the rows of an interval of a table of iterations or gaps."""
        self._others[name].add(rows)

    def finish(self, end: RunRecords, sums: RunSums) -> None:
        """Writes the tables of the whole run, and the tables without rows.

        end: the records, with tables without rows. sums: of the whole run.
        """
        if self._requests.is_empty:
            setting = sums.figures.setting
            nothing = {term: np.zeros(0) for term in setting.own_terms}
            self.add_group(request_metrics(end.requests[:0], setting.slo, nothing))
        for name, rows in empty_tables(end).items() if self._timed is not None else ():
            if self._others[name].is_empty:
                self.add_interval(name, rows)
        write_table(sums.replicas.table(end), self._folder / REPLICAS)
        write_table(sums.series.table(), self._folder / SERIES)
        for name, content in saved_records(end):
            if name not in (GAPS, BURSTS):
                write_whole(self._folder / name, content)


def check_free_space(folder: Path, num_requests: int, *, iterations: bool) -> None:
    """Raises ValueError if the tables of this many requests would not fit on disk."""
    needed = num_requests * (REQUEST_BYTES + (ITERATIONS_BYTES if iterations else 0))
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"the tables of {num_requests:,} requests take about {number(needed / 1e6)} MB, and {place} has "
            f"{number(free / 1e6)} MB free; make room, choose another hydra.run.dir, or set "
            "output.tables=false"
        )


LATENCIES = ("ttft", "tpot", "e2e", "queue")


def add_exact_percentiles(summary: dict[str, Any], requests: Path) -> None:
    """Replaces the estimated percentiles of `LATENCIES` and of the speed of users by exact ones.

    summary: of a streaming run. requests: the folder of its requests. Percentiles of ITL, of classes and of
    the client view stay estimates, because the folder has no gaps.
    """
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    table = pyarrow.dataset.dataset(requests, format="parquet")
    measured = window.holds(_column(table, "arrival_s"))
    for name in LATENCIES:
        values = _column(table, f"{name}_s")[measured]
        if name == "tpot":
            speed = Values()
            speed.add(speeds_of(values))
            summary["per_user"] = plain_json(speed_figures(speed))
        values = values[~np.isnan(values)]
        if len(values):
            found = np.percentile(values, PERCENTILES, overwrite_input=True).tolist()
            summary[name] |= {f"p{q}_s": p for q, p in zip(PERCENTILES, found, strict=True)}
    if "clients" not in summary:
        summary["publish"] = summary["ttft"]
    summary["exact_percentiles"] = [*LATENCIES, "per_user"]


def _column(table: pyarrow.dataset.Dataset, name: str) -> NDArray[np.float64]:
    values: NDArray[np.float64] = (
        table.to_table(columns=[name])[name].to_numpy().astype(np.float64, copy=False)
    )
    return values
