"""A log of requests whose memory is returned during the run.

Rows stay at the index of the request id, where all parts of a simulation find them. Each column is a memory
map that reserves addresses for more ids than a run can have, but memory only for written pages. The pages of
taken rows are returned to the system.
"""

from __future__ import annotations

import mmap
from array import array
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from sim.records.requests import EMPTY_ROW, RequestLog
from sim.records.run import GROUP_ROWS
from sim.records.table import Table

MAX_ROWS: Final = 1 << 33
"""Rows for which addresses are reserved, unless the system allows fewer."""
_NO_RESERVE: Final = 0x4000
"""Linux's MAP_NORESERVE, which Python 3.11 does not define: the memory need not be available."""
_FLAGS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
_OPENED_ROWS: Final = 1024


class MappedRequestLog(RequestLog):
    """A log from which the rows of ended requests are taken group by group.

    A group is `group_rows` requests with consecutive ids; see `sim.records.run`.
    """

    def __init__(self, group_rows: int = GROUP_ROWS) -> None:
        super().__init__()
        self.group_rows = group_rows
        self.first_row = 0
        """The first id whose row has not been taken."""
        self._num_open = 0
        typecodes: dict[str, Any] = {
            name: getattr(getattr(self, name), "typecode", "B") for name in EMPTY_ROW
        }
        self._maps = _reserved([np.dtype(typecode).itemsize for typecode in typecodes.values()])
        self._empty: list[tuple[Any, Any]] = []  # columns whose empty values are not zero, with such values
        for made, (name, typecode) in zip(self._maps, typecodes.items(), strict=True):
            column = memoryview(made).cast(typecode)
            setattr(self, name, column)
            if EMPTY_ROW[name]:
                self._empty.append((column, array(typecode, [EMPTY_ROW[name]] * _OPENED_ROWS)))

    def arrive(self, request: Request) -> None:
        """Opens the row of a request."""
        while request.request_id >= self._num_open:
            self._append_empty_rows(_OPENED_ROWS)
        super().arrive(request)

    def _append_empty_rows(self, num_rows: int) -> None:
        first, self._num_open = self._num_open, self._num_open + num_rows
        if self._num_open > len(self.has_arrived):
            raise MemoryError(f"this system reserves memory for {len(self.has_arrived):,} requests only")
        for column, empty in self._empty:
            column[first : self._num_open] = empty

    def group_has_arrived(self, first: int) -> bool:
        """Returns whether all requests of the group that begins with id `first` have arrived."""
        return bool(np.frombuffer(self.has_arrived[first : first + self.group_rows], np.bool_).all())

    def take(self, end: int | None = None) -> Table:
        """Returns the rows from `first_row` to end - 1 (None: all) as `table` does, and drops them.

        end: a multiple of group_rows.
        """
        first, end = self.first_row, self._num_open if end is None else end
        at = np.flatnonzero(np.frombuffer(self.has_arrived[first:end], np.bool_))

        def taken(column: Any) -> NDArray[Any]:
            return np.frombuffer(column[first:end], column.format)[at]

        table = self._table_of(first + at, taken)
        self._drop(first, end)
        self.first_row = end
        return table

    def earliest_arrival_s(self) -> float:
        """Returns the earliest arrival of a request whose row has not been taken, s; inf: there is none."""
        rows = slice(self.first_row, self._num_open)
        has_arrived = np.frombuffer(self.has_arrived[rows], np.bool_)
        arrival_s = np.frombuffer(self.arrival_s[rows], np.float64)
        return float(arrival_s.min(initial=np.inf, where=has_arrived))

    def _drop(self, first: int, end: int) -> None:
        """Returns the memory of rows to the system.

        A page is returned when all its rows have been dropped.
        """
        for request_id in [request_id for request_id in self.reason if request_id < end]:
            del self.reason[request_id]
        for made in self._maps:
            item_bytes = len(made) // len(self.has_arrived)
            start = first * item_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            stop = end * item_bytes // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                made.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _reserved(items_bytes: list[int]) -> list[mmap.mmap]:
    """Returns a map for each column, by the size of an item, with as many rows as the system allows."""
    num_rows = MAX_ROWS
    while True:
        try:
            return [mmap.mmap(-1, num_rows * item_bytes, flags=_FLAGS) for item_bytes in items_bytes]
        except (OSError, ValueError, OverflowError):
            if num_rows <= GROUP_ROWS:
                raise
            num_rows //= 2
