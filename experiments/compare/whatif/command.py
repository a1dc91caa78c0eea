"""`windtunnel whatif`: compares single changes with a baseline, and shows the limiting resource of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.run_folder import print_folder, write_study
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.compare.results import evaluate
from experiments.compare.whatif.arms import Questions, build_questions
from experiments.compare.whatif.page import write_answers
from experiments.compare.whatif.sentences import Answers, caveats, limits_by_arm, times_by_arm, verdicts
from experiments.compare.whatif.tables import print_answers
from experiments.study.runs import Runs, run_all
from experiments.study.workers import progress_of
from sim.metrics.limiting import time_shares
from sim.metrics.result import RunResult
from sim.report.files import write_table


def with_limits(result: RunResult) -> dict[str, Any]:
    """Returns the summary of a run, with the shares of its requests' time by resource."""
    return {**result.summary, "limits": time_shares(result)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatifJob:
    """Comparison of a baseline with changes, composed and built."""

    cfg: dict[str, Any]
    questions: Questions

    def run(self, folder: Path) -> None:
        """Runs the baseline and the changes, writes the results and prints them.

        Raises KeyboardInterrupt after Ctrl-C, once the results so far are written.
        """
        console, questions, settings = terminal_console(), self.questions, self.questions.settings
        with progress_of(console, enabled=settings.progress) as report:
            runs = run_all(questions.points, settings.seeds, settings.num_processes, report, with_limits)
        if runs.table.empty:
            raise KeyboardInterrupt  # no run has ended yet
        answers = Answers(
            questions=questions,
            found=evaluate(
                questions.experiment, runs.table, interrupted=runs.interrupted, traced=runs.traced
            ),
            limits=limits_by_arm(runs.table),
            times_s=times_by_arm(runs.table),
            notes=runs.notes,
        )
        print_answers(answers, console)
        self._write(folder, answers, runs)
        print_folder(folder, console)
        if runs.interrupted:
            raise KeyboardInterrupt  # the partial results are written

    def _write(self, folder: Path, answers: Answers, runs: Runs) -> None:
        config = self.cfg
        write_table(runs.table, folder / "runs.parquet")
        record = {
            **answers.found.to_json(verdicts(answers)),
            "caveats": caveats(answers),
            "changes": {arm: list(words) for arm, words in self.questions.experiment.arms.items()},
            "left_out": self.questions.left_out,
            "limits": {
                arm: {name: share.mean for name, share in shares.items()}
                for arm, shares in answers.limits.items()
            },
            "notes": runs.notes,
        }
        write_study(folder, config, record)
        if self.questions.settings.report:
            write_answers(folder / "whatif.html", answers, config, runs.notes)


def prepare(cfg: dict[str, Any], composition: Composition) -> WhatifJob:
    """Composes and builds the baseline and every change. Raises ConfigError for a wrong setting."""
    return WhatifJob(cfg=cfg, questions=build_questions(cfg, composition.source, composition.overrides))
