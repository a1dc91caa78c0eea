"""`windtunnel simulate`: fly a workload with a set of policies on a cluster, and write what came out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.build import build_as
from experiments.compose import Composition, recomposed
from experiments.config_groups import CONFIG_DIR
from experiments.errors import ConfigError
from experiments.layout import with_layout
from experiments.outputs import write_result
from experiments.progress import simulated_time
from experiments.terminal import print_summary, terminal_console
from hwmodels.energy import EnergySettings
from hwmodels.iteration import UnknownIterationError
from hwmodels.storage import Storage
from policies.routing import UnknownReplicaError
from sim.handovers import HandoverSettings
from sim.pool import PoolSettings
from sim.scenario import MetricsSettings, Scenario, SimSettings
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

    def __post_init__(self) -> None:
        if self.timeline_requests is not None and self.timeline_requests < 1:
            raise ValueError(f"timeline_requests={self.timeline_requests}: must be >= 1; null for all")


# The settings checked last, and what was built from them: a single run reads its trace once, not twice.
_checked: dict[str, tuple[Scenario, Source, OutputSettings]] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Build all that a run needs; raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_run(cfg)


def build_scenario(cfg: DictConfig) -> Scenario:
    """What is simulated; whether the model fits its devices is not asked. Raises ConfigError."""
    settings: dict[str, Any] = {str(key): cfg[key] for key in cfg if key not in ("hydra", "output")}
    settings["slo"] = cfg.slo or None  # slo=none
    settings["prediction"] = cfg.prediction or None
    settings["adapters"] = cfg.adapters or None
    settings["tariff"] = cfg.tariff or None
    settings["scaling"] = cfg.scaling or None
    settings["storage"] = build_as(Storage, cfg.storage, "storage")
    settings["pools"] = {name: _build_pool(node, f"pools.{name}") for name, node in cfg.pools.items()}
    settings["handover"] = build_as(HandoverSettings, cfg.handover, "handover")
    settings["sim"] = build_as(SimSettings, cfg.sim, "sim")
    settings["energy"] = build_as(EnergySettings, cfg.energy, "energy")
    settings["metrics"] = build_as(MetricsSettings, cfg.metrics, "metrics")
    scenario: Scenario = build_as(Scenario, with_layout(settings), "")
    return scenario


def _build_pool(cfg: DictConfig, where: str) -> PoolSettings:
    settings: dict[str, Any] = {str(key): cfg[key] for key in cfg}
    settings["prediction"] = cfg.prediction or None
    settings["scaling"] = cfg.scaling or None
    settings["adapters"] = cfg.adapters or None
    settings["storage"] = build_as(Storage, cfg.storage, f"{where}.storage")
    pool: PoolSettings = build_as(PoolSettings, with_layout(settings), where)
    return pool


def build_run(cfg: DictConfig) -> tuple[Scenario, Source, OutputSettings]:
    """The scenario, its traffic (good for one run), and what to do with the result. Raises ConfigError."""
    scenario = build_scenario(cfg)
    output = build_as(OutputSettings, cfg.output, "output")
    try:
        for pool in scenario.pools_by_name.values():
            pool.plan_memory()
            pool.iteration_model()
        scenario.future()
        return scenario, scenario.source(), output
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="simulate")
def main(cfg: DictConfig) -> None:
    """Simulate, write, and print."""
    if cfg.pools:
        cfg = recomposed()
    key = OmegaConf.to_yaml(cfg)
    scenario, source, output = _checked.pop(key) if key in _checked else build_run(cfg)
    console = terminal_console()
    with simulated_time(console, source, scenario.sim.until_s, enabled=output.progress) as report:
        try:
            result = scenario.run(source, report)
        except UnknownIterationError as error:
            raise ConfigError(f"latency: {error}") from error
        except UnknownReplicaError as error:
            raise ConfigError(str(error)) from error
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
    )
    print_summary(result.summary, console)
    for note in notes:
        console.print(note, style="yellow", highlight=False)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if result.records.interrupted:
        raise KeyboardInterrupt  # the partial result is written; what else was to run is not
