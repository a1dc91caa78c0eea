"""`windtunnel sweep`: every combination of several values, one run each, kept as they come."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.app.application import Application, parser_of
from experiments.app.help import print_help
from experiments.sweep.run import run_sweep
from experiments.sweep.setup import begun, resumed
from sim.settings.compose import ConfigSource
from sim.settings.errors import ConfigError, suggest
from sim.settings.hydra_errors import explained

APPLICATION = Application(
    name="sweep",
    summary="Every combination of several values of settings, one run each; resume=DIR goes on with one.",
    module="experiments.sweep.command",
    config_name="sweep",
)

FLAGS = """\
  key=a,b,c          one run for each combination of such values; also range(0,10,2), glob(*)
  resume=DIR         run what an earlier sweep lacks, the same points; beside it launcher, sweep, report only
  --config-dir DIR   a folder with your own configs, such as DIR/batching/mine.yaml
  -h, --help         this page, for the choices given beside it"""


def main(arguments: Sequence[str]) -> None:
    """Run what is asked, or what an earlier sweep lacks. Raises what `run_sweep` raises."""
    options = parser_of(APPLICATION).parse_intermixed_args(arguments)
    resume, overrides = _resume_of(options.overrides)
    if options.multirun:
        raise ConfigError("--multirun: a sweep takes several values without it")
    if options.cfg or options.info or options.resolve:
        raise ConfigError("--cfg, --info, --resolve: are for a single run; windtunnel simulate --cfg job")
    source = APPLICATION.source(options.config_dir)
    if options.help:
        _help(source, overrides)
        return
    sys.path.append(os.getcwd())
    if resume is None:
        source, folder, how = begun(source, overrides)
    else:
        source, folder, how = resumed(resume, overrides, options.config_dir)
    run_sweep(folder, how, source)


def _help(source: ConfigSource, overrides: Sequence[str]) -> None:
    with explained(source, overrides):
        alternatives = source.alternatives(overrides) or []
        print_help("sweep", APPLICATION.summary, source, [found[0] for found in alternatives if found], FLAGS)


def _resume_of(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    given = [override for override in overrides if override.startswith("resume=")]
    if not given:
        return None, list(overrides)
    if len(given) > 1 or given[0] == "resume=":
        raise ConfigError(f"{' '.join(given)}: must name one folder; {suggest('resume', ['resume=DIR'])}")
    return Path(given[0].removeprefix("resume=")), [o for o in overrides if o not in given]
