"""A sweep as a study of the Python interface, whose runs are in a folder only while they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.override import quoted
from experiments.study.study import Findings, StudyJob
from experiments.study.workers import Report
from experiments.sweep.page import findings_of
from experiments.sweep.run import collect
from experiments.sweep.setup import begun
from sim.engine.clock import ctrl_c_noted


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeping:
    """Every combination of several values of settings."""

    source: ConfigSource
    overrides: Sequence[str]

    def find(self, report: Report) -> Findings | None:
        """Makes all runs; see `Study`."""
        with TemporaryDirectory() as place:
            own = f"hydra.run.dir={quoted(str(Path(place, 'sweep')))}"
            source, folder, options = begun(self.source, [*self.overrides, own])
            total = folder.plan.num_points

            def ended(done: int, failed: int) -> None:
                report(done + failed, total)

            try:
                with ctrl_c_noted() as interrupt:
                    collect(folder, options, source, interrupt, ended)
                if not folder.rows:
                    return None
                return findings_of(folder, options.report, is_whole=len(folder.rows) == total)
            finally:
                folder.release()


def sweep_of(source: ConfigSource, overrides: Sequence[str]) -> StudyJob:
    """Returns the job of a sweep. Its settings are checked when it begins."""
    return StudyJob(study=Sweeping(source=source, overrides=overrides))
