"""Runs a scenario whose records are written and accumulated during the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sim.cluster.chunked import ChunkedRecording
from sim.cluster.simulation import Simulation
from sim.metrics.client_view import APART
from sim.metrics.figure import FigureSetting
from sim.metrics.mixed import MixLatencies
from sim.metrics.result import RunResult, RunSums
from sim.metrics.sketches import SKETCHED
from sim.records.run import GROUP_ROWS, RecordChunk, RunRecords
from sim.records.timed_rows import interval_s
from sim.report.chunk_tables import REQUESTS, ChunkTables, add_exact_percentiles, check_free_space
from sim.report.files import config_yaml, write_whole
from sim.settings.errors import ConfigError
from sim.settings.scenario import errors_of_user
from sim.setup.scenario import Scenario
from sim.workload.base import Source
from sim.workload.chunks import chunks_of
from sim.workload.sessions import OpenSessions


class Tables(Protocol):
    """Tables that are written during a run."""

    def add(self, chunk: RecordChunk) -> None:
        """Writes a chunk, whose requests have `request_metrics`. Raises OSError."""

    def finish(self, end: RunRecords, sums: RunSums) -> None:
        """Writes the tables of the whole run, after its last chunk. Raises OSError."""


def check_streamed(scenario: Scenario) -> None:
    """Raises ValueError for a scenario that needs the tables of the whole run."""
    for name in ("stop_overloaded", "stop_missed"):
        if getattr(scenario.sim, name):
            raise ValueError(
                f"sim.{name}=true: needs the rows of all requests, which a run with streamed tables does not "
                "keep"
            )
    setting = scenario.figure_setting([], (), SKETCHED)
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


def stream(
    scenario: Scenario,
    source: Source,
    tables: Tables,
    report: Callable[[float, int], None] | None = None,
    *,
    plots: bool = True,
    group_rows: int = GROUP_ROWS,
) -> RunResult:
    """Runs a scenario; its records go to `tables` and to the accumulators of its metrics.

    report: see `Simulation.run`. plots: whether plot data is accumulated. If a table cannot be written, the
    run stops; the result covers the run up to then, with the error. Raises ValueError for scenarios that
    `check_streamed` rejects, and for a run in shards.
    """
    if scenario.sim.shards is not None:
        raise ValueError(
            f"sim.shards={scenario.sim.shards}: a run in one process has no shards; set sim.shards=null, "
            "or run windtunnel simulate"
        )
    check_streamed(scenario)
    error: OSError | None = None

    def take(chunk: RecordChunk) -> None:
        nonlocal error
        measured = sums.add(chunk)
        if error is not None:
            return
        try:
            tables.add(measured)
            if chunk.end is not None:
                tables.finish(chunk.end, sums)
        except OSError as failed:
            error = failed
            simulation.stop()

    traffic = OpenSessions(source)
    simulation = Simulation(
        source=traffic if scenario.own_terms else source,
        pools=scenario.replica_pools(),
        cluster=scenario.for_a_run(),
        sim=scenario.sim,
        recording=ChunkedRecording(take, group_rows),
    )
    pools = simulation.fleet.records(0.0)[0]
    setting = scenario.figure_setting(scenario.pool_hardware(), pools, SKETCHED, plots=plots)
    sums = RunSums(setting, traffic.after, group_rows)
    end = simulation.run(report)
    return replace(scenario.result_of_sums(sums, end, source.notes), error=error)


def stream_to(
    folder: Path,
    scenario: Scenario,
    source: Source,
    config: dict[str, Any],
    report: Callable[[float, int], None] | None = None,
    *,
    iterations: bool = False,
    plots: bool = True,
) -> RunResult:
    """Runs a scenario like `stream`, with its tables in a folder.

    config: the resolved config, which is written first. iterations: whether to write tables of iterations and
    gaps. Raises ConfigError before the run if the disk has no room for the tables, or later for errors that
    appear only during the run; and OSError if the first file cannot be written.
    """
    try:
        check_free_space(folder, source.num_requests or 0, iterations=iterations)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", config_yaml(config))
    tables = ChunkTables(folder, width_s=interval_s(scenario.num_replicas) if iterations else None)
    with errors_of_user(scenario):
        result = stream(scenario, source, tables, report, plots=plots)
    if result.error is None and scenario.metrics.percentiles == "exact":
        add_exact_percentiles(result.summary, folder / REQUESTS)
    return result
