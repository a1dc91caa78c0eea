"""`windtunnel goodput`: SLO attainment against the request rate, and the highest rate that keeps the SLO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.terminal import terminal_console
from experiments.goodput.answer import Outcome, search
from experiments.goodput.arms import build_arms
from experiments.goodput.page import write_goodput
from experiments.goodput.results import runs_table
from experiments.goodput.search import Arm
from experiments.goodput.settings import GoodputSettings
from experiments.goodput.tables import caveats, print_goodput, sentences, to_json
from experiments.study.workers import progress_of
from sim.report.files import write_table
from sim.settings.compose import Composition, running_source
from sim.settings.config_groups import CONFIG_DIR

# What was built for the settings checked last: arms are composed once, not twice.
_checked: dict[str, tuple[GoodputSettings, list[Arm]]] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_arms(cfg, composition.source, composition.overrides)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="goodput")
def main(cfg: DictConfig) -> None:
    """Search, write, print."""
    key, folder = OmegaConf.to_yaml(cfg), Path(HydraConfig.get().runtime.output_dir)
    source, overrides = running_source(), list(HydraConfig.get().overrides.task)
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # the arms are composed from here on
    settings, arms = _checked.pop(key) if key in _checked else build_arms(cfg, source, overrides)
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    console = terminal_console()
    with progress_of(console, enabled=settings.progress, what="searches") as report:
        outcome = search(settings, arms, report)
    if outcome is None:
        raise KeyboardInterrupt  # before an arm was searched
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    _write(folder, outcome, config)
    print_goodput(outcome.highest, caveats(settings, outcome.short), console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if outcome.interrupted:
        raise KeyboardInterrupt  # the partial result is written


def _write(folder: Path, outcome: Outcome, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    write_table(runs_table(outcome.arms, outcome.settings.seeds, outcome.found), folder / "runs.parquet")
    record: dict[str, Any] = {
        "interrupted": outcome.interrupted,
        "scale_rate": outcome.scale_rate,
        "verdicts": sentences(outcome.highest),
        "caveats": caveats(outcome.settings, outcome.short),
        "arms": to_json(outcome.highest),
        "notes": {
            arm.name: list(outcome.found[arm.name][0].at_rates[0].notes)
            for arm in outcome.arms
            if outcome.found[arm.name][0].at_rates
        },
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if outcome.settings.report:
        write_goodput(folder / "goodput.html", outcome, config, record["notes"])
