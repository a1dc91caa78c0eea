"""`windtunnel sweep`: every combination of several values, one run each, kept as they come."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from experiments.app.application import Application, parser_of
from experiments.app.help import print_help
from experiments.app.terminal import terminal_console
from experiments.study.launchers.outcome import CannotLaunchError, Launcher, Outcome
from experiments.sweep.code import code_version
from experiments.sweep.flight import Flight, Flown, flights, in_words
from experiments.sweep.folder import DONE, FAILED, REFUSED, SweepFolder
from experiments.sweep.grid import check_places
from experiments.sweep.plan import OF_THE_SWEEP, Plan, Point, plan_of
from experiments.sweep.progress import sweep_progress
from experiments.sweep.settings import ReportSettings, SweepSettings, Unbuildable, build_report_settings
from sim.engine.interrupt import Interrupt, ctrl_c_noted
from sim.settings.build import build, build_as
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import config_dirs
from sim.settings.errors import ConfigError, suggest
from sim.settings.hydra_errors import COMPOSE_ERRORS, check_edits, explain
from sim.settings.override import Override, not_about

APPLICATION = Application(
    name="sweep",
    summary="Every combination of several values of settings, one run each; resume=DIR goes on with one.",
    module="experiments.sweep.command",
    config_name="sweep",
)

FLAGS = """\
  key=a,b,c          one run for each combination of such values; also range(0,10,2), glob(*)
  resume=DIR         run what an earlier sweep lacks, the same points; beside it launcher, sweep, report only
  --config-dir DIR   a folder with choices of your own, such as DIR/batching/mine.yaml
  -h, --help         this page, for the choices given beside it"""


class How(NamedTuple):
    """Settings of the sweep itself."""

    sweep: SweepSettings
    report: ReportSettings
    launcher: Launcher


def main(arguments: Sequence[str]) -> None:
    """Run what is asked, or what an earlier sweep lacks. Raises ConfigError; exits 3 if runs failed."""
    options = parser_of(APPLICATION).parse_intermixed_args(arguments)
    resume, overrides = _resume_of(options.overrides)
    if options.multirun:
        raise ConfigError("--multirun: a sweep takes several values without it")
    if options.cfg or options.info or options.resolve:
        raise ConfigError("--cfg, --info, --resolve: are for a single run; windtunnel simulate --cfg job")
    source = ConfigSource(config_name="sweep", dirs=config_dirs(options.config_dir))
    if options.help:
        _help(source, overrides)
        return
    sys.path.append(os.getcwd())
    if resume is None:
        source, folder, how = _begun(source, overrides)
    else:
        source, folder, how = _resumed(resume, overrides, options.config_dir)
    _run(folder, how, source)


def _begun(source: ConfigSource, overrides: Sequence[str]) -> tuple[ConfigSource, SweepFolder, How]:
    """A new sweep, its points checked."""
    plan = plan_of(overrides, source)
    how, cfg = _how(source, [o for o in overrides if _is_of_the_sweep(o)])
    check_places([axis.key for axis in plan.axes], how.report)
    _check(plan, source, how.sweep.unbuildable)
    about = {
        "overrides": list(overrides),
        "config_dirs": [str(path) for path in source.dirs[1:]],
        "cwd": os.getcwd(),
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": [code_version(source.dirs)],
    }
    return source, SweepFolder.create(Path(cfg.hydra.run.dir), plan, about), how


def _resumed(
    path: Path, overrides: Sequence[str], user_dir: Path | None
) -> tuple[ConfigSource, SweepFolder, How]:
    """An earlier sweep: the same points, perhaps by another launcher."""
    for override in overrides:
        if not _is_of_the_sweep(override):
            raise ConfigError(
                f"{override}: a sweep that goes on has the same points; allowed beside resume: "
                f"{', '.join(key for key in OF_THE_SWEEP if key != 'hydra')}"
            )
    folder = SweepFolder.open(path, "resume")
    dirs = [*config_dirs(None), *map(Path, folder.about["config_dirs"])]
    source = ConfigSource(config_name="sweep", dirs=config_dirs(user_dir) if user_dir else dirs)
    first = [o for o in folder.about["overrides"] if _is_of_the_sweep(o)]
    # The settings of another launcher are not those of the one that is asked for.
    if any(Override.parse(override).name == "launcher" for override in overrides):
        first = not_about(first, "launcher")
    how, _ = _how(source, [*first, *overrides])
    check_places([axis.key for axis in folder.plan.axes], how.report)
    sys.path.append(folder.about["cwd"])
    code = code_version(source.dirs)
    if code not in folder.about["code"]:
        folder.about["code"].append(code)
        folder.write_about()
    return source, folder, how


def _how(source: ConfigSource, overrides: Sequence[str]) -> tuple[How, DictConfig]:
    """Of the overrides that are about the sweep itself. Raises ConfigError."""
    try:
        cfg = source.compose(overrides, with_hydra=True)
    except COMPOSE_ERRORS as error:
        raise explain(error, overrides, source) from error
    check_edits(cfg, overrides, source)
    drawn: Any = OmegaConf.to_container(cfg.report)
    return How(
        sweep=build_as(SweepSettings, cfg.sweep, "sweep"),
        report=build_report_settings(drawn, "report"),
        launcher=build(cfg.launcher, "launcher"),
    ), cfg


def _check(plan: Plan, source: ConfigSource, unbuildable: Unbuildable) -> None:
    """Build points that together have every value. Raises ConfigError, which says at which point."""
    checked = plan.checked()
    wanted = set(checked)
    points = [point for point in plan.points() if point.index in wanted]
    errors = []
    for flight in flights(points, source, [os.getcwd()], tables=False):
        try:
            flight.config()
        except ConfigError as error:  # no such key or choice: that is no point
            raise ConfigError(f"{error} (at {flight.point.name})") from error
        try:
            flight.build()
        except ConfigError as error:
            errors.append(f"{error} (at {flight.point.name})")
            if unbuildable is Unbuildable.refuse:
                skip = "sweep.unbuildable=skip goes on without such points"
                raise ConfigError(f"{errors[0]}; {skip}") from error
    if len(errors) == len(checked):
        raise ConfigError(errors[0])


def _run(folder: SweepFolder, how: How, source: ConfigSource) -> None:
    console = terminal_console()
    code = code_version(source.dirs)
    points = folder.missing()
    imports = [os.getcwd(), folder.about["cwd"]]
    tasks = flights(points, source, imports, tables=how.sweep.tables)
    already = folder.num_of(DONE)
    if already or len(folder.about["code"]) > 1:
        _tell_resumed(folder, already, len(points), console)
    for point in points:  # what had failed is run anew
        folder.rows.pop(point.index, None)
    begun = time.monotonic()
    total = folder.plan.num_points
    progress = sweep_progress(console, total, already, enabled=how.sweep.progress)
    shown = folder.path.relative_to(Path.cwd()) if folder.path.is_relative_to(Path.cwd()) else folder.path
    with ctrl_c_noted() as interrupt, progress as report:
        try:
            _collect(folder, how.launcher, tasks, points, interrupt, code, report)
        except CannotLaunchError as error:
            here = f"windtunnel sweep resume={shown} launcher=local"
            raise ConfigError(f"{error}; on this machine instead: {here}") from error
    seconds = time.monotonic() - begun
    folder.write_runs()
    num_done, num_failed = folder.num_of(DONE), folder.num_of(FAILED)
    _tell(folder, num_done - already, seconds, console)
    not_drawn = None
    if num_done:
        try:
            _draw(folder, how, console)
        except ConfigError as error:
            not_drawn = ConfigError(f"{error}; the runs are kept, draw them: windtunnel report sweep={shown}")
    if len(folder.rows) < total:
        console.print(
            f"{total - len(folder.rows):,} runs are left: windtunnel sweep resume={shown}",
            style="yellow",
            soft_wrap=True,
            highlight=False,
        )
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if not_drawn is not None:
        raise not_drawn
    if interrupt.noted or len(folder.rows) < total:
        raise KeyboardInterrupt
    if num_failed:
        sys.exit(3)


def _collect(
    folder: SweepFolder,
    launcher: Launcher,
    tasks: Sequence[Flight],
    points: Sequence[Point],
    interrupt: Interrupt,
    code: str,
    report: Any,
) -> None:
    """Keep what comes back, until all is done, Ctrl-C is pressed, or nothing more can be written."""
    outcomes = launcher.outcomes(Flight.fly, tasks, interrupt)
    try:
        for outcome in outcomes:
            if outcome.result is not None and outcome.result.interrupted:
                interrupt.noted = True  # a simulation itself notes Ctrl-C, and what it has is no result
                continue
            _keep(folder, points[outcome.index], outcome, code)
            folder.write_runs(now=False)
            report(folder.num_of(DONE), len(folder.rows) - folder.num_of(DONE))
    finally:
        outcomes.close()
        # What is done is in the table, whatever ends the sweep; on a full disk the one before it stays, and
        # the folders have all.
        with suppress(ConfigError):
            folder.write_runs()


def _keep(folder: SweepFolder, point: Point, outcome: Outcome[Flown], code: str) -> None:
    error = outcome.error
    if error is None:
        assert outcome.result is not None
        folder.keep(point, outcome.result, code)
        return
    status = REFUSED if type(error) is ConfigError else FAILED
    trace = "" if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
    folder.note_failure(point, status, in_words(error), trace, code)


def _tell_resumed(folder: SweepFolder, already: int, missing: int, console: Any) -> None:
    console.print(Text(f"{already:,} runs are done; {missing:,} are missing or failed."))
    if len(folder.about["code"]) > 1:
        console.print(
            Text(
                "  The code or a config has changed since: runs.parquet says which made a run (code).",
                style="yellow",
            )
        )


def _tell(folder: SweepFolder, num_new: int, seconds: float, console: Any) -> None:
    total, rate = folder.plan.num_points, num_new / seconds if seconds > 0 else 0.0
    parts = [f"{folder.num_of(DONE):,} of {total:,} runs done"]
    parts += [f"{count:,} {status}" for status in (FAILED, REFUSED) if (count := folder.num_of(status))]
    console.print(Text(f"{', '.join(parts)}; {num_new:,} in {seconds:.1f} s ({rate:.1f}/s)", style="bold"))
    messages: dict[str, list[dict[str, Any]]] = {}
    for row in folder.rows.values():
        if row["status"] != DONE:
            messages.setdefault(f"{row['status']}: {row['error']}", []).append(row)
    for message, rows in list(messages.items())[:5]:
        where = ", ".join(str(row["run"]) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        console.print(Text(f"  {message} (run {where})", style="yellow"), soft_wrap=True)
    if len(messages) > 5:
        console.print(Text(f"  and {len(messages) - 5} other reasons: the column error of runs.parquet"))


def _draw(folder: SweepFolder, how: How, console: Any) -> None:
    redrawn = importlib.import_module("experiments.sweep.page")  # plotly: only now
    found = redrawn.of_folder(folder, how.report)
    redrawn.print_found(found, console)
    if how.sweep.report:
        redrawn.write(found, folder, how.report)


def _help(source: ConfigSource, overrides: Sequence[str]) -> None:
    try:
        alternatives = source.alternatives(overrides) or []
        print_help("sweep", APPLICATION.summary, source, [found[0] for found in alternatives if found], FLAGS)
    except COMPOSE_ERRORS as error:
        raise explain(error, overrides, source) from error


def _is_of_the_sweep(override: str) -> bool:
    return Override.parse(override).root in OF_THE_SWEEP


def _resume_of(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    given = [override for override in overrides if override.startswith("resume=")]
    if not given:
        return None, list(overrides)
    if len(given) > 1 or given[0] == "resume=":
        raise ConfigError(f"{' '.join(given)}: must name one folder; {suggest('resume', ['resume=DIR'])}")
    return Path(given[0].removeprefix("resume=")), [o for o in overrides if o not in given]
