"""Sets up a sweep: a new one with checked points, or an earlier one to resume."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from experiments.app.run_folder import claim, file_errors_reported
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import config_dirs
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override, not_about
from experiments.study.code import code_version
from experiments.study.launchers.launcher import Launcher
from experiments.sweep.folder import SweepFolder
from experiments.sweep.grid import check_roles
from experiments.sweep.plan import OF_THE_SWEEP, Plan, plan_of
from experiments.sweep.run_task import tasks_of
from experiments.sweep.settings import ReportSettings, SweepSettings, Unbuildable, build_report_settings
from sim.settings.build import build, build_as, shown
from sim.settings.errors import ConfigError
from sim.settings.recorded import check_recorded

HARMLESS = ("hydra.run.", "hydra.sweep.", "hydra.output_subdir")
"""Recorded settings of Hydra that a resumed sweep does not read."""
LAUNCHED_HERE: dict[str, tuple[Any, ...]] = {
    "address": (None, "local", "auto"),
    "slurm_setup": ([],),
    "folder": (".submitit",),
}
"""Settings of launchers with the values that a recorded sweep may have; others decide where code runs."""


class SweepOptions(NamedTuple):
    """Settings of the sweep itself, apart from its runs."""

    sweep: SweepSettings
    report: ReportSettings
    launcher: Launcher
    code: str
    """Version of the code and configs that the runs depend on."""
    import_dirs: Sequence[str]
    """Folders added to the import path for a user's own classes."""
    recorded: str = ""
    """The setting that named the folder of the sweep, if it is not trusted; see `check_recorded`."""


def begun(
    source: ConfigSource, overrides: Sequence[str], *, overwrite: bool = False
) -> tuple[ConfigSource, SweepFolder, SweepOptions]:
    """Creates a new sweep after checking its points. overwrite: see `claim`."""
    plan = plan_of(overrides, source)
    sys.path.append(os.getcwd())  # so that the user's own classes are found
    sweep_options, cfg = _sweep_options(source, [o for o in overrides if is_of_the_sweep(o)], [os.getcwd()])
    check_roles([axis.key for axis in plan.axes], sweep_options.report)
    _check(plan, source, sweep_options.sweep.unbuildable)
    about = {
        "overrides": list(overrides),
        "config_dirs": [str(path) for path in source.dirs[1:]],
        "cwd": os.getcwd(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": [sweep_options.code],
    }
    with file_errors_reported(Path(cfg.hydra.run.dir)):
        path = claim(cfg, "run.dir", overwrite=overwrite)
    return source, SweepFolder.create(path, plan, about), sweep_options


def resumed(
    path: Path, overrides: Sequence[str], user_dir: Path | None, *, trust: bool = False
) -> tuple[ConfigSource, SweepFolder, SweepOptions]:
    """Opens an earlier sweep: the same points, possibly with another launcher.

    trust: whether the folder may name classes of the user, and bring config folders and Hydra settings.
    """
    for override in overrides:
        if not is_of_the_sweep(override):
            raise ConfigError(
                f"{override}: a resumed sweep has the same points; allowed with resume: "
                f"{', '.join(key for key in OF_THE_SWEEP if key != 'hydra')}"
            )
    folder = SweepFolder.open(path, "resume")
    where = f"resume={path}"
    if not trust:
        _check_untrusted(folder, where, user_dir)
    dirs = [*config_dirs(None), *map(Path, folder.about["config_dirs"])]
    source = ConfigSource(config_name="sweep", dirs=config_dirs(user_dir) if user_dir else dirs)
    first = [o for o in folder.about["overrides"] if is_of_the_sweep(o)]
    # The settings of the earlier launcher do not apply to another one.
    if any(Override.parse(override).name == "launcher" for override in overrides):
        first = not_about(first, "launcher")
    if trust:
        sys.path += [os.getcwd(), folder.about["cwd"]]
        sweep_options, _ = _sweep_options(source, [*first, *overrides], [os.getcwd(), folder.about["cwd"]])
    else:
        sweep_options, cfg = _sweep_options(source, [*first, *overrides], [], where)
        _check_recorded_launcher(cfg, overrides, where)
    check_roles([axis.key for axis in folder.plan.axes], sweep_options.report)
    folder.take()
    if sweep_options.code not in folder.about["code"]:
        folder.about["code"].append(sweep_options.code)
        folder.write_about()
    return source, folder, sweep_options


def _check_untrusted(folder: SweepFolder, where: str, user_dir: Path | None) -> None:
    """Raises ConfigError for a sweep whose folder asks for more than settings of windtunnel."""
    own = [*folder.about["overrides"], *itertools.chain(*folder.plan.alternatives)]
    for override in map(Override.parse, own):
        is_harmless = override.key.startswith(HARMLESS) or override.root != "hydra"
        if not is_harmless:
            raise ConfigError(f"{where}: was begun with {override.text}; add --trust if you trust the folder")
    if folder.about["config_dirs"] and not user_dir:
        dirs = " ".join(f"--config-dir {path}" for path in folder.about["config_dirs"])
        raise ConfigError(f"{where}: was begun with configs of your own; add {dirs} or --trust")


def _check_recorded_launcher(cfg: DictConfig, overrides: Sequence[str], where: str) -> None:
    """Raises ConfigError if the folder chooses a machine, shell lines or a folder of pickles for the runs.

    overrides: those of the user, which may choose them.
    """
    chosen = {Override.parse(override).name for override in overrides}
    recorded: Any = OmegaConf.to_container(cfg.launcher)
    for name, allowed in LAUNCHED_HERE.items():
        key, value = f"launcher.{name}", recorded.get(name, allowed[0])
        if value not in allowed and key not in chosen:
            raise ConfigError(
                f"{where}: was begun with {key}={shown(value)}; give it again, choose another launcher with "
                "launcher=local, or add --trust if you trust the folder"
            )


def _sweep_options(
    source: ConfigSource, overrides: Sequence[str], import_dirs: Sequence[str], recorded: str = ""
) -> tuple[SweepOptions, DictConfig]:
    """Builds the settings of the sweep itself from the overrides about them. Raises ConfigError."""
    cfg = composed(source, overrides, with_hydra=True)
    if recorded:
        check_recorded({"launcher": OmegaConf.to_container(cfg.launcher)}, recorded)
    own = resolved(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    return SweepOptions(
        sweep=build_as(SweepSettings, own["sweep"], "sweep"),
        report=build_report_settings(own["report"], "report"),
        launcher=build(own["launcher"], "launcher", Launcher),
        code=code_version(source.dirs),
        import_dirs=import_dirs,
        recorded=recorded,
    ), cfg


def _check(plan: Plan, source: ConfigSource, unbuildable: Unbuildable) -> None:
    """Builds points that together contain every value. Raises ConfigError, which names the point."""
    checked = plan.checked()
    wanted = set(checked)
    points = [point for point in plan.points() if point.index in wanted]
    errors = []
    for task in tasks_of(points, source, [os.getcwd()], tables=False):
        try:
            task.config()
        except ConfigError as error:  # a wrong key or choice is an error even with skip
            raise ConfigError(f"{error} (at {task.point.name})") from error
        try:
            task.build()
        except ConfigError as error:
            errors.append(f"{error} (at {task.point.name})")
            if unbuildable is Unbuildable.refuse:
                skip = "sweep.unbuildable=skip runs the sweep without such points"
                raise ConfigError(f"{errors[0]}; {skip}") from error
    if len(errors) == len(checked):
        raise ConfigError(errors[0])


def is_of_the_sweep(override: str) -> bool:
    """Tests whether an override sets the sweep itself, not its runs."""
    return Override.parse(override).root in OF_THE_SWEEP
