"""The result of a simulated run: its records, or their accumulated sums, and the metrics computed from them.

A run whose records come in chunks accumulates its metrics, its series and its table of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel
from sim.metrics.definitions import Window, times
from sim.metrics.figure import FigureSetting
from sim.metrics.fleet import down_s_by_replica
from sim.metrics.measured import request_metrics
from sim.metrics.series import LoadSeries
from sim.metrics.slo import Slo
from sim.metrics.summary import RunFigures
from sim.metrics.workload import OwnLatencies, no_sessions
from sim.records.requests import Status
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords
from sim.records.table import AnyTable, Table, column, to_pandas

if TYPE_CHECKING:
    from sim.metrics.plots import Plots


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The records of a run, the metrics computed from them, and the models needed to draw plots."""

    records: RunRecords
    """If the run has streamed its records, their tables have no rows."""
    requests: AnyTable
    """The request records with TTFT, TPOT, E2E, queue time and whether the SLO was met; without rows in a
    streaming run.
    """
    summary: dict[str, Any]
    models: tuple[IterationModel, ...]
    """Hardware models, one per pool."""
    slo: Slo | None
    sums: RunSums | None = None
    """The accumulated data of a streaming run; None: the tables of its records have all rows."""
    error: OSError | None = None
    """The reason why streamed tables could not be written; the metrics then cover the run up to that time."""

    def in_pandas(self) -> RunResult:
        """Returns the result with pandas frames for tables: see `RunRecords.in_pandas`."""
        return replace(self, records=self.records.in_pandas(), requests=to_pandas(self.requests))

    @property
    def window(self) -> Window:
        """The measured part of the run."""
        return Window(self.summary["trimmed"]["start_s"], self.summary["trimmed"]["end_s"])

    def plots(self) -> Plots:
        """Computes the plot data, which a streaming run has accumulated (`FigureSetting.plots`)."""
        if self.sums is not None:
            return self.sums.figures.plots(self.records)
        from sim.metrics.plots import plots_of  # noqa: PLC0415 (runs of a study draw nothing)

        return plots_of(self.records, self.requests, self.window, self.models, self.slo)

    @property
    def replicas(self) -> Table:
        """One row per replica: see `ReplicaTable`."""
        if self.sums is not None:
            return self.sums.replicas.table(self.records)
        found = ReplicaTable()
        found.add(self.requests, self.records.iterations)
        return found.table(self.records)


class RunSums:
    """The accumulators of a streaming run, or of a shard of it; those of shards are merged.

    setting: of the metrics. sessions_after, group_rows: see `OwnLatencies`.
    """

    def __init__(
        self,
        setting: FigureSetting,
        sessions_after: Callable[[int], Collection[int]] = no_sessions,
        group_rows: int = GROUP_ROWS,
    ) -> None:
        self.figures, self.series, self.replicas = RunFigures(setting), LoadSeries(), ReplicaTable()
        self._own = OwnLatencies(setting.new_latencies(), setting.own_terms, sessions_after, group_rows)

    def add(self, chunk: RecordChunk) -> RecordChunk:
        """Adds a chunk; returns it with the requests whose latencies are known, and their `request_metrics`.

        Raises AssertionError if the records are inconsistent.
        """
        chunk = self._own.completed(chunk)
        requests = request_metrics(chunk.requests, self.figures.setting.slo, chunk.own_s)
        self.figures.add(chunk, requests)
        self.series.add(requests, chunk.iterations)
        self.replicas.add(requests, chunk.iterations)
        return replace(chunk, requests=requests)

    def merge(self, other: RunSums) -> None:
        """Adds the records of other, which is not changed and was made with the same setting."""
        self.figures.merge(other.figures)
        self.series.merge(other.series)
        self.replicas.merge(other.replicas)

    def __getstate__(self) -> dict[str, Any]:
        """Drops the objects that compute latencies: the copy can only be merged."""
        return {name: value for name, value in vars(self).items() if name != "_own"}


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
        counts = np.bincount(replica, values)  # integers, as exact as sums of 64-bit integers
        self._counts[name] = _sum(self._counts[name], counts.astype(np.int64))

    def table(self, records: RunRecords) -> Table:
        """Returns one row per replica. records: the run's records, of which only the replicas are read."""
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
    """Returns the sum of two arrays by replica; the shorter one lacks the last replicas."""
    total = np.zeros(max(len(a), len(b)), a.dtype)
    total[: len(a)] += a
    total[: len(b)] += b
    return total
