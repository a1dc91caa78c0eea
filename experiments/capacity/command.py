"""`windtunnel capacity`: finds the cheapest GPUs, replicas and engine settings that meet the SLO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, print_path, seen_from_here, write_study
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.capacity.answer import Answer, answer
from experiments.capacity.candidates import Question, build_question
from experiments.capacity.optuna_search import load_optuna
from experiments.capacity.page import write_capacity
from experiments.capacity.results import candidates_table
from experiments.capacity.tables import print_answer, to_json
from experiments.study.workers import progress_of
from sim.report.files import write_table

PAGE = "capacity.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityJob:
    """Search among candidates that have been composed and built."""

    cfg: dict[str, Any]
    question: Question

    def run(self, folder: Path) -> None:
        """Searches, writes the results and prints the answer.

        Raises UnsuccessfulError if no candidate meets the SLO, and KeyboardInterrupt after Ctrl-C.
        """
        console = terminal_console()
        with progress_of(console, enabled=self.question.settings.progress, what="candidates") as report:
            found = answer(self.question, report)
        if found is None:
            raise KeyboardInterrupt  # there is no result to write yet
        print_answer(found, console)
        _write(folder, found, self.cfg)
        print_folder(folder, console)
        if self.question.settings.report:
            print_path(f"Page with the Pareto front: {seen_from_here(folder / PAGE)}", console)
        if found.interrupted:
            raise KeyboardInterrupt  # the results so far are written
        if not found.ranked:
            raise UnsuccessfulError


def prepare(cfg: dict[str, Any], composition: Composition) -> CapacityJob:
    """Composes and builds the candidates. Raises ConfigError for a wrong setting."""
    question = build_question(cfg, composition.source, composition.overrides)
    if question.settings.search == "optuna":
        load_optuna()
    return CapacityJob(cfg=cfg, question=question)


def _write(folder: Path, found: Answer, config: dict[str, Any]) -> None:
    write_table(candidates_table(found.search, found.question.refused), folder / "candidates.parquet")
    write_study(folder, config, to_json(found))
    if found.question.settings.report:
        write_capacity(folder / PAGE, found, config)
