"""The command line of a command whose settings Hydra composes: its help, its config, and its runs.

The help (`windtunnel <command> --help`) has the groups, their choices, and every setting with its value and
meaning.

Each point of a multirun is composed once, all points are prepared, then they run. Hydra itself runs the
points if the config chooses a callback, or a launcher or sweeper other than the basic ones. Each process that
Hydra starts then prepares its own point.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
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
from experiments.app.run_folder import claim, file_errors_reported, overwrite_of, set_folder
from experiments.app.settings.compose import Composition, ConfigSource, resolved, without_hydra
from experiments.app.settings.config_groups import (
    CONFIG_DIR,
    Choice,
    config_dirs,
    find_groups,
    key_comments,
    with_choice,
)
from experiments.app.settings.hydra_errors import (
    COMPOSE_ERRORS,
    USER_ERRORS,
    check_edits,
    composed,
    explained,
)
from experiments.app.settings.override import check_chosen_once, quoted
from experiments.app.settings.renamed import with_new_names
from sim.report.files import write_whole, yaml_text
from sim.settings.build import shown
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Application:
    """A command whose settings Hydra composes."""

    name: str  # of the command
    summary: str
    module: str  # defines prepare(cfg, composition), see `experiments.app.job`
    config_name: str
    config_dir: Path = CONFIG_DIR
    names_setting: str | None = None  # gets the words that are no overrides as a list; None: they are errors

    def overrides(self, words: Sequence[str]) -> list[str]:
        """Returns the words as overrides: those that are names become one override of `names_setting`.

        Raises ConfigError for an empty name, and for names beside that setting.
        """
        if self.names_setting is None:
            return list(words)
        names = [word for word in words if "=" not in word and not word.startswith("~")]
        if "" in names:
            raise ConfigError("'': a name is empty; leave it out, or give a name")
        if names and any(word.startswith(f"{self.names_setting}=") for word in words):
            raise ConfigError(f"{names[0]}: give names as words or by {self.names_setting}=, not both")
        others = [word for word in words if word not in names]
        return [*others, f"{self.names_setting}=[{','.join(names)}]"] if names else others

    def source(self, user_dir: Path | None) -> ConfigSource:
        """Returns the root config and the config folders, the user's included.

        Raises ConfigError if `user_dir` is not a folder.
        """
        return ConfigSource(config_name=self.config_name, dirs=config_dirs(user_dir, self.config_dir))


def launch(application: Application, arguments: Sequence[str]) -> None:
    """Prints help, shows the config, or runs the command, as the arguments say.

    Raises ConfigError for a wrong setting, UnsuccessfulError for a run without success, and
    KeyboardInterrupt after Ctrl-C.
    """
    options = parser_of(application).parse_intermixed_args(arguments)
    _check_flags(options)
    overwrite, given = overwrite_of(application.overrides(options.overrides))
    source = application.source(options.config_dir)
    overrides = with_new_names(given, source.dirs)
    check_chosen_once(overrides, find_groups(source.dirs))
    if options.help:
        with explained(source, overrides):
            print_help(application.name, application.summary, source, overrides)
        return
    # A user's own classes may be in the current folder; it comes last, so that they shadow no other module.
    sys.path.append(os.getcwd())
    is_shown = options.cfg or options.info
    try:
        with explained(source, overrides, COMPOSE_ERRORS if is_shown else USER_ERRORS):
            if is_shown:
                _show(source, options, overrides)
            else:
                module, multirun = application.module, options.multirun
                folder = run_command(source, overrides, module, multirun=multirun, overwrite=overwrite)
                if options.open:
                    _open_page(folder)
    except ConfigError as error:
        raise with_choice(error, source.dirs)  # noqa: B904 (the same error)


def _show(source: ConfigSource, options: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the composed config (--cfg) or Hydra's information about it (--info)."""
    if options.info:
        source.command_line([*source.as_read(overrides), "--info", options.info], _nothing)
        return
    cfg = source.compose(overrides, with_hydra=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_readonly(cfg.hydra, None)
    if options.cfg == "job":
        cfg = without_hydra(cfg)
    elif options.cfg == "hydra":
        cfg = OmegaConf.masked_copy(cfg, ["hydra"])
        with open_dict(cfg.hydra):
            del cfg.hydra["help"], cfg.hydra["hydra_help"]
    if options.resolve:
        OmegaConf.resolve(cfg)
    print(OmegaConf.to_yaml(cfg), end="")


def _nothing(_: DictConfig) -> None:
    """Does nothing: the task of a command line that runs none."""


def parser_of(application: Application) -> argparse.ArgumentParser:
    """Returns the parser of the flags of Hydra that are supported, and of the overrides."""
    parser = argparse.ArgumentParser(
        prog=f"windtunnel {application.name}",
        usage=f"windtunnel {application.name} [group=choice ...] [key=value ...] [--multirun] [--help]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "--info", choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    )
    return parser


def _check_flags(options: argparse.Namespace) -> None:
    asked = [f"--{name}" for name in ("multirun", "open", "cfg", "info") if getattr(options, name)]
    if len(asked) > 1:
        raise ConfigError(f"{' '.join(asked)}: only one of them can be given; leave out {asked[0]}")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve: needs --cfg; add --cfg job, or leave out --resolve")


def _open_page(folder: Path) -> None:
    """Opens the page of a run in the browser; says so if there is none."""
    page = min(folder.glob("*.html"), default=None)
    if page is None:
        print("windtunnel: --open: the run has written no page", file=sys.stderr)
        return
    import webbrowser  # noqa: PLC0415 (few runs open their page)

    if not webbrowser.open(page.absolute().as_uri()):
        print(f"windtunnel: --open: no browser was found for {page}", file=sys.stderr)


MULTIRUN = "hydra.mode=MULTIRUN"


class Point(NamedTuple):
    """The settings of one run: that of the command, or one of a multirun."""

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
) -> Path:
    """Runs a command once, or once for each point of a multirun, in a folder of its own; returns the folder.

    `module` is the command's module, which defines `prepare`. overwrite: see `claim`. ConfigError for a wrong
    setting is raised before anything runs. If a point of a multirun fails while it runs, the other points
    still run, and its error is raised at the end.
    """
    if multirun or MULTIRUN in overrides:
        return _run_multirun(source, [*(o for o in overrides if o != MULTIRUN), MULTIRUN], module, overwrite)
    cfg, job = prepared_run(source, overrides, module)
    begin_collection()
    folder = _claimed(cfg, "run.dir", overwrite, continues=getattr(job, "continues", False))
    if cfg.hydra.callbacks:
        own = [*source.as_read(overrides), f"hydra.run.dir={quoted(str(folder))}"]
        source.command_line(own, HydraTask(source, module))
    else:
        _run(source, cfg, job)
    return folder


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


def _run_multirun(source: ConfigSource, overrides: list[str], module: str, overwrite: bool) -> Path:
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
        return folder
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
    return folder


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


WIDTH = 110

FLAGS = """\
  -m, --multirun     one run for each combination of comma-separated values
  overwrite=true     replace the results of an earlier run in the same folder
  --from LINE        settings of a server's command line, or of a file with one: "vllm serve MODEL -tp 4"
  --from-ignore A,B  flags of that command to leave out, which are refused otherwise
  --open             show the page of the results in the browser when the command has ended
  --config-dir DIR   a folder with your own configs, such as DIR/batching/mine.yaml
  --cfg job          print the composed config and exit (with --resolve, interpolations ${...} are filled in)
  --traceback        print the whole traceback of an error, for example in your own policy
  -h, --help         print this help, for the choices given on the command line"""


def print_help(
    command: str, summary: str, source: ConfigSource, overrides: Sequence[str], flags: str = FLAGS
) -> None:
    """Prints the help for the config with these overrides: each choice of a group has its own settings.

    Only groups that the config uses are listed. The settings of the root config come before those of groups.
    """
    cfg = source.compose(overrides, with_hydra=True)
    chosen = {key: name for key, name in cfg.hydra.runtime.choices.items() if "@" not in key}
    groups = {group: choices for group, choices in find_groups(source.dirs).items() if group in chosen}
    root = _root_comments(source.dirs[0] / f"{source.config_name}.yaml")
    comments = root | _group_comments(groups, chosen)
    print(f"usage: windtunnel {command} [group=choice ...] [key=value ...] [flags]\n\n{summary}\n\n{flags}\n")
    print("groups (* marks the current choice; `windtunnel list GROUP` describes the choices)")
    for group, choices in groups.items():
        print(_wrapped(group, [_marked(choice.name, chosen.get(group)) for choice in choices]))
    print("\nsettings")
    plain: Any = OmegaConf.to_container(cfg)
    for key, value in sorted(_settings(plain), key=lambda setting: setting[0] not in root):
        print(_line(f"{key}={value}", comments.get(key, "")))


def _root_comments(file: Path) -> dict[str, str]:
    """Returns dotted key -> comment of a root config and of the root configs that it extends."""
    loaded: Any = OmegaConf.to_container(OmegaConf.load(file))
    comments: dict[str, str] = {}
    for entry in loaded.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            comments |= _root_comments(file.with_name(f"{entry}.yaml"))
    return comments | key_comments(file)


def _group_comments(
    groups: Mapping[str, Sequence[Choice]], chosen: Mapping[str, str | None]
) -> dict[str, str]:
    comments: dict[str, str] = {}
    for group, choices in groups.items():
        for choice in choices:
            if choice.name == chosen.get(group):
                comments |= key_comments(choice.file, prefix=group.replace("/", "."))
    return comments


def _settings(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every leaf below the node as (dotted key, value as on the command line)."""
    for name, value in node.items():
        if name == "_target_" or (name == "hydra" and not prefix):
            continue
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            text = shown(value) if isinstance(value, list) else yaml_text([value]).strip().removeprefix("- ")
            yield f"{prefix}{name}", textwrap.shorten(text.replace("\n", " "), width=48, placeholder="...")


def _marked(name: str, chosen: str | None) -> str:
    return f"{name}*" if name == chosen else name


def _wrapped(title: str, words: Sequence[str]) -> str:
    indent = " " * 22
    text = textwrap.fill(
        " ".join(words), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return f"  {title:20}" + text[22:]


def _line(setting: str, comment: str) -> str:
    return f"  {setting:52}  {comment}".rstrip()
