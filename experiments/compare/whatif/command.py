"""`windtunnel whatif`: compares single changes with a baseline, and shows the limiting resource of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.app.settings.compose import Composition
from experiments.compare.results import evaluate
from experiments.compare.whatif.arms import Questions, build_questions
from experiments.compare.whatif.page import page_of
from experiments.compare.whatif.sentences import Answers, caveats, limits_by_arm, times_by_arm, verdicts
from experiments.compare.whatif.tables import print_answers
from experiments.study.runs import run_all
from experiments.study.study import Findings, StudyJob
from experiments.study.workers import Report
from sim.metrics.limiting import time_shares
from sim.metrics.result import RunResult


def with_limits(result: RunResult) -> dict[str, Any]:
    """Returns the summary of a run, with the shares of its requests' time by resource."""
    return {**result.summary, "limits": time_shares(result)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """Comparison of a baseline with changes, composed and built."""

    cfg: dict[str, Any]
    questions: Questions

    def find(self, report: Report) -> Findings | None:
        """Runs the baseline and the changes, and compares them; see `Study`."""
        questions, settings = self.questions, self.questions.settings
        runs = run_all(questions.points, settings.seeds, settings.runs_on, report, with_limits)
        if runs.table.empty:
            return None
        answers = Answers(
            questions=questions,
            found=evaluate(questions.experiment, runs),
            limits=limits_by_arm(runs.table),
            times_s=times_by_arm(runs.table),
        )
        sentences, warnings = verdicts(answers), caveats(answers)
        record = {
            **answers.found.to_json(sentences),
            "caveats": warnings,
            "changes": {arm: list(words) for arm, words in questions.experiment.arms.items()},
            "left_out": questions.left_out,
            "limits": {
                arm: {name: share.mean for name, share in shares.items()}
                for arm, shares in answers.limits.items()
            },
            "notes": runs.notes,
        }
        return Findings(
            name="whatif",
            config=self.cfg,
            tables={"runs": runs.table},
            verdicts=sentences,
            caveats=warnings,
            record=record,
            show=partial(print_answers, answers),
            draw=partial(page_of, answers, self.cfg),
            is_whole=not runs.interrupted,
        )


def prepare(cfg: dict[str, Any], composition: Composition) -> StudyJob:
    """Composes and builds the baseline and every change. Raises ConfigError for a wrong setting."""
    questions = build_questions(cfg, composition.source, composition.overrides)
    return questions.settings.job(Asking(cfg=cfg, questions=questions))
