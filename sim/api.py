"""A complete run of a plain config in one call, and its result; `experiments.app.api` composes the config."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.cluster.attached import UserProcess
from sim.metrics.dialects import DIALECTS, in_dialects
from sim.metrics.plots import Plots
from sim.metrics.result import RunResult
from sim.metrics.token_times import known_token_times
from sim.records.run import RunRecords, events_table
from sim.records.table import to_pandas
from sim.report import lines, wording
from sim.report.page import headline_html
from sim.report.plots import (
    iteration_times,
    latency_cdfs,
    replicas_over_time,
    slo_attainment,
    time_by_kind,
    timeline,
    ttft_by_prompt_length,
)
from sim.report.run_files import write_result
from sim.report.wording import dialect_frame
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run_or_part

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

TIMELINE_REQUESTS = 10_000
"""Number of requests in timeline.json; the default of `output.timeline_requests`."""
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run."""

    nodes: Mapping[str, Any]
    """The complete config as plain data, with interpolations resolved."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Root key -> the object that replaces its node."""
    command: str | None = None
    """The same run on the command line; None if there is none, as with objects."""

    @property
    def recorded(self) -> dict[str, Any]:
        """Returns the config as in `Result.config`, with each object replaced by the name of its class."""
        names = {
            key: f"{type(value).__module__}.{type(value).__qualname__}" for key, value in self.objects.items()
        }
        return {**self.nodes, **{key: {"name": name} for key, name in names.items()}}


def simulate_config(config: RunConfig, attach: Sequence[UserProcess] = ()) -> Result:
    """Simulates one config. Raises ConfigError.

    attach: processes of the user's, see `sim.cluster.attached`.
    """
    run = run_or_part(*build_run(config.nodes, config.objects), attach=attach)
    return Result(run=run, config=config.recorded, command=None if attach else config.command)


def stream_config(config: RunConfig, folder: Path, *, iterations: bool) -> Result:
    """Simulates one config with its tables in a folder.

    Raises ConfigError, and OSError if tables could not be written.
    """
    from sim.setup.streaming import check_streamed, stream_to  # noqa: PLC0415 (most runs do not stream)

    scenario, traffic = build_run(config.nodes, config.objects)
    try:
        check_streamed(scenario)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    run = stream_to(folder, scenario, traffic, config.recorded, iterations=iterations)
    if run.error is not None:
        raise run.error
    write_result(folder, run, config.recorded, tables=False, report=False)
    return Result(run=run, config=config.recorded, command=config.command, folder=folder)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run as tables and plots; a notebook shows its headline figures."""

    run: RunResult
    """The records of the run, for data that this class does not provide."""
    config: dict[str, Any]
    """The resolved configuration; an object is represented by the name of its class."""
    command: str | None
    """The same run on the command line; None where objects or processes were given."""
    folder: Path | None = None
    """The folder with the tables of a streamed run."""

    @property
    def summary(self) -> dict[str, Any]:
        """All metrics, as in summary.json; seconds, shares, USD."""
        return self.run.summary

    @property
    def requests(self) -> pd.DataFrame:
        """One row per request: its times, TTFT, TPOT, E2E and whether it met the SLO."""
        return to_pandas(self.run.requests) if self.folder is None else self._read("requests")

    @property
    def iterations(self) -> pd.DataFrame:
        """One row per iteration of a replica: its start, its duration and the contents of its batch."""
        return to_pandas(self.run.records.iterations) if self.folder is None else self._read("iterations")

    @property
    def replicas(self) -> pd.DataFrame:
        """One row per replica."""
        return self.run.replicas.to_pandas()

    @property
    def events(self) -> pd.DataFrame:
        """One row per event: see `sim.records.run.events_table`."""
        return events_table(self.run.records).to_pandas() if self.folder is None else self._read("events")

    @property
    def series(self) -> pd.DataFrame:
        """One row per time interval of a streamed run: see `sim.metrics.series`."""
        return self._read("series")

    @property
    def latencies(self) -> pd.DataFrame:
        """One row per latency (TTFT, TPOT, ITL, E2E, queue), one column per statistic (`p50_s`)."""
        import pandas as pd  # noqa: PLC0415 (a run that shows no frame need not load it)

        rows = {name.upper() if name != "queue" else name: self.summary[name] for name in LATENCIES}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def dialects(self) -> pd.DataFrame:
        """The run by the definitions of other tools: one row per metric and tool; `name` is the tool's term.

        Latencies have the columns mean_s, p50_s, p90_s and p99_s, other metrics the column value; NaN where
        the tool does not report the metric. `result.dialects["value"].unstack()` shows the tools side by
        side. Gaps between tokens are missing if requests have several samples.
        """
        records = self._whole("dialects")
        times = known_token_times(records.requests, records.iterations, records.own_gaps, records.bursts)
        dialects = in_dialects(DIALECTS, records.requests, times, self.run.window, self.run.slo)
        return dialect_frame({**self.summary, "dialects": dialects})

    def plot_latencies(self) -> go.Figure:
        """Plots the CDFs of TTFT, TPOT, ITL and E2E with the limits of the SLO."""
        return latency_cdfs(self._plots, self.run.slo).figure()

    def plot_ttft(self) -> go.Figure:
        """Plots TTFT against the length of the prompt."""
        return ttft_by_prompt_length(self._plots, self.run.slo).figure()

    def plot_slo(self) -> go.Figure:
        """Plots the share of requests within the SLO: overall, by arrival time and by prompt length.

        Raises ValueError without an SLO or without measured requests.
        """
        if self.run.slo is None:
            raise ValueError("slo=none: SLO attainment needs an SLO; choose one, for example slo='chat'")
        if not self._plots.figures.octaves:
            raise ValueError("no request arrived in the measured time: there is nothing to draw")
        return slo_attainment(self._plots, self.summary["goodput"], self.run.window, self.run.slo).figure()

    def plot_timeline(self) -> go.Figure:
        """Plots requests, KV blocks, batches and token rates over time.

        Raises ValueError for a run with a duration of 0 s.
        """
        chart = timeline(self._plots, self.run.records, self.run.window)
        if chart is None:
            raise ValueError("the run has a duration of 0 s: there is nothing to draw")
        return chart.figure()

    def plot_time_by_kind(self) -> go.Figure:
        """Plots the time of the replicas by kind of iteration and by component of the hardware model."""
        return time_by_kind(self._plots, self.run.records, self.run.window).figure()

    def plot_iterations(self) -> go.Figure:
        """Plots the duration of iterations against the number of tokens in their batch."""
        return iteration_times(self._plots).figure()

    def plot_replicas(self) -> go.Figure:
        """Plots the number of serving, starting and failed replicas over time.

        Raises ValueError if all replicas served all the time.
        """
        chart = replicas_over_time(self.run.records)
        if chart is None:
            raise ValueError("all replicas served all the time: there is nothing to draw")
        return chart.figure()

    def write(self, folder: str | Path, *, vllm_bench: bool = False, timeline: bool = False) -> None:
        """Writes what `windtunnel simulate` writes: summary.json, config.yaml, the tables and report.html.

        vllm_bench: also write vllm_bench.json, in the layout of `vllm bench serve`; raises ValueError if
        requests have several samples. timeline: also write timeline.json with the first 10,000 requests.
        """
        self._whole("write")
        notes = write_result(
            Path(folder),
            self.run,
            self.config,
            tables=True,
            report=True,
            timeline=timeline,
            timeline_requests=TIMELINE_REQUESTS,
            vllm_bench=vllm_bench,
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Result: {wording.verdict(self.summary)}>"

    def __str__(self) -> str:
        return "\n".join([wording.verdict(self.summary), *lines.caveats(self.summary)])

    def _repr_html_(self) -> str:
        """Returns the headline metrics as HTML, for a notebook."""
        caveats = "".join(f"<p>{html.escape(text)}</p>" for text in lines.caveats(self.summary))
        verdict = html.escape(wording.verdict(self.summary))
        return f"<p><b>{verdict}</b></p>{caveats}{headline_html(self.summary)}"

    def _whole(self, name: str) -> RunRecords:
        """Returns the records with all rows. Raises ValueError if the rows were streamed to the folder."""
        if self.folder is not None:
            raise ValueError(
                f"result.{name}: needs whole tables, and this run has streamed its tables to {self.folder}; "
                "leave out stream_to"
            )
        return self.run.records

    def _read(self, name: str) -> pd.DataFrame:
        """Returns a table of a streamed run. Raises ValueError if there is none."""
        if self.folder is None:
            raise ValueError(f"result.{name}: only a run with stream_to has it")
        path = self.folder / f"{name}.parquet"
        if not path.exists():
            advice = "set iterations=True" if name == "iterations" else "leave out stream_to"
            raise ValueError(f"result.{name}: the run has streamed its tables without it; {advice}")
        import pandas as pd  # noqa: PLC0415 (see above)

        return pd.read_parquet(path)

    @cached_property
    def _plots(self) -> Plots:
        return self.run.plots()
