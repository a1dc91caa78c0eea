"""Runs a scenario whose records are written and summed up while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from sim.cluster.streamed import EARLY_STOPS, StreamedSimulation
from sim.metrics.client_view import APART
from sim.metrics.figure import FigureSetting, own_figures
from sim.metrics.mixed import MixLatencies
from sim.metrics.own_latencies import OwnLatencies
from sim.metrics.sketched import SKETCHED
from sim.metrics.summary import RunFigures
from sim.metrics.utilisation import PoolHardware
from sim.records.chunk import GROUP_ROWS, RecordChunk
from sim.records.run import PoolRecord, RunRecords
from sim.setup.scenario import Scenario
from sim.workload.base import Source
from sim.workload.chunks import chunks_of
from sim.workload.sessions import OpenSessions
from sim.workload.thinned import ThinnedWorkload


class Tables(Protocol):
    """Tables that are written while a run goes on."""

    def add(self, chunk: RecordChunk) -> None:
        """Writes a chunk; the last one has `end`. Raises OSError."""


def check_streamed(scenario: Scenario) -> None:
    """Raises ValueError for a scenario that needs the tables of the whole run."""
    for name in ("stop_overloaded", "stop_missed"):
        if getattr(scenario.sim, name):
            raise ValueError(f"sim.{name}=true: {EARLY_STOPS}")
    setting = figure_setting(scenario, [], ())
    if setting.own_terms and scenario.sim.shards is not None:
        _check_latencies_in_shards(scenario, setting)


def _check_latencies_in_shards(scenario: Scenario, setting: FigureSetting) -> None:
    """Raises ValueError for latencies that a shard cannot compute from the records of its own requests."""
    latencies = setting.new_latencies()
    if not any(one.numbers_matter for one in latencies):
        return
    is_mix = any(isinstance(one, MixLatencies) for one in latencies)
    if is_mix or _has_sessions(scenario.source()):
        assert scenario.slo is not None
        raise ValueError(f"slo.publish_ms={scenario.slo.publish_ms:g}: {APART}")


def _has_sessions(source: Source) -> bool:
    """Returns whether a request belongs to a session. Reads the traffic."""
    return any(
        chunk.session_id is not None and bool((chunk.session_id >= 0).any()) for chunk in chunks_of(source)
    )


def figure_setting(
    scenario: Scenario,
    hardware: Sequence[PoolHardware],
    pool_records: Sequence[PoolRecord],
    *,
    plots: bool = True,
) -> FigureSetting:
    """Returns the setting of the accumulators of a scenario's figures.

    hardware: see `Scenario.pool_hardware`. pool_records: those of the run. plots: see `FigureSetting`. Raises
    ValueError: see `FigureSetting`.
    """
    in_shards = scenario.sim.shards is not None
    return FigureSetting(
        pools=hardware,
        pool_records=pool_records,
        slo=scenario.slo,
        energy=scenario.energy,
        tariff=scenario.tariff,
        metrics=scenario.metrics,
        new_sections=scenario.new_sections(in_shards=in_shards),
        new_latencies=partial(scenario.new_latencies, in_shards=in_shards),
        thinned=scenario.workload if isinstance(scenario.workload, ThinnedWorkload) else None,
        num_replicas=scenario.num_replicas,
        plots=plots,
        kept=SKETCHED,
        own=own_figures(scenario.metrics.own),
    )


class StreamedRun:
    """One run of a scenario, whose records go to `tables` and to the accumulators of its summary.

    plots: whether the accumulators have what the plots show. figures: the accumulators of its figures.
    error: why the tables could not be written, such as a full disk; the run ends there, and its summary is
    that of the run up to then. None: they are complete. Raises ValueError: see `check_streamed`.
    """

    def __init__(
        self,
        scenario: Scenario,
        source: Source,
        tables: Tables,
        *,
        plots: bool = True,
        group_rows: int = GROUP_ROWS,
    ) -> None:
        if scenario.sim.shards is not None:
            raise ValueError(
                f"sim.shards={scenario.sim.shards}: a run in one process has no shards; set sim.shards=null, "
                "or run windtunnel simulate"
            )
        self.error: OSError | None = None
        self._scenario, self._source, self._tables = scenario, source, tables
        traffic = OpenSessions(source)
        self._hardware = scenario.pool_hardware()
        self._simulation = simulation = StreamedSimulation(
            source=traffic if scenario.own_terms else source,
            pools=scenario.replica_pools(),
            cluster=scenario.for_a_run(),
            sim=scenario.sim,
            take=self._take,
            group_rows=group_rows,
        )
        pools = simulation.fleet.records(0.0)[0]
        setting = figure_setting(scenario, self._hardware, pools, plots=plots)
        self.figures = RunFigures(setting)
        self._own = OwnLatencies(setting.new_latencies(), setting.own_terms, traffic.after, group_rows)

    end: RunRecords
    """The records of the run with tables without rows, once it has ended."""

    def run(self, report: Callable[[float, int], None] | None = None) -> dict[str, Any]:
        """Runs to the end; returns the summary. report: see `Simulation.run`."""
        self.end = end = self._simulation.run(report)
        summary = self.figures.summary(end)
        summary["memory"] = asdict(next(iter(self._scenario.pools_by_name.values())).plan_memory())
        self._scenario.describe(summary, self._source.notes, self._hardware)
        return summary

    def _take(self, chunk: RecordChunk) -> None:
        chunk = self._own.completed(chunk)
        self.figures.add(chunk)
        if self.error is not None:
            return
        try:
            self._tables.add(chunk)
        except OSError as error:
            self.error = error
            self._simulation.stop()
