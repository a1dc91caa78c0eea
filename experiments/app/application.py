"""Running a Hydra application so that every mistake in the settings is found before anything runs.

An application is a module with `main`, a `@hydra.main` function, and `check(cfg, composition)`, which builds
everything from a config and throws it away: it raises ConfigError if something cannot be built. `launch`
composes and checks every point of the run, then hands over to Hydra; an exception after that is a bug and
keeps its traceback.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from experiments.app.help import print_help
from sim.settings.compose import Composition, ConfigSource
from sim.settings.config_groups import CONFIG_DIR, config_dirs
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import COMPOSE_ERRORS, USER_ERRORS, composed, explain
from sim.settings.pools import forced


@dataclass(frozen=True, kw_only=True)
class Application:
    """A command that Hydra runs."""

    name: str  # of the command
    summary: str
    module: str  # with main() and check(cfg, composition)
    config_name: str
    config_dir: Path = CONFIG_DIR


def launch(application: Application, arguments: Sequence[str]) -> None:
    """Check the settings and run, once or (`--multirun`) for every combination. Raises ConfigError."""
    options = parser_of(application).parse_intermixed_args(arguments)
    source = ConfigSource(
        config_name=application.config_name, dirs=config_dirs(options.config_dir, application.config_dir)
    )
    if options.help:
        try:
            print_help(application.name, application.summary, source, options.overrides)
        except COMPOSE_ERRORS as error:
            raise explain(error, options.overrides, source) from error
        return
    # A user's own classes may lie in the current folder; last, so that they cannot shadow anything.
    sys.path.append(os.getcwd())
    module = importlib.import_module(application.module)
    if not (options.cfg or options.info):
        _check_points(source, options.overrides, options.multirun, module.check)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints a stack trace of its own and exits 1
    flags = [argument for argument in arguments if argument not in options.overrides]
    sys.argv = [sys.argv[0], *flags, *forced(options.overrides)]
    try:
        module.main()
    except USER_ERRORS as error:
        raise explain(error, options.overrides, source) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}; choose another hydra.run.dir") from error


def _check_points(
    source: ConfigSource,
    overrides: Sequence[str],
    multirun: bool,
    check: Callable[[DictConfig, Composition], object],
) -> None:
    """Compose and check each run's config; an error in a multirun says at which point."""
    try:
        points = source.points(overrides) if multirun else [list(overrides)]
    except COMPOSE_ERRORS as error:
        raise explain(error, overrides, source) from error
    for point in points or []:
        try:
            check(composed(source, point), Composition(source, point))
        except ConfigError as error:
            swept = [override for override in point if override not in overrides]
            where = f" (at {' '.join(swept)})" if swept else ""
            raise ConfigError(f"{error}{where}") from error


def parser_of(application: Application) -> argparse.ArgumentParser:
    """The part of Hydra's command line that we stand by; it is passed on as it was written."""
    parser = argparse.ArgumentParser(
        prog=f"windtunnel {application.name}",
        usage=f"windtunnel {application.name} [group=choice ...] [key=value ...] [--multirun] [--help]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "--info", choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    )
    return parser
