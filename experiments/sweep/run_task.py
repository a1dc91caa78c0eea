"""Runs one point of a sweep in a worker: composes, builds, simulates, and returns figures and files.

The files are returned as bytes and written by the command, because a worker may be on another machine and a
killed worker must leave no partial files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import with_choice
from experiments.app.settings.variants import Variants
from experiments.study.figures import figures
from experiments.sweep.plan import OF_THE_SWEEP, Point
from policies.user_code import quote_of
from sim.report.run_files import run_files
from sim.settings.build import PolicyFailedError, shown
from sim.settings.recorded import check_recorded
from sim.settings.scenario import build_run, run
from sim.setup.scenario import Scenario
from sim.workload.base import Source


class FinishedRun(NamedTuple):
    """Result of a run. files: content by name, summary.json last."""

    figures: dict[str, float]
    files: dict[str, bytes]
    wall_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTask:
    """A point of the sweep to run, and the configs that its settings come from."""

    point: Point
    config_name: str
    dirs: tuple[Path, ...]
    import_dirs: tuple[str, ...]
    """Folders added to the import path for a user's own classes."""
    tables: bool
    recorded: str = ""
    """The setting that named the folder of the plan, if it is not trusted; see `check_recorded`."""

    @property
    def name(self) -> str:
        return self.point.name

    def config(self) -> dict[str, Any]:
        """Composes and resolves the config of the run. Raises ConfigError."""
        config = _variants(self.config_name, self.dirs).config(self.point.overrides)
        if self.recorded:
            check_recorded(config, self.recorded)
        return resolved({key: value for key, value in config.items() if key not in OF_THE_SWEEP})

    def build(self) -> tuple[dict[str, Any], Scenario, Source]:
        """Builds the scenario and the source; returns them after the config. Raises ConfigError."""
        for folder in self.import_dirs:
            if folder not in sys.path:  # last, so that they cannot shadow anything
                sys.path.append(folder)
        config = self.config()
        return config, *build_run(config)

    def run(self) -> FinishedRun:
        """Simulates the point. Raises ConfigError for settings that cannot be run."""
        begun = time.perf_counter()
        config, scenario, source = self.build()
        try:
            result = run(scenario, source)
        except PolicyFailedError as error:
            raise with_choice(error, self.dirs)  # noqa: B904 (the same error)
        files = dict(run_files(result, config, tables=self.tables))
        return FinishedRun(
            figures=figures(result.summary),
            files=files,
            wall_s=time.perf_counter() - begun,
        )


def tasks_of(
    points: Sequence[Point],
    source: ConfigSource,
    import_dirs: Sequence[str],
    *,
    tables: bool,
    recorded: str = "",
) -> list[RunTask]:
    """Returns one task per point."""
    return [
        RunTask(
            point=point,
            config_name=source.config_name,
            dirs=tuple(source.dirs),
            import_dirs=tuple(import_dirs),
            tables=tables,
            recorded=recorded,
        )
        for point in points
    ]


@lru_cache(maxsize=4)
def _variants(config_name: str, dirs: tuple[Path, ...]) -> Variants:
    """Returns the cached compositions of a worker, which many points share."""
    return Variants(ConfigSource(config_name=config_name, dirs=dirs))


def in_words(error: Exception) -> str:
    """Returns the first line of an error, with its type unless it is about settings."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if quote := quote_of(error):
        first = f"{first} ({' '.join(quote.split())})"
    return (
        first
        if type(error).__name__ in ("ConfigError", "PolicyFailedError", "WorkerDiedError")
        else (f"{type(error).__name__}: {shown(first)}")
    )
