"""`windtunnel simulate`: simulates a workload with a set of policies on a cluster, and writes the results.

The settings of its output are nearly those of `windtunnel validate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console

from experiments.app.run_folder import print_folder, print_path, seen_from_here
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
from experiments.app.terminal import print_summary, simulated_time, terminal_console
from fieldlimits import Checked, PositiveInt
from sim.metrics.result import RunResult
from sim.report.run_files import write_result
from sim.settings.build import build, build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run_or_part
from sim.setup.scenario import Scenario
from sim.workload.base import Answers, Source

if TYPE_CHECKING:
    from experiments.simulate.sharded_run import ShardedRun


STREAMED_ABOVE = 1_000_000
"""Number of requests above which a run streams its tables by itself."""
WHOLE_BYTES = 4.4e3
"""Memory of a request in a run that keeps whole tables, bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(Checked):
    """Output besides tables, summary.json, config.yaml and the tables on the terminal."""

    report: bool = True
    progress: bool = True
    timeline: bool = False
    """Write timeline.json."""
    timeline_requests: Annotated[PositiveInt | None, "null for all"] = 10_000
    """Number of requests in timeline.json, the first to arrive; None: all."""
    vllm_bench: bool = False
    """Write vllm_bench.json, in the format of `vllm bench serve --save-detailed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings(Output):
    """Output of a run that is simulated for a comparison."""

    tables: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOutput(Output):
    """Output of `windtunnel simulate`."""

    tables: bool | Literal["auto", "stream", "stream_all"] = "auto"
    """When tables are written; auto: at the end, or while the run goes on if it is long: see `streams`."""

    @property
    def writes_iterations(self) -> bool:
        """True if a run that streams also writes its iterations and gaps."""
        return self.tables == "stream_all"

    def streams(self, scenario: Scenario, num_requests: int | None) -> bool:
        """Returns whether a run writes its tables while it goes on, in memory that does not grow with it.

        Raises ConfigError if it is to, and other settings need whole tables.
        """
        if self.tables in ("stream", "stream_all"):
            if reason := self._needs_whole_tables(scenario):
                raise ConfigError(f"{reason}; or set output.tables=true")
            return True
        return self._is_long(num_requests) and not self._needs_whole_tables(scenario)

    def note(self, scenario: Scenario, num_requests: int | None) -> str | None:
        """Returns that a long run streams its tables by itself, or why it does not; None: it is not long."""
        if not self._is_long(num_requests):
            return None
        if reason := self._needs_whole_tables(scenario):
            return (
                f"All records stay in memory, about {(num_requests or 0) * WHOLE_BYTES / 1e9:,.0f} GB for "
                f"{num_requests:,} requests, because the run cannot stream its tables: {reason}."
            )
        return (
            f"More than {STREAMED_ABOVE:,} requests: their rows are written while the run goes on, without "
            f"iterations and events (output.tables=true writes all, in {WHOLE_BYTES / 1e3:g} kB of memory "
            "per request)."
        )

    def _is_long(self, num_requests: int | None) -> bool:
        return self.tables == "auto" and (num_requests or 0) > STREAMED_ABOVE

    def _needs_whole_tables(self, scenario: Scenario) -> str | None:
        """Returns which setting needs the tables of the whole run; None: there is none."""
        for name in ("vllm_bench", "timeline"):
            if getattr(self, name):
                return (
                    f"output.{name}=true: is made from the tables of the whole run; set output.{name}=false"
                )
        from sim.setup.streaming import check_streamed  # noqa: PLC0415 (most runs are short)

        try:
            check_streamed(scenario)
        except ValueError as error:
            return str(error)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateJob:
    """A scenario, its source of requests (which serves one run), and the output settings."""

    cfg: dict[str, Any]
    scenario: Scenario
    source: Source
    output: SimulateOutput
    streams: bool = False
    """Whether tables are written while the run goes on."""
    sharded: ShardedRun | None = None
    """How the shards of the run are simulated; None: it is not divided."""

    @property
    def continues(self) -> bool:
        """Returns whether the folder may hold shards of the same run, which are used."""
        return self.sharded is not None

    def run(self, folder: Path) -> None:
        """Simulates, writes and prints."""
        output, console, config = self.output, terminal_console(), config_of_run(self.cfg)
        if note := output.note(self.scenario, self.source.num_requests):
            console.print(note, style="yellow", highlight=False)
        shards = None
        if self.sharded is not None:
            result, shards = self.sharded.result(folder, console)
        else:
            result = self._result(folder, config, console)
        print_summary(result.summary, console)
        if result.error is not None:
            raise result.error
        notes = write_result(
            folder,
            result,
            config,
            tables=bool(output.tables) and not self.streams,
            report=output.report,
            timeline=output.timeline,
            timeline_requests=output.timeline_requests,
            vllm_bench=output.vllm_bench,
        )
        if shards is not None:
            shards.remove()
        lacks = result.summary.get("not_computed", {}).items()
        for note in (*notes, *(f"{figure} is not computed: {reason}." for figure, reason in lacks)):
            console.print(note, style="yellow", highlight=False)
        if output.report:
            print_path(f"Report: {seen_from_here(folder / 'report.html')}", console)
        else:
            print_folder(folder, console)
        if result.records.interrupted:
            raise KeyboardInterrupt  # the partial result is written; further runs do not start

    def _result(self, folder: Path, config: dict[str, Any], console: Console) -> RunResult:
        """Simulates in this process."""
        scenario, source, output = self.scenario, self.source, self.output
        with simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report:
            if not self.streams:
                return run_or_part(scenario, source, report)
            from sim.setup.streaming import stream_to  # noqa: PLC0415 (most runs do not stream)

            return stream_to(
                folder,
                scenario,
                source,
                config,
                report,
                iterations=output.writes_iterations,
                plots=output.report,
            )


def config_of_run(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the resolved config without the launcher, which changes no result."""
    return {name: value for name, value in cfg.items() if name != "launcher"}


def prepare(cfg: dict[str, Any], composition: Composition) -> SimulateJob:
    """Builds everything that a run needs. Raises ConfigError."""
    output: SimulateOutput = build_as(SimulateOutput, cfg["output"], "output")
    scenario, source = build_run(cfg)
    answers = getattr(scenario.workload, "branching", None)
    if output.vllm_bench and isinstance(answers, Answers) and answers.width > 1:
        raise ConfigError(
            f"output.vllm_bench=true, workload.branching.width={answers.width}: this format has one output "
            "per request; set workload.branching.width=1 or output.vllm_bench=false"
        )
    streams = output.streams(scenario, source.num_requests)
    sharded = None
    if scenario.sim.shards is None:
        _check_no_launcher(composition)
    else:
        from experiments.simulate.sharded_run import ShardedRun  # noqa: PLC0415 (most runs are not divided)
        from experiments.study.launchers.launcher import Launcher  # noqa: PLC0415
        from sim.shards.whole_run import check_traffic  # noqa: PLC0415

        try:
            check_traffic(source, scenario.sim)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        sharded = ShardedRun(
            scenario=scenario,
            config=config_of_run(cfg),
            launcher=build(cfg["launcher"], "launcher", Launcher),
            overrides=composition.overrides,
            config_dirs=composition.source.dirs[1:],
            num_requests=source.num_requests,
            progress=output.progress,
            streams=streams,
            plots=streams and output.report,
            iterations=output.writes_iterations,
        )
    return SimulateJob(
        cfg=cfg, scenario=scenario, source=source, output=output, streams=streams, sharded=sharded
    )


def _check_no_launcher(composition: Composition) -> None:
    """Raises ConfigError if a launcher is chosen, which a run that is not divided does not use."""
    for override in composition.overrides:
        if Override.parse(override).root == "launcher":
            raise ConfigError(
                f"{override}, sim.shards=null: a run that is not divided runs in this process; set "
                "sim.shards=auto, or leave out the launcher"
            )
