"""The result of a simulated run: its records, or what they add up to, and the figures computed from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hwmodels.iterations.iteration import IterationModel
from sim.metrics.definitions import Window
from sim.metrics.replica_table import ReplicaTable
from sim.metrics.slo import Slo
from sim.records.run import RunRecords
from sim.records.table import AnyTable, Table, to_pandas

if TYPE_CHECKING:
    from sim.metrics.plots import Plots
    from sim.metrics.run_sums import RunSums


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The records of a run, the figures computed from them, and the models needed to draw plots."""

    records: RunRecords
    """If the run has streamed its records, their tables have no rows."""
    requests: AnyTable
    """The request records with TTFT, TPOT, E2E, queue time and whether the SLO was met; likewise."""
    summary: dict[str, Any]
    models: tuple[IterationModel, ...]
    """Hardware models, one per pool."""
    slo: Slo | None
    sums: RunSums | None = None
    """What a run that streams has added up; None: the tables of its records have all rows."""
    error: OSError | None = None
    """Why tables that a run streams could not be written: the figures are those of the run up to then."""

    def in_pandas(self) -> RunResult:
        """Returns the result with frames of pandas for tables: see `RunRecords.in_pandas`."""
        return replace(self, records=self.records.in_pandas(), requests=to_pandas(self.requests))

    @property
    def window(self) -> Window:
        """The measured part of the run."""
        return Window(self.summary["trimmed"]["start_s"], self.summary["trimmed"]["end_s"])

    def plots(self) -> Plots:
        """Computes what the plots show, which a run that streams has added up (`FigureSetting.plots`)."""
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
