"""Settings that all studies have, and checks of settings that several have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from experiments.study.launchers.launcher import Launcher
from experiments.study.launchers.local import Local
from experiments.study.study import Study, StudyJob
from fieldlimits import Checked
from sim.settings.build import build, build_as
from sim.settings.errors import ConfigError

MAX_RUNS = 10_000
LAUNCHER = "launcher"
"""Root key of the launcher in the config of a study, if one was chosen."""
OF_A_STUDY = ("jobs", "report", "progress", LAUNCHER)
"""Settings of any study, which change no result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySettings(Checked):
    """Base of the settings of a study."""

    jobs: int | None = None
    """Number of processes; None: one per core."""
    report: bool = True
    """Whether the page is written."""
    progress: bool = True
    launcher: Launcher | None = None
    """Where the runs are simulated; None: in `jobs` processes of this machine."""

    @property
    def runs_on(self) -> Launcher:
        """The launcher of the runs."""
        return Local(jobs=self.jobs) if self.launcher is None else self.launcher

    def job(self, study: Study, *, parts: str = "runs", page_note: str = "") -> StudyJob:
        """Returns the job of a study with these settings; see `StudyJob`."""
        return StudyJob(
            study=study, parts=parts, progress=self.progress, page=self.report, page_note=page_note
        )


S = TypeVar("S", bound=StudySettings)


def settings_of(kind: type[S], cfg: Mapping[str, Any], node: str, **parts: Any) -> S:
    """Builds the settings of a study from the config of its command.

    node: key of the node with the settings; "": they are at the root. parts: settings that are built already.
    Raises ConfigError.
    """
    own = {**(cfg[node] if node else cfg), **parts}
    if LAUNCHER in cfg:
        own[LAUNCHER] = build(cfg[LAUNCHER], LAUNCHER, Launcher)
        if own.get("jobs") is not None:
            key = f"{node}.jobs" if node else "jobs"
            raise ConfigError(f"{key}={own['jobs']}: must be null with a launcher; set launcher.jobs")
    settings: S = build_as(kind, own, node)
    return settings


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
