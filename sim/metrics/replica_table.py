"""The table of the replicas of a run, counted from its tables or from parts of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.fleet import down_s_by_replica
from sim.records.requests import Status
from sim.records.run import RunRecords

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

    def add(self, requests: pd.DataFrame, iterations: pd.DataFrame) -> None:
        """Counts rows of requests and of iterations, in the order of the iterations of each replica."""
        replica, prefill_replica = (requests[name].to_numpy() for name in ("replica", "prefill_replica"))
        served, transferred = replica >= 0, prefill_replica >= 0
        self._count("requests", replica[served])
        self._count("requests", prefill_replica[transferred])
        status = requests["status"].to_numpy()
        for each in Status:
            self._count(each.name, replica[served & (status == each.name)])
        by = np.where(transferred, prefill_replica, replica)
        self._count("prompt_tokens", by[by >= 0], requests["prompt_tokens"].to_numpy()[by >= 0])
        for name in ("output_tokens", "preemptions"):
            self._count(name, replica[served], requests[name].to_numpy()[served])
        of_iterations = iterations["replica"].to_numpy()
        self._count("iterations", of_iterations)
        busy_s = iterations.groupby("replica")["duration_s"].sum()
        own_s = np.zeros(int(of_iterations.max(initial=-1)) + 1)
        own_s[busy_s.index.to_numpy()] = busy_s.to_numpy()
        self._busy_s = _sum(self._busy_s, own_s)

    def merge(self, other: ReplicaTable) -> None:
        """Adds the rows of other, which is not changed."""
        for name, counts in other._counts.items():
            self._counts[name] = _sum(self._counts[name], counts)
        self._busy_s = _sum(self._busy_s, other._busy_s)

    def _count(self, name: str, replica: NDArray[np.int64], values: NDArray[np.int64] | None = None) -> None:
        """Adds 1, or the values, to a count of each replica."""
        counts = np.bincount(replica, values)  # whole numbers, as exact as the sums of 64-bit integers
        self._counts[name] = _sum(self._counts[name], counts.astype(np.int64))

    def table(self, records: RunRecords) -> pd.DataFrame:
        """Returns one row per replica. records: those of the run, of which only the replicas are read."""
        num_replicas = records.num_replicas
        table = pd.DataFrame(index=pd.RangeIndex(num_replicas, name="replica"))
        table["pool"] = [records.pools[replica.pool].name for replica in records.replicas]
        for name, counts in self._counts.items():
            table[name] = _sum(np.zeros(num_replicas, np.int64), counts)
        table["busy_s"] = _sum(np.zeros(num_replicas), self._busy_s)
        table["start_s"] = [replica.start_s for replica in records.replicas]
        table["end_s"] = [replica.end_s for replica in records.replicas]
        table["crashes"] = [len(replica.down) for replica in records.replicas]
        table["down_s"] = down_s_by_replica(records)
        table["busy_share"] = table["busy_s"] / (table["end_s"] - table["start_s"])
        return table.fillna(0.0).reset_index()


def _sum(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Returns the sum of two arrays by replica, the shorter of which lacks the last replicas."""
    total = np.zeros(max(len(a), len(b)), a.dtype)
    total[: len(a)] += a
    total[: len(b)] += b
    return total
