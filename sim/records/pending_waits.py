"""The waits of requests whose events have been taken before their rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.records.event_rows import WAIT_COLUMNS, waits_by_request
from sim.records.table import Table, joined

_COLUMNS = ["replica", "request_id", *WAIT_COLUMNS]


class PendingWaits:
    """The events with a wait of the requests whose rows have not been taken.

    The waits are kept one by one and not as sums, because `waits_by_request` adds them replica by replica,
    and the last bit of a sum depends on the order.
    """

    def __init__(self) -> None:
        self._waits: list[Table] = []

    def add(self, events: Table) -> None:
        """Adds the waits of events, which follow those of earlier calls in time on each replica."""
        waits = events[_COLUMNS]
        is_wait: NDArray[np.bool_] = np.any([waits[name] for name in WAIT_COLUMNS], axis=0)
        is_wait &= events["request_id"] >= 0
        self._waits.append(waits[is_wait])

    def take(self, request_ids: NDArray[np.int64], end: int) -> dict[str, NDArray[np.float64]]:
        """Returns the seconds that requests waited, by column of `WAIT_COLUMNS`, and drops those below `end`.

        request_ids: those below `end` that have arrived, ascending.
        """
        waits = joined(self._waits)
        is_taken = waits["request_id"] < end
        self._waits = [waits[~is_taken]]
        taken = waits[is_taken]
        taken = taken.take(np.argsort(taken["replica"], kind="stable"))
        first = int(request_ids[0]) if len(request_ids) else 0
        ids = taken["request_id"] - first
        return waits_by_request(taken.assign(request_id=ids), request_ids - first)
