"""The Python interface of the studies: `from sim import study` takes the settings of their commands."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.api import override_text, texts_and_objects
from experiments.app.application import Application, prepared_run
from experiments.app.cli import COMMANDS
from experiments.app.settings.config_groups import config_dirs, find_groups
from experiments.app.settings.hydra_errors import USER_ERRORS, explained
from experiments.app.settings.override import Override, check_chosen_once
from experiments.app.settings.renamed import with_new_names
from experiments.study.override_lines import split
from experiments.study.study import Findings, StudyJob
from sim.settings.errors import ConfigError, suggest

ARMS = {"compare": "compare.arms", "goodput": "goodput.arms", "whatif": "whatif.changes"}
"""Name of a study -> its setting with arms of one's own."""
OTHERS = {
    "capacity": "has candidates in place of arms; set capacity.engines or others",
    "sweep": "combines values of settings in place of arms; write batching=chunked,static",
}
"""Other studies -> what they have in place of arms."""
STUDIES = (*ARMS, *OTHERS)
TAKE_OBJECTS = ("compare", "goodput")
"""Studies whose arms may have objects."""

Arm = str | Sequence[str] | Mapping[str, Any]


def study(
    name: str,
    *overrides: str,
    arms: Mapping[str, Arm] | None = None,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> Findings:
    """Runs a study and returns what it has found; a notebook shows it as the page of the command.

    name: of its command: compare, whatif, goodput, capacity or sweep. overrides: its settings as on the
    command line, `"workload.num_requests=500"`, and for a sweep `"batching=chunked,static"`. settings: the
    same as keywords; two underscores stand for a dot, `compare__seeds=[0, 1, 2]`.
    arms: what is compared, by name: overrides as one text, as a list of texts, or as a mapping of settings to
    values. In `compare` and `goodput` such a value may be an object that replaces a whole group, such as a
    policy of your own (`{"mine": {"batching": MyBatching()}}`); it must be possible to pickle it, unless
    jobs=1.
    config_dir: a folder with further choices, as `--config-dir`.

    The result has `table` (a frame with one row per run), `verdicts`, `caveats`, `figures`, `record` (the
    content of summary.json), and `write(folder)`, which writes the files of the command. After Ctrl-C it
    holds the runs that have ended (`is_whole` is false).

    Raises ConfigError for every mistake in the settings, before any run starts, and KeyboardInterrupt after
    Ctrl-C if no run has ended. Must not be called from several threads at once, because Hydra composes one
    config at a time per process.
    """
    if name not in STUDIES:
        raise ConfigError(f"study={name}: no such study; {suggest(name, STUDIES)}")
    user_dir = None if config_dir is None else Path(config_dir)
    dirs = config_dirs(user_dir)
    words, objects = texts_and_objects(settings, dirs)
    for key, value in objects.items():
        raise ConfigError(
            f"{key}={type(value).__name__}: an object belongs to an arm; write "
            f"arms={{'mine': {{'{key}': ...}}}}"
        )
    lines, of_arms = _arms(name, arms or {}, dirs)
    given = [*overrides, *words, *([override_text(ARMS[name], lines)] if lines else [])]
    return _found(name, with_new_names(given, dirs), user_dir, of_arms)


def _arms(
    name: str, arms: Mapping[str, Arm], dirs: Sequence[Path]
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Returns the arms as lines, `NAME: key=value ...`, and their objects by name. Raises ConfigError."""
    if not isinstance(arms, Mapping):
        raise ConfigError(
            "arms: must be a mapping of names to overrides, such as {'static': 'batching=static'}"
        )
    if arms and name not in ARMS:
        raise ConfigError(f"arms: {name} {OTHERS[name]}")
    lines, objects = [], {}
    for arm, own in arms.items():
        if not isinstance(arm, str) or set(arm) & {":", "="} or not arm or arm != " ".join(arm.split()):
            raise ConfigError(
                f"arms={arm!r}: the name of an arm must be a text without ':', '=' and spaces around it"
            )
        if not isinstance(own, str | Sequence | Mapping):
            raise ConfigError(f"arms.{arm}={own!r}: must be overrides: a text, a list of texts, or a mapping")
        if isinstance(own, Mapping):
            words, found = texts_and_objects(own, dirs)
            _check_objects(name, arm, found)
            objects[arm] = found
        else:
            words = list(split(own) if isinstance(own, str) else own)
        lines.append(f"{arm}: {' '.join(words)}")
    return lines, objects


def _check_objects(name: str, arm: str, objects: Mapping[str, Any]) -> None:
    """Raises ConfigError for objects that the arm of a study cannot have."""
    for key, value in objects.items():
        if name not in TAKE_OBJECTS:
            raise ConfigError(
                f"arms.{arm}: {key}={type(value).__name__}: {name} takes no objects; write a config for it"
            )
        if Override.parse(f"{key}=").root != key:
            raise ConfigError(
                f"arms.{arm}: {key}={type(value).__name__}: an object can only replace a key at the root"
            )


def _found(
    name: str, overrides: Sequence[str], user_dir: Path | None, objects: Mapping[str, Mapping[str, Any]]
) -> Findings:
    """Composes the config of a study, makes its runs and returns the findings."""
    application = _application(name, overrides)
    source = application.source(user_dir)
    check_chosen_once(overrides, find_groups(source.dirs))
    if name == "sweep":
        sweep: StudyJob = importlib.import_module("experiments.sweep.run").sweep_of(source, overrides)
        return sweep.find(Console(stderr=True))
    with explained(source, overrides, USER_ERRORS):
        _, job = prepared_run(source, overrides, application.module, objects)
    assert isinstance(job, StudyJob)
    return job.find(Console(stderr=True))


def _application(name: str, overrides: Sequence[str]) -> Application:
    """Returns the command of a study as an application."""
    if name == "compare":
        chosen: Application = importlib.import_module("experiments.compare.command").application_of(overrides)
        return chosen
    command = COMMANDS[name]
    assert command.config_name is not None
    return Application(
        name=name, summary=command.summary, module=command.module, config_name=command.config_name
    )
