"""The tables of the iterations and gaps of a run, from the logs of its replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.records.gaps import Gaps
from sim.records.iterations import IterationLog
from sim.records.table import Table


def own_gaps_table(logs: list[IterationLog]) -> Table:
    """Returns the table of the gaps logged by add_gap, of all replicas: see `RunRecords.own_gaps`."""
    gaps = [log.own_gaps() for log in logs]
    request_id, since_s, end_s = np.concatenate(gaps or [np.empty((0, 3))]).T
    replica = np.repeat([log.replica for log in logs], [len(own) for own in gaps])
    return Table(
        {
            "request_id": request_id.astype(np.int64),
            "replica": replica.astype(np.int32),
            "since_s": since_s,
            "end_s": end_s,
        }
    )


def expanded(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """Returns columns with one value per iteration, and all gaps between tokens, replica after replica.

    A value that an engine does not have, such as adapters, is 0. The logs are removed from the list.
    """
    num_rows, max_gaps = sum(log.num_iterations for log in logs), sum(log.max_gaps for log in logs)
    dtypes = IterationLog.dtypes()
    for log in logs:
        dtypes |= log.more_dtypes()
    columns: dict[str, NDArray[Any]] = {name: np.zeros(num_rows, dtype) for name, dtype in dtypes.items()}
    gaps = Gaps(np.empty(max_gaps), np.empty(max_gaps, np.int64), np.empty(max_gaps))
    row = num_gaps = 0
    logs.reverse()
    while logs:
        log = logs.pop()
        end = row + log.num_iterations
        own = {name: column[row:end] for name, column in columns.items()}
        num_gaps += log.expand(own, gaps.part(num_gaps, max_gaps))
        row = end
    return columns, gaps.part(0, num_gaps)


def joined_iterations(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """Returns what `expanded` does, the gaps in another order. The logs are dropped.

    All logs are expanded at once: a thousand small ones cost a thousand times less.
    """
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
