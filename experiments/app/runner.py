"""Runner of every command: each point is composed once, all points are prepared, then they run.

Hydra itself runs the points if the config chooses a callback, or a launcher or sweeper other than the basic
ones. Each process that Hydra starts then prepares its own point.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.app.job import CannotWriteError, Job, Prepare, UnsuccessfulError, begin_collection
from experiments.app.run_folder import claim, file_errors_reported, set_folder
from experiments.app.settings.compose import Composition, ConfigSource
from experiments.app.settings.hydra_errors import check_edits, composed, explained
from experiments.app.settings.override import quoted
from experiments.app.settings.resolve import resolved
from sim.report.whole_file import write_whole
from sim.settings.errors import ConfigError

MULTIRUN = "hydra.mode=MULTIRUN"


class Point(NamedTuple):
    """One run."""

    cfg: DictConfig
    """The composed config, with the node `hydra`."""
    composition: Composition
    where: str
    """Overrides that identify the point in a multirun, for messages; empty for a single run."""


def run_command(
    source: ConfigSource,
    overrides: Sequence[str],
    module: str,
    *,
    multirun: bool,
    overwrite: bool = False,
) -> None:
    """Runs a command once, or once for each point of a multirun, in a folder that no other run has.

    `module` is the command's module, which defines `prepare`. overwrite: see `claim`. ConfigError for a wrong
    setting is raised before anything runs. If a point of a multirun fails while it runs, the other points
    still run, and its error is raised at the end.
    """
    if multirun or MULTIRUN in overrides:
        _run_multirun(source, [*(o for o in overrides if o != MULTIRUN), MULTIRUN], module, overwrite)
        return
    cfg, job = prepared_run(source, overrides, module)
    begin_collection()
    folder = _claimed(cfg, "run.dir", overwrite, continues=getattr(job, "continues", False))
    if cfg.hydra.callbacks:
        own = [*source.as_read(overrides), f"hydra.run.dir={quoted(str(folder))}"]
        source.command_line(own, HydraTask(source, module))
    else:
        _run(source, cfg, job)


def prepared_run(
    source: ConfigSource,
    overrides: Sequence[str],
    module: str,
    objects: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> tuple[DictConfig, Job]:
    """Composes the config of a single run; returns it and the job. Raises ConfigError for a wrong setting.

    module: of the command. objects: see `Composition`.
    """
    cfg = composed(source, [*overrides, "hydra.mode=RUN"], with_hydra=True)
    point = _point(source, cfg, "")
    return cfg, _prepared(point._replace(composition=point.composition._replace(objects=objects)), module)


def _run_multirun(source: ConfigSource, overrides: list[str], module: str, overwrite: bool) -> None:
    begin_collection()
    with explained(source, overrides):
        first = source.first_values(overrides)
    with explained(source, first):
        whole = source.compose_whole(first, overrides)
    _ = whole.hydra.sweep.dir  # read now, a time of day in it is the same in every point
    points = _points(source, whole)
    if points is None or not _is_basic(whole.hydra.launcher) or whole.hydra.callbacks:
        for point in points or ():
            _prepared(point, module)
        folder = _claimed(whole, "sweep.dir", overwrite)
        own = [*source.as_read(overrides), f"hydra.sweep.dir={quoted(str(folder))}", "--multirun"]
        source.command_line(own, HydraTask(source, module))
        return
    jobs = [_prepared(point, module) for point in points]
    folder = _claimed(whole, "sweep.dir", overwrite)
    for point in points:
        set_folder(point.cfg, "sweep.dir", folder)
    with file_errors_reported(folder):
        write_whole(folder / "multirun.yaml", OmegaConf.to_yaml(whole))
    errors: list[ConfigError] = []
    unsuccessful: list[str] = []
    while points:
        point, job = points.pop(0), jobs.pop(0)  # a finished job is dropped to free its memory
        try:
            _run(source, point.cfg, job)
        except ConfigError as error:
            errors.append(_located(error, point.where))
        except UnsuccessfulError as error:
            unsuccessful.append(str(error))
    if errors:
        raise errors[0]
    if unsuccessful:
        raise UnsuccessfulError("; ".join(filter(None, unsuccessful)))


def _claimed(cfg: DictConfig, key: str, overwrite: bool, *, continues: bool = False) -> Path:
    """Makes the folder of the results; see `claim`. Raises CannotWriteError where it cannot be made."""
    with file_errors_reported(Path(str(cfg.hydra[key.partition(".")[0]].dir))):
        return claim(cfg, key, overwrite=overwrite, continues=continues)


def _points(source: ConfigSource, whole: DictConfig) -> list[Point] | None:
    """Returns every point of a multirun, composed, or None if only the chosen sweeper of Hydra knows them."""
    if not _is_basic(whole.hydra.sweeper):
        return None
    params = whole.hydra.sweeper.params or {}
    of_hydra: Any = OmegaConf.to_container(whole.hydra.overrides.hydra, resolve=False)
    given = [*(f"{key}={value}" for key, value in params.items()), *_overrides_of(whole)]
    with explained(source, given):
        alternatives = source.points(given)
    points = []
    for number, words in enumerate(alternatives or ()):
        where = " ".join(word for word in words if word not in given)
        try:
            with explained(source, words):
                cfg = source.compose([*of_hydra, *words], with_hydra=True)
            OmegaConf.copy_cache(from_config=whole, to_config=cfg)
            check_edits(cfg, words, source)
        except ConfigError as error:
            raise _located(error, where) from error
        with open_dict(cfg):
            cfg.hydra.job.id, cfg.hydra.job.num = str(number), number
        points.append(_point(source, cfg, where))
    return None if alternatives is None else points


def _point(source: ConfigSource, cfg: DictConfig, where: str) -> Point:
    return Point(cfg, Composition(source, _overrides_of(cfg)), where)


def _overrides_of(cfg: Any) -> list[str]:
    """Returns the overrides that do not set Hydra's own keys, as the user wrote them."""
    found: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    return list(found)


def _prepared(point: Point, module: str) -> Job:
    """Returns the job of a point. Raises ConfigError, with the point's overrides in the message."""
    prepare: Prepare = importlib.import_module(module).prepare
    try:
        with _as_running(point.cfg) as cfg:
            return prepare(cfg, point.composition)
    except ConfigError as error:
        raise _located(error, point.where) from error


@contextmanager
def _as_running(cfg: DictConfig) -> Iterator[dict[str, Any]]:
    """Yields the config as its job gets it: plain, resolved as while it runs, without the node `hydra`."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(cfg)
    try:
        with read_write(cfg.hydra.runtime):
            parts = [str(OmegaConf.select(cfg, key)) for key in _folder_keys(cfg) if key]
            cfg.hydra.runtime.output_dir = str(Path(*parts).absolute())
        HydraConfig.instance().set_config(cfg)
        own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        OmegaConf.copy_cache(from_config=cfg, to_config=own)  # the same time of day as in the folder
        yield resolved(own)
    finally:
        HydraConfig.instance().cfg = before


def _run(source: ConfigSource, cfg: DictConfig, job: Job) -> None:
    """Runs a job as Hydra would, with the config's folder, working directory, environment and logging."""
    failures: list[ConfigError | UnsuccessfulError | CannotWriteError] = []

    def task(_: DictConfig) -> None:
        try:
            _in_its_folder(job)
        except (ConfigError, UnsuccessfulError, CannotWriteError) as error:
            failures.append(error)  # Hydra would print its own message as well

    unused: Any = None
    nothing: Any = Callback()
    context = HydraContext(config_loader=unused, callbacks=nothing)
    with file_errors_reported(Path(cfg.hydra.runtime.output_dir)):
        done = run_job(task, cfg, *_folder_keys(cfg), context)
    _ = done.return_value  # raises any other exception, which is a bug
    for error in failures:
        raise error


def _folder_keys(cfg: DictConfig) -> tuple[str, str | None]:
    """Returns the config keys of the folder of a run, and of the subfolder of a point in a multirun."""
    if cfg.hydra.mode == RunMode.MULTIRUN:
        return "hydra.sweep.dir", "hydra.sweep.subdir"
    return "hydra.run.dir", None


def _in_its_folder(job: Job) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    with file_errors_reported(folder):
        job.run(folder)


@dataclass(frozen=True)
class HydraTask:
    """Task function that Hydra calls for each point, possibly in another process or on another machine."""

    source: ConfigSource
    module: str

    def __call__(self, cfg: DictConfig) -> None:
        prepare: Prepare = importlib.import_module(self.module).prepare
        overrides = _overrides_of(HydraConfig.instance().cfg)
        self.source.complete(cfg, overrides)
        _in_its_folder(prepare(resolved(cfg), Composition(self.source, overrides)))


def _is_basic(plugin: DictConfig) -> bool:
    """Returns whether a node chooses Hydra's own launcher or sweeper."""
    return str(plugin["_target_"]).rpartition(".")[2] in ("BasicLauncher", "BasicSweeper")


def _located(error: ConfigError, where: str) -> ConfigError:
    if not where:
        return error
    located = ConfigError(f"{error} (at {where})")
    located.__cause__ = error  # it may know the line of the user's policy
    return located
