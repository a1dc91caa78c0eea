"""The flag --from of commands that simulate: settings from the command line of an engine's server."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.app.launch_lines.commands import command_in
from experiments.app.launch_lines.engines import translated
from experiments.app.launch_lines.translation import Translation
from sim.settings.config_groups import config_dirs
from sim.settings.errors import ConfigError
from sim.settings.override import Override
from sim.settings.renamed import with_new_names

FLAG = "--from"
COMMANDS = ("simulate", "goodput", "capacity", "whatif", "roofline", "sweep", "dashboard", "serve")
"""Commands that take the flag: their settings of an engine are at the root."""
LIST_OF_CAPACITY = {
    "tensor_parallel_size": "capacity.tensor_parallel_sizes",
    "pipeline_parallel_size": "capacity.pipeline_parallel_sizes",
}
"""Setting that `capacity` tries several values of -> the list of them."""


def with_launch_line(words: Sequence[str], command: str) -> list[str]:
    """Replaces --from TEXT by the settings that the text means; prints them. Raises ConfigError.

    Settings that are given beside it win.
    """
    given, rest = _given(words)
    if given is None:
        return list(words)
    if command not in COMMANDS:
        raise ConfigError(f"{FLAG}: {command} does not take it; it is for {', '.join(COMMANDS)}")
    dirs = config_dirs(_config_dir(rest))
    beside = with_new_names([word for word in rest if _is_override(word)], dirs)
    found = translated(command_in(given), dirs, beside)
    if command == "capacity":
        for key, several in LIST_OF_CAPACITY.items():
            if key in found.settings:
                found.put(several, f"[{found.settings.pop(key)}]")
        for key in ("replicas", "routing"):
            found.settings.pop(key, None)
    overrides = [text for text in found.overrides if not _wins(text, beside)]
    _tell(found, overrides)
    return [*overrides, *rest]


def _given(words: Sequence[str]) -> tuple[str | None, list[str]]:
    given, kept, rest = None, [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != FLAG:
            kept.append(word)
            continue
        if given is not None:
            raise ConfigError(f"{FLAG}: is given twice; leave one out")
        given = value if equals else next(rest, "")
        if not given.strip():
            raise ConfigError(f"{FLAG}: needs a command line in quotation marks, or a file with one")
    return given, kept


def _config_dir(words: Sequence[str]) -> Path | None:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config-dir":
            return Path(value if equals else words[i + 1]) if equals or i + 1 < len(words) else None
    return None


def _is_override(word: str) -> bool:
    return not word.startswith("-") and "=" in word


def _wins(text: str, beside: Sequence[str]) -> bool:
    """Returns whether a setting that is given beside the command replaces this one.

    A choice of a group replaces the settings of the choice that the command means.
    """
    own = Override.parse(text)
    for other in map(Override.parse, beside):
        if other.name == own.name:
            return True
        replaced = other.key.replace("/", ".")
        if (
            "." not in other.key
            and own.name.startswith(f"{replaced}.")
            and replaced not in ("engine", "model")
        ):
            return True
        if other.name == "model" and own.name.startswith("model.") and own.name != "model.kv_cache_dtype":
            return True
    return False


def _tell(found: Translation, overrides: Sequence[str]) -> None:
    """Prints what the command became, in a form that can be pasted, and what had no part in it."""
    print(f"windtunnel: --from: {shlex.join(overrides)}", file=sys.stderr)
    if found.without_effect:
        names = ", ".join(dict.fromkeys(found.without_effect))
        print(f"windtunnel: --from: without effect on time: {names}", file=sys.stderr)
    by_reason: dict[str, list[str]] = {}
    for flag, reason in found.unpriced:
        by_reason.setdefault(reason, []).append(flag)
    if by_reason:
        text = "; ".join(f"{', '.join(flags)} ({reason})" for reason, flags in by_reason.items())
        print(f"windtunnel: --from: not simulated: {text}", file=sys.stderr)
