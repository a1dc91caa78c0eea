"""`windtunnel simulate`: simulates a workload with a set of policies on a cluster, and writes the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from experiments.app.progress import simulated_time
from experiments.app.run_folder import print_folder
from experiments.app.settings.compose import Composition
from experiments.app.settings.override import Override
from experiments.app.terminal import print_summary, terminal_console
from experiments.simulate.output import SimulateOutput
from sim.report.files import write_result
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run_or_part
from sim.setup.scenario import Scenario
from sim.workload.answers import Answers
from sim.workload.base import Source

if TYPE_CHECKING:
    from experiments.simulate.sharded_run import ShardedRun
    from experiments.simulate.windowed_run import WindowedRun


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateJob:
    """A scenario, its source of requests (which serves one run), and the output settings."""

    cfg: dict[str, Any]
    scenario: Scenario
    source: Source
    output: SimulateOutput
    streams: bool = False
    """Whether tables are written while the run goes on."""
    sharded: ShardedRun | WindowedRun | None = None
    """How the parts of the run are simulated; None: it is not divided."""

    @property
    def continues(self) -> bool:
        """Returns whether the folder may hold shards of the same run, which are used."""
        return self.sharded is not None and self.sharded.continues

    def run(self, folder: Path) -> None:
        """Simulates, writes and prints."""
        output, console = self.output, terminal_console()
        if self.streams:
            self._run_streamed(folder, console)
            return
        if note := output.note(self.scenario, self.source.num_requests):
            console.print(note, style="yellow", highlight=False)
        until_s, shards = self.scenario.sim.until_s, None
        if self.sharded is not None:
            result, shards = self.sharded.result(folder, console)
        else:
            with simulated_time(console, self.source, until_s, enabled=output.progress) as report:
                result = run_or_part(self.scenario, self.source, report)
        print_summary(result.summary, console)
        notes = write_result(
            folder,
            result,
            config_of_run(self.cfg),
            tables=bool(output.tables),
            report=output.report,
            timeline=output.timeline,
            timeline_requests=output.timeline_requests,
            vllm_bench=output.vllm_bench,
        )
        if shards is not None:
            shards.remove()
        for note in notes:
            console.print(note, style="yellow", highlight=False)
        print_folder(folder, console)
        if result.records.interrupted:
            raise KeyboardInterrupt  # the partial result is written; further runs do not start

    def _run_streamed(self, folder: Path, console: Console) -> None:
        from experiments.simulate.streamed_output import run_streamed  # noqa: PLC0415 (most runs do not stream)

        config = config_of_run(self.cfg)
        if self.sharded is None:
            run_streamed(
                self.scenario, self.source, self.output, config=config, folder=folder, console=console
            )
            return
        from experiments.simulate.sharded_output import run_sharded_streamed  # noqa: PLC0415

        run_sharded_streamed(self.sharded, self.output, config=config, folder=folder, console=console)


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
        from experiments.simulate.divided import divided  # noqa: PLC0415 (most runs are not divided)

        config = config_of_run(cfg)
        sharded = divided(cfg["launcher"], config, composition, scenario, source, output, streams=streams)
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
