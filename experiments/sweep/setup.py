"""What a sweep runs and how: a new one, its points checked, or an earlier one that goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from experiments.study.launchers.outcome import Launcher
from experiments.sweep.code import code_version
from experiments.sweep.folder import SweepFolder
from experiments.sweep.grid import check_places
from experiments.sweep.plan import OF_THE_SWEEP, Plan, plan_of
from experiments.sweep.run_task import tasks_of
from experiments.sweep.settings import ReportSettings, SweepSettings, Unbuildable, build_report_settings
from sim.settings.build import build, build_as
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import config_dirs
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.override import Override, not_about


class How(NamedTuple):
    """Settings of the sweep itself."""

    sweep: SweepSettings
    report: ReportSettings
    launcher: Launcher
    code: str
    """The version of the code and configs that the runs depend on."""


def begun(source: ConfigSource, overrides: Sequence[str]) -> tuple[ConfigSource, SweepFolder, How]:
    """A new sweep, its points checked."""
    plan = plan_of(overrides, source)
    how, cfg = _how(source, [o for o in overrides if is_of_the_sweep(o)])
    check_places([axis.key for axis in plan.axes], how.report)
    _check(plan, source, how.sweep.unbuildable)
    about = {
        "overrides": list(overrides),
        "config_dirs": [str(path) for path in source.dirs[1:]],
        "cwd": os.getcwd(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": [how.code],
    }
    return source, SweepFolder.create(Path(cfg.hydra.run.dir), plan, about), how


def resumed(
    path: Path, overrides: Sequence[str], user_dir: Path | None
) -> tuple[ConfigSource, SweepFolder, How]:
    """An earlier sweep: the same points, perhaps by another launcher."""
    for override in overrides:
        if not is_of_the_sweep(override):
            raise ConfigError(
                f"{override}: a resumed sweep has the same points; allowed with resume: "
                f"{', '.join(key for key in OF_THE_SWEEP if key != 'hydra')}"
            )
    folder = SweepFolder.open(path, "resume")
    dirs = [*config_dirs(None), *map(Path, folder.about["config_dirs"])]
    source = ConfigSource(config_name="sweep", dirs=config_dirs(user_dir) if user_dir else dirs)
    first = [o for o in folder.about["overrides"] if is_of_the_sweep(o)]
    # The settings of another launcher are not those of the one that is asked for.
    if any(Override.parse(override).name == "launcher" for override in overrides):
        first = not_about(first, "launcher")
    how, _ = _how(source, [*first, *overrides])
    check_places([axis.key for axis in folder.plan.axes], how.report)
    sys.path.append(folder.about["cwd"])
    if how.code not in folder.about["code"]:
        folder.about["code"].append(how.code)
        folder.write_about()
    return source, folder, how


def _how(source: ConfigSource, overrides: Sequence[str]) -> tuple[How, DictConfig]:
    """Of the overrides that are about the sweep itself. Raises ConfigError."""
    cfg = composed(source, overrides, with_hydra=True)
    drawn: Any = OmegaConf.to_container(cfg.report)
    return How(
        sweep=build_as(SweepSettings, cfg.sweep, "sweep"),
        report=build_report_settings(drawn, "report"),
        launcher=build(cfg.launcher, "launcher"),
        code=code_version(source.dirs),
    ), cfg


def _check(plan: Plan, source: ConfigSource, unbuildable: Unbuildable) -> None:
    """Build points that together have every value. Raises ConfigError, which says at which point."""
    checked = plan.checked()
    wanted = set(checked)
    points = [point for point in plan.points() if point.index in wanted]
    errors = []
    for task in tasks_of(points, source, [os.getcwd()], tables=False):
        try:
            task.config()
        except ConfigError as error:  # no such key or choice: that is no point
            raise ConfigError(f"{error} (at {task.point.name})") from error
        try:
            task.build()
        except ConfigError as error:
            errors.append(f"{error} (at {task.point.name})")
            if unbuildable is Unbuildable.refuse:
                skip = "sweep.unbuildable=skip goes on without such points"
                raise ConfigError(f"{errors[0]}; {skip}") from error
    if len(errors) == len(checked):
        raise ConfigError(errors[0])


def is_of_the_sweep(override: str) -> bool:
    return Override.parse(override).root in OF_THE_SWEEP
