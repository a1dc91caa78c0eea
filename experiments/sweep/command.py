"""`windtunnel sweep`: runs every combination of several values and keeps each run as it finishes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.app.application import Application, parser_of, print_help
from experiments.app.run_folder import overwrite_of
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.hydra_errors import explained
from experiments.app.settings.renamed import with_new_names
from experiments.sweep.run import run_sweep
from experiments.sweep.setup import begun, resumed
from sim.settings.errors import ConfigError, suggest

APPLICATION = Application(
    name="sweep",
    summary="Run every combination of several values of settings; resume=DIR continues a sweep.",
    module="experiments.sweep.command",
    config_name="sweep",
)

FLAGS = """\
  key=a,b,c          values to combine, one run per combination; also range(0,10,2), glob(*)
  resume=DIR         run the missing points of an earlier sweep; only launcher, sweep and report may be set
  overwrite=true     replace the results of an earlier run in the same folder; sweeps are never replaced
  --config-dir DIR   a folder with your own configs, such as DIR/batching/mine.yaml
  --trust            with resume=DIR: allow the folder to name classes and configs of your own
  -h, --help         print this page, for the choices given on the command line"""


def main(arguments: Sequence[str]) -> None:
    """Runs a new sweep, or the missing runs of an earlier one. Raises what `run_sweep` raises."""
    parser = parser_of(APPLICATION)
    parser.add_argument("--trust", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    overwrite, given = overwrite_of(options.overrides)
    resume, overrides = _resume_of(given)
    if options.multirun:
        raise ConfigError("--multirun: not needed, because a sweep always takes several values")
    if options.cfg or options.info or options.resolve:
        raise ConfigError("--cfg, --info, --resolve: apply to single runs; use windtunnel simulate --cfg job")
    source = APPLICATION.source(options.config_dir)
    overrides = with_new_names(overrides, source.dirs)
    if options.help:
        _help(source, overrides)
        return
    if resume is None:
        if options.trust:
            raise ConfigError("--trust: is for a folder that is continued; leave it out, or add resume=DIR")
        source, folder, sweep_options = begun(source, overrides, overwrite=overwrite)
    else:
        source, folder, sweep_options = resumed(resume, overrides, options.config_dir, trust=options.trust)
    try:
        run_sweep(folder, sweep_options, source)
    finally:
        folder.release()


def _help(source: ConfigSource, overrides: Sequence[str]) -> None:
    with explained(source, overrides):
        alternatives = source.alternatives(overrides) or []
        print_help("sweep", APPLICATION.summary, source, [found[0] for found in alternatives if found], FLAGS)


def _resume_of(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    given = [override for override in overrides if override.startswith("resume=")]
    if not given:
        return None, list(overrides)
    if len(given) > 1 or given[0] == "resume=":
        raise ConfigError(f"{' '.join(given)}: must be one folder; {suggest('resume', ['resume=DIR'])}")
    return Path(given[0].removeprefix("resume=")), [o for o in overrides if o not in given]
