"""`windtunnel simulate`: fly a workload with a set of policies on a cluster, and write what came out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.progress import simulated_time
from experiments.app.terminal import print_summary, terminal_console
from sim.report.files import write_result
from sim.settings.build import build_as
from sim.settings.compose import Composition, recomposed
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run
from sim.setup.scenario import Scenario
from sim.workload.answers import Answers
from sim.workload.base import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """What is written and shown besides summary.json, config.yaml and the tables on the terminal."""

    report: bool = True
    tables: bool = True
    progress: bool = True
    timeline: bool = False
    """Write timeline.json."""
    timeline_requests: int | None = 10_000
    """Requests in it, the first to arrive; None: all."""
    vllm_bench: bool = False
    """Write vllm_bench.json, in the layout of `vllm bench serve --save-detailed`."""

    def __post_init__(self) -> None:
        if self.timeline_requests is not None and self.timeline_requests < 1:
            raise ValueError(f"timeline_requests={self.timeline_requests}: must be >= 1; null for all")


# The settings checked last, and what was built from them: a single run reads its trace once, not twice.
_checked: dict[str, tuple[Scenario, Source, OutputSettings]] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Build all that a run needs; raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build(cfg)


def build(cfg: DictConfig) -> tuple[Scenario, Source, OutputSettings]:
    """The scenario, its traffic (good for one run), and what to do with the result. Raises ConfigError."""
    output = build_as(OutputSettings, cfg.output, "output")
    scenario, source = build_run(cfg)
    answers = getattr(scenario.workload, "branching", None)
    if output.vllm_bench and isinstance(answers, Answers) and answers.width > 1:
        raise ConfigError(
            f"output.vllm_bench=true, workload.branching.width={answers.width}: that layout has one answer a "
            "request; set workload.branching.width=1 or leave output.vllm_bench out"
        )
    return scenario, source, output


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate, write, and print."""
    if cfg.pools:
        cfg = recomposed()
    key = OmegaConf.to_yaml(cfg)
    scenario, source, output = _checked.pop(key) if key in _checked else build(cfg)
    console = terminal_console()
    with simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report:
        result = run(scenario, source, report)
    folder = Path(HydraConfig.get().runtime.output_dir)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    notes = write_result(
        folder,
        result,
        config,
        tables=output.tables,
        report=output.report,
        timeline=output.timeline,
        timeline_requests=output.timeline_requests,
        vllm_bench=output.vllm_bench,
    )
    print_summary(result.summary, console)
    for note in notes:
        console.print(note, style="yellow", highlight=False)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if result.records.interrupted:
        raise KeyboardInterrupt  # the partial result is written; what else was to run is not
