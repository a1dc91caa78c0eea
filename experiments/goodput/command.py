"""`windtunnel goodput`: measures SLO attainment over the request rate, and finds the highest rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.app.settings.compose import Composition
from experiments.goodput.answer import search
from experiments.goodput.arms import build_arms
from experiments.goodput.page import page_of
from experiments.goodput.results import runs_table
from experiments.goodput.search import Arm
from experiments.goodput.settings import GoodputSettings
from experiments.goodput.tables import caveats, print_goodput, sentences, to_json
from experiments.study.study import Findings, StudyJob
from experiments.study.workers import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Searching:
    """Search for the highest rates of arms that have been composed and built."""

    cfg: dict[str, Any]
    settings: GoodputSettings
    arms: Sequence[Arm]

    def find(self, report: Report) -> Findings | None:
        """Searches the highest rate of every arm; see `Study`."""
        outcome = search(self.settings, self.arms, report)
        if outcome is None:
            return None
        verdicts, warnings = sentences(outcome.highest), caveats(outcome)
        is_open = any(one.is_open for one in outcome.highest)
        return Findings(
            name="goodput",
            config=self.cfg,
            tables={"runs": runs_table(outcome.arms, outcome.settings.seeds, outcome.found)},
            verdicts=verdicts,
            caveats=warnings,
            record={
                "interrupted": outcome.interrupted,
                "scale_rate": outcome.scale_rate,
                "verdicts": verdicts,
                "caveats": warnings,
                "arms": to_json(outcome.highest),
                "notes": outcome.notes,
            },
            show=partial(print_goodput, outcome.highest, warnings),
            draw=partial(page_of, outcome, self.cfg),
            is_whole=not outcome.interrupted,
            failure="the traffic is too short to find the highest rate" if is_open else None,
        )


def prepare(cfg: dict[str, Any], composition: Composition) -> StudyJob:
    """Composes and builds every arm. Raises ConfigError for a wrong setting."""
    settings, arms = build_arms(cfg, composition)
    return settings.job(Searching(cfg=cfg, settings=settings, arms=arms), parts="searches")
