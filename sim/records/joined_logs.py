"""The tables of the logs of many replicas, made at once: a thousand small logs cost a thousand times less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.records.event_rows import EventRows, logged_events
from sim.records.gaps import Gaps
from sim.records.iteration_tables import expanded
from sim.records.iterations import IterationLog
from sim.records.table import Table


def joined_iterations(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """Returns what `expanded` does, the gaps in another order. The logs are dropped."""
    kinds = {(log.block_size, log.serves_adapters, log.drafts is None) for log in logs}
    if len(kinds) != 1 or logs[0].drafts is not None:  # the passes of each refer to its own iterations
        return expanded(logs)
    joined = IterationLog(0, logs[0].block_size, logs[0].serves_adapters)
    sizes = np.array([log.num_iterations for log in logs])
    for log in logs:
        joined.extend(log)
    columns, gaps = expanded([joined])
    begin = np.cumsum(sizes) - sizes
    columns["replica"][:] = np.repeat([log.replica for log in logs], sizes)
    columns["iteration"] += np.repeat([log.first_iteration for log in logs] - begin, sizes).astype(np.int32)
    logs.clear()
    return columns, gaps


def joined_events(logs: Sequence[EventRows]) -> Table:
    """Returns what `logged_events` does. The rows of the logs are dropped."""
    joined, sizes = EventRows(), [len(log) for log in logs]
    for log in logs:
        joined.extend(log)
    return logged_events([joined]).assign(replica=np.repeat(np.arange(len(logs), dtype=np.int32), sizes))
