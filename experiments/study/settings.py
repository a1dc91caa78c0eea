"""Settings that all studies have, and checks of settings that several have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.study.study import Study, StudyJob
from fieldlimits import Checked

MAX_RUNS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings(Checked):
    """Base of the settings of a study."""

    jobs: int | None = None
    """Number of processes; None: one per core."""
    report: bool = True
    """Whether the page is written."""
    progress: bool = True

    @property
    def num_processes(self) -> int:
        return self.jobs or os.cpu_count() or 1

    def job(self, study: Study, *, parts: str = "runs", page_note: str = "") -> StudyJob:
        """Returns the job of a study with these settings; see `StudyJob`."""
        return StudyJob(
            study=study, parts=parts, progress=self.progress, page=self.report, page_note=page_note
        )


def check_least(settings: StudySettings, least: Mapping[str, int], note: str = "") -> None:
    """Raises ValueError for a setting below its least value; None is allowed. note: end of the message."""
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value}: must be >= {lowest}{note}")


def check_num_runs(num_runs: int, name: str, count: int, what: str) -> None:
    """Raises ValueError for too many runs. name, count: a setting to reduce; what: those that make them."""
    if num_runs > MAX_RUNS:
        raise ValueError(
            f"{name}={count}: {what} make {num_runs:,} runs; must be <= {MAX_RUNS:,}; use fewer "
            f"{name.removeprefix('num_')}"
        )
