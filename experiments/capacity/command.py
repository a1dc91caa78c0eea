"""`windtunnel capacity`: finds the cheapest GPUs, replicas and engine settings that meet the SLO."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.app.settings.compose import Composition
from experiments.capacity.answer import answer
from experiments.capacity.candidates import Question, build_question
from experiments.capacity.optuna_search import load_optuna
from experiments.capacity.page import page_of
from experiments.capacity.results import candidates_table
from experiments.capacity.tables import caveats, print_answer, sentences, to_json
from experiments.study.study import Findings, StudyJob
from experiments.study.workers import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """Search among candidates that have been composed and built."""

    cfg: dict[str, Any]
    question: Question

    def find(self, report: Report) -> Findings | None:
        """Searches the cheapest candidates that meet the SLO; see `Study`."""
        found = answer(self.question, report)
        if found is None:
            return None
        return Findings(
            name="capacity",
            config=self.cfg,
            tables={"candidates": candidates_table(found.search, self.question.refused)},
            verdicts=sentences(found),
            caveats=caveats(found),
            record=to_json(found),
            show=partial(print_answer, found),
            draw=partial(page_of, found, self.cfg),
            is_whole=not found.interrupted,
            failure=None if found.ranked else "",
        )


def prepare(cfg: dict[str, Any], composition: Composition) -> StudyJob:
    """Composes and builds the candidates. Raises ConfigError for a wrong setting."""
    question = build_question(cfg, composition.source, composition.overrides)
    if question.settings.search == "optuna":
        load_optuna()
    return question.settings.job(
        Planning(cfg=cfg, question=question),
        parts="candidates",
        page_note="Page with the Pareto front: ",
    )
