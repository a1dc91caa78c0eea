"""The table of the replicas of a run, counted from its tables or from parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import times
from sim.metrics.fleet import down_s_by_replica
from sim.records.requests import Status
from sim.records.run import RunRecords
from sim.records.table import AnyTable, Table, column

_COUNTS = (
    "requests",
    *(status.name for status in Status),
    *("prompt_tokens", "output_tokens", "preemptions", "iterations"),
)


class ReplicaTable:
    """Counts the requests, tokens, iterations and busy time of each replica.

    A request that was transferred from a prefill to a decode replica counts in `requests` for both; its
    prompt counts for the prefill replica, its status and output for the decode replica.
    """

    def __init__(self) -> None:
        self._counts = {name: np.zeros(0, np.int64) for name in _COUNTS}
        self._busy_s = np.zeros(0)

    def add(self, requests: AnyTable, iterations: AnyTable) -> None:
        """Counts rows of requests and of iterations, in the order of the iterations of each replica."""
        replica, prefill_replica = (column(requests, name) for name in ("replica", "prefill_replica"))
        served, transferred = replica >= 0, prefill_replica >= 0
        self._count("requests", replica[served])
        self._count("requests", prefill_replica[transferred])
        status = column(requests, "status")
        for each in Status:
            self._count(each.name, replica[served & (status == each.name)])
        by = np.where(transferred, prefill_replica, replica)
        self._count("prompt_tokens", by[by >= 0], column(requests, "prompt_tokens")[by >= 0])
        for name in ("output_tokens", "preemptions"):
            self._count(name, replica[served], column(requests, name)[served])
        of_iterations = column(iterations, "replica")
        self._count("iterations", of_iterations)
        self._busy_s = _sum(self._busy_s, _sums_by(of_iterations, times(iterations, "duration_s")))

    def merge(self, other: ReplicaTable) -> None:
        """Adds the rows of other, which is not changed."""
        for name, counts in other._counts.items():
            self._counts[name] = _sum(self._counts[name], counts)
        self._busy_s = _sum(self._busy_s, other._busy_s)

    def _count(self, name: str, replica: NDArray[np.int64], values: NDArray[np.int64] | None = None) -> None:
        """Adds 1, or the values, to a count of each replica."""
        counts = np.bincount(replica, values)  # whole numbers, as exact as the sums of 64-bit integers
        self._counts[name] = _sum(self._counts[name], counts.astype(np.int64))

    def table(self, records: RunRecords) -> Table:
        """Returns one row per replica. records: those of the run, of which only the replicas are read."""
        num_replicas = records.num_replicas
        start_s, end_s = (
            np.array([getattr(replica, name) for replica in records.replicas], np.float64)
            for name in ("start_s", "end_s")
        )
        busy_s = _sum(np.zeros(num_replicas), self._busy_s)
        paid_s = end_s - start_s
        with np.errstate(divide="ignore"):
            busy_share = np.divide(
                busy_s, paid_s, out=np.zeros(num_replicas), where=(busy_s > 0) | (paid_s > 0)
            )
        return Table(
            {
                "replica": np.arange(num_replicas),
                "pool": np.array([records.pools[one.pool].name for one in records.replicas], dtype=object),
                **{
                    name: _sum(np.zeros(num_replicas, np.int64), counts)
                    for name, counts in self._counts.items()
                },
                "busy_s": busy_s,
                "start_s": start_s,
                "end_s": end_s,
                "crashes": np.array([len(one.down) for one in records.replicas], np.int64),
                "down_s": np.array(down_s_by_replica(records)),
                "busy_share": busy_share,
            }
        )


def _sums_by(replica: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sum of the values of each replica, added in their order."""
    sums = np.zeros(int(replica.max(initial=-1)) + 1)
    order = np.argsort(replica, kind="stable")
    found, starts = np.unique(replica[order], return_index=True)
    if len(starts):
        sums[found] = np.add.reduceat(values[order], starts)
    return sums


def _sum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Returns the sum of two arrays by replica, the shorter of which lacks the last replicas."""
    total = np.zeros(max(len(a), len(b)), a.dtype)
    total[: len(a)] += a
    total[: len(b)] += b
    return total
