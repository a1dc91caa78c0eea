"""The tables of iterations and gaps in intervals of simulated time, for runs that stream them.

The rows of an interval are passed on together and in a fixed order, so they do not depend on how and when a
run was divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor, inf, log2
from typing import Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.records.run import RecordChunk, RunRecords
from sim.records.table import AnyTable, Table, column, joined

SORTED_BY: Final = {
    "iterations": ("replica", "iteration"),
    "gaps": ("replica", "end_s", "request_id"),
    "itl": ("gap_end_s", "gap_s", "gap_count"),
    "bursts": ("replica", "iteration", "request_id"),
}
"""The tables, and the columns by which the rows of an interval are sorted."""
REPLICA_SECONDS: Final = 4096.0
"""Simulated seconds of all replicas in total per interval: about 400,000 iterations of 10 ms."""


T = TypeVar("T", bound=AnyTable)


class Interval(NamedTuple):
    """The rows of a table in the interval from number * width_s to (number + 1) * width_s."""

    name: str
    number: int
    rows: AnyTable


def interval_s(num_replicas: int) -> float:
    """Returns the length of intervals for a fleet, in seconds: a power of two, from 1/16 to 4096."""
    exponent: int = floor(log2(REPLICA_SECONDS / num_replicas))
    return 2.0 ** min(max(exponent, -4), 12)


class TimedRows:
    """Holds the rows of intervals that are not complete."""

    def __init__(self, width_s: float) -> None:
        self._width_s = width_s
        self._num_complete = -inf
        self._held: dict[str, list[tuple[AnyTable, NDArray[np.int64]]]] = {name: [] for name in SORTED_BY}

    def add(self, chunk: RecordChunk, *, is_last: bool = False) -> Iterator[Interval]:
        """Yields the intervals completed by a chunk, in order for each table.

        is_last: whether no chunk follows. An iteration, and a burst with it, belongs to the interval in which
        it begins, a gap to that in which it ends.
        """
        end = inf if is_last else chunk.iterations_since_s // self._width_s
        for name, (table, time_s) in _timed(chunk).items():
            held, own = self._held[name], (time_s // self._width_s).astype(np.int64)
            assert not len(own) or own.min() >= self._num_complete, f"{name}: rows of a complete interval"
            held.append((table, own))
            number = np.concatenate([numbers for _, numbers in held])
            ready = number < end
            if not ready.any():
                continue
            rows = _joined([one for one, _ in held])
            held[:] = [(rows[~ready], number[~ready])]
            yield from _intervals(name, rows[ready], number[ready])
        self._num_complete = max(end, self._num_complete)


def _intervals(name: str, rows: AnyTable, number: NDArray[np.int64]) -> Iterator[Interval]:
    order = np.argsort(number, kind="stable")
    found, starts = np.unique(number[order], return_index=True)
    for one, own in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        yield Interval(name, one, in_order(name, rows.take(own)))


def in_order(name: str, rows: T) -> T:
    """Returns the rows of an interval in their order. Rows with equal sort columns are equal."""
    columns = [column(rows, one) for one in reversed(SORTED_BY[name])]
    return rows.take(np.lexsort(columns))


def empty_tables(end: RunRecords) -> dict[str, AnyTable]:
    """Returns the tables of a run without their rows. end: its records, whose tables may have no rows."""
    itl = {"gap_s": end.gap_s[:0], "gap_count": end.gap_count[:0], "gap_end_s": end.gap_end_s[:0]}
    found = {"iterations": end.iterations[:0], "gaps": end.own_gaps[:0], "itl": Table(itl)}
    if end.bursts is not None:
        found["bursts"] = end.bursts[:0]
    return found


def _joined(tables: list[AnyTable]) -> AnyTable:
    some = [table for table in tables if len(table)]
    return some[0] if len(some) == 1 else joined(some)


def _timed(chunk: RecordChunk) -> dict[str, tuple[AnyTable, NDArray[np.float64]]]:
    """Returns the tables of a chunk, and the time of each row."""
    iterations, gaps = chunk.iterations, chunk.own_gaps
    start_s = column(iterations, "start_s", np.float64)
    itl = {"gap_s": chunk.gap_s, "gap_count": chunk.gap_count, "gap_end_s": chunk.gap_end_s}
    found = {
        "iterations": (iterations, start_s),
        "gaps": (gaps, column(gaps, "end_s", np.float64)),
        "itl": (Table(itl), chunk.gap_end_s),
    }
    if chunk.bursts is not None:
        row = np.searchsorted(_keys(iterations), _keys(chunk.bursts))
        found["bursts"] = chunk.bursts, start_s[row]
    return found


def _keys(table: AnyTable) -> NDArray[np.int64]:
    """Returns one number for each replica and iteration; they ascend in the table of iterations."""
    replica, iteration = (column(table, name, np.int64) for name in ("replica", "iteration"))
    keys: NDArray[np.int64] = (replica << 40) + iteration
    return keys
