"""A run of a plain config that is too long to keep: its tables are in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sim.api import RunConfig, latency_table
from sim.records.timed_rows import interval_s
from sim.report import evidence, wording
from sim.report.config_text import config_yaml
from sim.report.exact_percentiles import add_exact_percentiles
from sim.report.files import summary_json
from sim.report.streamed_tables import PLOTS, REPLICAS, REQUESTS, SERIES, StreamedTables, check_free_space
from sim.report.whole_file import write_whole
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, errors_of_user
from sim.setup.streamed_run import StreamedRun, check_streamed
from sim.shards.accumulators import accumulator_bytes


def simulate_streamed_config(folder: Path, config: RunConfig, *, iterations: bool) -> StreamedResult:
    """Simulates one config, and writes its tables while the run goes on.

    iterations: also write the iterations and gaps. Raises ConfigError for mistakes in the settings and for a
    disk without room, before the simulation starts, and OSError if the tables could not be written.
    """
    scenario, traffic = build_run(config.nodes, config.objects)
    try:
        check_streamed(scenario)
        check_free_space(folder, traffic.num_requests or 0, iterations=iterations)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", config_yaml(config.recorded))
    width_s = interval_s(scenario.num_replicas) if iterations else None
    tables = StreamedTables(folder, scenario.slo, width_s=width_s)
    with errors_of_user(scenario):
        run = StreamedRun(scenario, traffic, tables)
        summary = run.run()
    if run.error is not None:
        raise run.error
    if scenario.metrics.percentiles == "exact":
        add_exact_percentiles(summary, folder / REQUESTS)
    write_whole(folder / PLOTS, accumulator_bytes(run.figures.plots(run.end)))
    write_whole(folder / "summary.json", summary_json(summary))
    return StreamedResult(folder=folder, summary=summary, config=config.recorded, command=config.command)


@dataclass(frozen=True, kw_only=True)
class StreamedResult:
    """The result of a run whose tables are in a folder and not in memory.

    Its rows of requests are read with `pandas.read_parquet(result.folder / "requests.parquet")`, perhaps with
    some `columns` or `filters`. Other attributes of `sim.api.Result` raise AttributeError, which says so.
    """

    folder: Path
    summary: dict[str, Any]
    """All figures, as in summary.json; seconds, shares, USD."""
    config: dict[str, Any]
    """The resolved configuration; an object is represented by the name of its class."""
    command: str | None
    """The same run on the command line, with whole tables; None where objects were given."""

    @property
    def replicas(self) -> pd.DataFrame:
        """One row per replica."""
        return pd.read_parquet(self.folder / REPLICAS)

    @property
    def series(self) -> pd.DataFrame:
        """One row per interval of simulated time: see `sim.metrics.load_series`."""
        return pd.read_parquet(self.folder / SERIES)

    @property
    def latencies(self) -> pd.DataFrame:
        """One row per latency (TTFT, TPOT, ITL, E2E, queue), one column per statistic (`p50_s`)."""
        return latency_table(self.summary)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"result.{name}: a run of simulate_streamed keeps no tables in memory; its requests are in "
            f"{self.folder / REQUESTS}, and simulate() gives all tables and plots"
        )

    def __repr__(self) -> str:
        return f"<StreamedResult: {wording.verdict(self.summary)}>"

    def __str__(self) -> str:
        return "\n".join([wording.verdict(self.summary), *evidence.caveats(self.summary)])
