"""`windtunnel whatif`: one change at a time against a baseline, and what limits before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.terminal import terminal_console
from experiments.compare.results import evaluate
from experiments.compare.whatif.arms import Questions, build_questions
from experiments.compare.whatif.page import write_answers
from experiments.compare.whatif.sentences import Answers, caveats, limits_by_arm, verdicts
from experiments.compare.whatif.tables import print_answers
from experiments.study.runs import Runs, run_all
from experiments.study.workers import progress_of
from sim.metrics.limiting import time_shares
from sim.metrics.result import RunResult
from sim.report.files import write_table
from sim.settings.compose import Composition, running_source
from sim.settings.config_groups import CONFIG_DIR

# What was composed for the settings checked last: arms are composed once, not twice.
_checked: dict[str, Questions] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_questions(cfg, composition.source, composition.overrides)


def with_limits(result: RunResult) -> dict[str, Any]:
    """A run's summary, and where its requests' time went."""
    return {**result.summary, "limits": time_shares(result)}


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="whatif")
def main(cfg: DictConfig) -> None:
    """Run, evaluate, write, print."""
    key, folder = OmegaConf.to_yaml(cfg), Path(HydraConfig.get().runtime.output_dir)
    source, overrides = running_source(), list(HydraConfig.get().overrides.task)
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # the arms are composed from here on
    questions = _checked.pop(key) if key in _checked else build_questions(cfg, source, overrides)
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    console, settings = terminal_console(), questions.settings
    with progress_of(console, enabled=settings.progress) as report:
        runs = run_all(questions.points, settings.seeds, settings.num_processes, report, with_limits)
    if runs.table.empty:
        raise KeyboardInterrupt  # before the first run was done
    answers = Answers(
        questions=questions,
        found=evaluate(questions.experiment, runs.table, interrupted=runs.interrupted),
        limits=limits_by_arm(runs.table),
    )
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    _write(folder, answers, runs, config)
    print_answers(answers, console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if runs.interrupted:
        raise KeyboardInterrupt  # the partial result is written; what else was to run is not


def _write(folder: Path, answers: Answers, runs: Runs, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    write_table(runs.table, folder / "runs.parquet")
    questions = answers.questions
    record = {
        **answers.found.to_json(verdicts(answers)),
        "caveats": caveats(answers),
        "changes": {arm: list(words) for arm, words in questions.experiment.arms.items()},
        "left_out": questions.left_out,
        "limits": {
            arm: {name: share.mean for name, share in shares.items()}
            for arm, shares in answers.limits.items()
        },
        "notes": runs.notes,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if questions.settings.report:
        write_answers(folder / "whatif.html", answers, config, runs.notes)
