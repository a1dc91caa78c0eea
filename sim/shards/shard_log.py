"""The log of the requests of a shard: rows for its own requests only, found by their id in the whole run."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.records.requests import EMPTY_ROW, RequestLog
from sim.records.table import Table


class OwnRows:
    """A column of the log, with a row for each of the shard's requests. rows: request id -> row."""

    __slots__ = ("rows", "values")

    def __init__(self, values: Any, rows: Any) -> None:
        self.values = values
        self.rows = rows

    def __getitem__(self, request_id: int) -> Any:
        return self.values[self.rows[request_id]]

    def __setitem__(self, request_id: int, value: Any) -> None:
        self.values[self.rows[request_id]] = value

    def __len__(self) -> int:
        return len(self.rows)


class ShardRequestLog(RequestLog):
    """A log of the requests for which is_own is true, by request id, [N]."""

    def __init__(self, is_own: NDArray[np.bool_]) -> None:
        super().__init__()
        self._ids = np.flatnonzero(is_own)
        rows = np.cumsum(is_own, dtype=np.int32) - np.int32(1)
        by_id = memoryview(rows)  # type: ignore[arg-type]
        num_own = len(self._ids)
        for name, empty in EMPTY_ROW.items():
            typecode: Any = getattr(getattr(self, name), "typecode", "B")  # has_arrived is of bytes
            values: Any = [empty]
            setattr(self, name, OwnRows(array(typecode, values) * num_own, by_id))

    def table(self) -> Table:
        """Returns one row per request of the shard: see `RequestLog.table`."""
        columns: Any = self
        at = np.flatnonzero(np.frombuffer(columns.has_arrived.values, np.bool_))

        def dropped(column: Any) -> NDArray[Any]:
            values = column.values
            of_requests = np.frombuffer(values, values.typecode)[at]
            del values[:]
            return of_requests

        return self._table_of(self._ids[at], dropped)
