"""Sums of a run whose records come in chunks: its figures, its series and its table of replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from sim.metrics.figure import FigureSetting
from sim.metrics.load_series import LoadSeries
from sim.metrics.measured import request_metrics
from sim.metrics.replica_table import ReplicaTable
from sim.metrics.summary import RunFigures
from sim.metrics.workload import OwnLatencies, no_sessions
from sim.records.chunk import GROUP_ROWS, RecordChunk


class RunSums:
    """The accumulators of a run that streams, or of a shard of it; those of shards are merged.

    setting: of the figures. sessions_after, group_rows: see `OwnLatencies`.
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
        """Leaves out what computes latencies: the copy can be merged only."""
        return {name: value for name, value in vars(self).items() if name != "_own"}
