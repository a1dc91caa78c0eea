"""`windtunnel goodput`: measures SLO attainment over the request rate, and finds the highest rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, write_study
from experiments.app.settings.compose import Composition
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodputJob:
    """Search for the highest rates of arms that have been composed and built."""

    cfg: dict[str, Any]
    settings: GoodputSettings
    arms: Sequence[Arm]

    def run(self, folder: Path) -> None:
        """Searches, writes the results and prints the highest rates.

        Raises KeyboardInterrupt after Ctrl-C, once the results so far are written, and UnsuccessfulError if
        an answer is only a lower bound.
        """
        console = terminal_console()
        with progress_of(console, enabled=self.settings.progress, what="searches") as report:
            outcome = search(self.settings, self.arms, report)
        if outcome is None:
            raise KeyboardInterrupt  # there is no result to write yet
        print_goodput(outcome.highest, caveats(outcome), console)
        _write(folder, outcome, self.cfg)
        print_folder(folder, console)
        if outcome.interrupted:
            raise KeyboardInterrupt  # the partial results are written
        if any(one.is_open for one in outcome.highest):
            raise UnsuccessfulError("the traffic is too short to find the highest rate")


def prepare(cfg: dict[str, Any], composition: Composition) -> GoodputJob:
    """Composes and builds every arm. Raises ConfigError for a wrong setting."""
    settings, arms = build_arms(cfg, composition.source, composition.overrides)
    return GoodputJob(cfg=cfg, settings=settings, arms=arms)


def _write(folder: Path, outcome: Outcome, config: dict[str, Any]) -> None:
    write_table(runs_table(outcome.arms, outcome.settings.seeds, outcome.found), folder / "runs.parquet")
    record: dict[str, Any] = {
        "interrupted": outcome.interrupted,
        "scale_rate": outcome.scale_rate,
        "verdicts": sentences(outcome.highest),
        "caveats": caveats(outcome),
        "arms": to_json(outcome.highest),
        "notes": outcome.notes,
    }
    write_study(folder, config, record)
    if outcome.settings.report:
        write_goodput(folder / "goodput.html", outcome, config, record["notes"])
