"""The table of all events of requests: the logged events, arrivals, first tokens and ends."""

from __future__ import annotations

from typing import Final

import numpy as np

from sim.records.event_rows import TIERS, WAIT_COLUMNS, Event
from sim.records.run import RunRecords
from sim.records.table import AnyTable, Table, column, joined

_COUNTS: Final = ("tokens", "of_tokens", "recomputed_tokens", "by")


def events_table(records: RunRecords) -> Table:
    """Returns one row per event, by time: the logged events, and arrival, first token and end of requests.

    Columns: time_s, request_id (-1: no sequence), replica, event (a name of `Event`), tier, and the counts
    and waits that `Event` and `WAIT_COLUMNS` define; a wait is in the row of the event that ends it.
    """
    requests, logged = records.requests, records.events
    parts = [
        _of_requests(requests, Event.arrive, "arrival_s", "prompt_tokens"),
        _of_requests(requests, Event.first_token, "first_token_s"),
        logged,
        _of_requests(requests, Event.end, "finished_s", "output_tokens"),
    ]
    table = joined(parts)  # the order at equal times
    table = table.take(np.lexsort((table["request_id"], table["time_s"])))
    names = np.array([event.name for event in Event], dtype=object)
    return Table(
        {
            **{name: table[name] for name in ("time_s", "request_id", "replica")},
            "event": names[table["event"]],
            "tier": np.array(TIERS, dtype=object)[table["tier"]],
            **{name: table[name].astype(np.int64) for name in _COUNTS},
            **{name: table[name] for name in WAIT_COLUMNS},
        }
    )


def _of_requests(requests: AnyTable, event: Event, name: str, counted: str | None = None) -> Table:
    """Returns a row of an event for each request that has its time. counted: the column of its tokens."""
    time_s = column(requests, name, np.float64)
    happened = np.flatnonzero(~np.isnan(time_s))
    return Table(
        {
            "replica": column(requests, "replica")[happened],
            "time_s": time_s[happened],
            "request_id": column(requests, "request_id")[happened],
            "event": np.full(len(happened), event, np.int8),
            "tokens": np.ones(len(happened), np.int64)
            if counted is None
            else column(requests, counted)[happened],
            "by": np.full(len(happened), -1),
        }
    )
