"""`windtunnel capacity`: how many of which GPUs, with which settings, keep the SLO for the least rent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.terminal import terminal_console
from experiments.capacity.answer import Answer, answer
from experiments.capacity.candidates import Question, build_question
from experiments.capacity.optuna_search import load_optuna
from experiments.capacity.page import write_capacity
from experiments.capacity.results import candidates_table
from experiments.capacity.tables import print_answer, to_json
from experiments.study.workers import progress_of
from sim.report.files import write_table
from sim.settings.compose import Composition, running_source
from sim.settings.config_groups import CONFIG_DIR

NONE_KEEPS = 3
"""Exit code: the search is done, and no candidate keeps the SLO."""

# What was built for the settings checked last: candidates are composed once, not twice.
_checked: dict[str, Question] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    _checked.clear()
    question = build_question(cfg, composition.source, composition.overrides)
    if question.settings.search == "optuna":
        load_optuna()
    _checked[OmegaConf.to_yaml(cfg)] = question


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="capacity")
def main(cfg: DictConfig) -> None:
    """Search, write, print."""
    key, folder = OmegaConf.to_yaml(cfg), Path(HydraConfig.get().runtime.output_dir)
    source, overrides = running_source(), list(HydraConfig.get().overrides.task)
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # candidates are composed from here on
    question = _checked.pop(key) if key in _checked else build_question(cfg, source, overrides)
    console = terminal_console()
    with progress_of(console, enabled=question.settings.progress, what="candidates") as report:
        found = answer(question, report)
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    if found is None:
        raise KeyboardInterrupt  # before anything was known
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    _write(folder, found, config)
    print_answer(found, console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if found.interrupted:
        raise KeyboardInterrupt  # what is known is written
    if not found.ranked:
        sys.exit(NONE_KEEPS)


def _write(folder: Path, found: Answer, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    write_table(candidates_table(found.search, found.question.refused), folder / "candidates.parquet")
    text = json.dumps(to_json(found), indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if found.question.settings.report:
        write_capacity(folder / "capacity.html", found, config)
