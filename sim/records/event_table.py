"""The table of all events of requests: the logged events, arrivals, first tokens and ends."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sim.records.event_rows import TIERS, WAIT_COLUMNS, Event
from sim.records.run import RunRecords


def events_table(records: RunRecords) -> pd.DataFrame:
    """Returns one row per event, by time: the logged events, and arrival, first token and end of requests.

    Columns: time_s, request_id (-1: no sequence), replica, event (a name of `Event`), tier, and the counts
    and waits that `Event` and `WAIT_COLUMNS` define; a wait is in the row of the event that ends it.
    """
    requests = records.requests
    logged = records.events
    more = []
    for event, column, counted in (
        (Event.arrive, "arrival_s", "prompt_tokens"),
        (Event.first_token, "first_token_s", None),
        (Event.end, "finished_s", "output_tokens"),
    ):
        happened = requests[requests[column].notna()]
        part = happened[["request_id", "replica"]].assign(time_s=happened[column], event=int(event))
        more.append(part.assign(tokens=1 if counted is None else happened[counted]))
    table = pd.concat([more[0], more[1], logged, more[2]], ignore_index=True)  # the order at equal times
    table = table.sort_values(["time_s", "request_id"], kind="stable", ignore_index=True)
    counts = ["tokens", "of_tokens", "recomputed_tokens"]
    for name in counts:
        table[name] = table[name].fillna(0).astype(np.int64)
    table["by"] = table["by"].fillna(-1).astype(np.int64)
    for name in WAIT_COLUMNS:
        table[name] = table[name].fillna(0.0)
    names = np.array([event.name for event in Event], dtype=object)
    table["event"] = names[table["event"].to_numpy(dtype=np.int64)]
    table["tier"] = np.array(TIERS, dtype=object)[table["tier"].fillna(0).to_numpy(dtype=np.int64)]
    return table[["time_s", "request_id", "replica", "event", "tier", *counts, "by", *WAIT_COLUMNS]]
