"""`windtunnel reproduce`: recomputes published figures, and shows each beside ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from experiments.app.application import Application, launch
from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, write_study
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.reproduce.claims import FAMILIES
from experiments.reproduce.page import write_gallery
from experiments.reproduce.rows import Family
from experiments.reproduce.table import print_gallery, records
from experiments.reproduce.tasks import Plan, done, planned
from experiments.reproduce.verdicts import Judged, State, Verdict, of_state
from experiments.study.seeds import check_seeds
from experiments.study.workers import progress_of
from fieldlimits import Checked, PositiveInt, check
from sim.report.wording import plural
from sim.settings.build import build_as
from sim.settings.errors import ConfigError, suggest

APPLICATION = Application(
    name="reproduce",
    summary="Recompute published figures, and show each beside ours with the reason of a difference.",
    module="experiments.reproduce.command",
    config_name="reproduce",
    names_setting="only",
)


def main(arguments: Sequence[str]) -> None:
    """Reproduces the rows and families that are named, or all. Raises what `launch` raises."""
    launch(APPLICATION, arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceSettings(Checked):
    """Settings of `windtunnel reproduce`."""

    only: tuple[str, ...] = ()
    """Names of families or rows; empty: all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: Annotated[PositiveInt | None, "null for one per core"] = None
    """Number of processes; None: one per core."""
    cache: str | None = None
    """Folder that keeps the results of runs; None: none."""
    report: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        check(self)
        check_seeds(self.seeds, "three")
        if self.cache is not None and Path(self.cache).exists() and not Path(self.cache).is_dir():
            raise ValueError(f"cache={self.cache}: must be a folder, or null to keep nothing")


def chosen(only: Sequence[str], families: Sequence[Family]) -> tuple[Family, ...]:
    """Returns the named families whole, and those of named rows with these rows; all without names.

    Raises ConfigError for a name of neither.
    """
    rows = {row.name for family in families for row in family.rows}
    names = {family.name for family in families}
    for name in only:
        if name not in names | rows:
            known = suggest(name, sorted(names), also=sorted(rows))
            raise ConfigError(f"only={name}: is neither a family nor a row of the gallery; {known}")
    if not only:
        return tuple(families)
    parts = [
        family
        if family.name in only
        else Family(
            name=family.name,
            title=family.title,
            rows=tuple(row for row in family.rows if row.name in only),
        )
        for family in families
    ]
    return tuple(part for part in parts if part.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproduceJob:
    """Rows whose comparisons have been composed and built."""

    cfg: dict[str, Any]
    settings: ReproduceSettings
    families: tuple[Family, ...]
    plan: Plan
    dirs: Sequence[Path]

    def run(self, folder: Path) -> None:
        """Runs what is missing, judges all rows, writes the results and prints them.

        Raises UnsuccessfulError if rows that held fell out of their bands, and KeyboardInterrupt after
        Ctrl-C, once the results so far are written.
        """
        console, settings = terminal_console(), self.settings
        cache = None if settings.cache is None else Path(settings.cache)
        with progress_of(console, enabled=settings.progress) as report:
            jobs = settings.jobs or os.cpu_count() or 1
            results, interrupted = done(self.plan, jobs, cache, self.dirs, report)
        judged = tuple(
            Judged(
                family=family,
                verdicts=tuple(
                    Verdict(row=row, ours=self.plan.interval(row, results)) for row in family.rows
                ),
            )
            for family in self.families
        )
        print_gallery(judged, console)
        self._write(folder, judged, console)
        if interrupted:
            raise KeyboardInterrupt  # the partial results are written
        if fallen := of_state(judged, State.FELL_OUT):
            names = ", ".join(verdict.row.name for verdict in fallen)
            raise UnsuccessfulError(f"{plural(len(fallen), 'row')} fell out of the band: {names}")

    def _write(self, folder: Path, judged: Sequence[Judged], console: Console) -> None:
        config = self.cfg
        write_study(folder, config, {"rows": records(judged)})
        if self.settings.report:
            write_gallery(folder / "gallery.html", judged, self.settings.seeds)
        print_folder(folder, console)


def prepare(cfg: dict[str, Any], composition: Composition) -> ReproduceJob:
    """Composes and builds the comparisons of the chosen rows. Raises ConfigError for a wrong setting."""
    settings: ReproduceSettings = build_as(ReproduceSettings, cfg, "")
    families = chosen(settings.only, FAMILIES)
    dirs = composition.source.dirs
    plan = planned([row for family in families for row in family.rows], settings.seeds, dirs)
    return ReproduceJob(cfg=cfg, settings=settings, families=families, plan=plan, dirs=dirs)
