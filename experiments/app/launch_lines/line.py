"""The flag --from of commands that simulate: settings from the command line of an engine's server."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.app.launch_lines.commands import commands_in
from experiments.app.launch_lines.deployment import deployed
from experiments.app.launch_lines.lora import set_lora_of_batches
from experiments.app.launch_lines.translation import Translation
from experiments.app.settings.config_groups import config_dirs
from experiments.app.settings.override import Override
from experiments.app.settings.renamed import with_new_names
from sim.settings.errors import ConfigError

FLAG = "--from"
IGNORE = "--from-ignore"
COMMANDS = (
    "simulate",
    "goodput",
    "capacity",
    "whatif",
    "roofline",
    "sweep",
    "validate",
    "dashboard",
    "serve",
)
"""Commands that take the flag: their settings of an engine are at the root."""
ONE_KIND = ("capacity", "roofline")
"""Commands that take no pools."""
EVIDENT = re.compile("is about |names, |applies with |was removed|changes no time|sets defaults|$")
"""Reasons that need not be told."""
LIST_OF_CAPACITY = {
    "tensor_parallel_size": "capacity.tensor_parallel_sizes",
    "pipeline_parallel_size": "capacity.pipeline_parallel_sizes",
}
"""Setting that `capacity` tries several values of -> the list of them."""


def with_launch_line(words: Sequence[str], command: str) -> list[str]:
    """Replaces --from TEXT by the settings that the text means; prints them. Raises ConfigError.

    Settings that are given beside it win.
    """
    given, rest = _given(words, FLAG)
    ignored, rest = _given(rest, IGNORE)
    if given is None:
        if ignored is not None:
            raise ConfigError(f"{IGNORE}: is for {FLAG}, which is not given")
        return list(words)
    if command not in COMMANDS:
        raise ConfigError(f"{FLAG}: {command} does not take it; it is for {', '.join(COMMANDS)}")
    dirs = config_dirs(_config_dir(rest))
    beside = with_new_names([word for word in rest if _is_override(word)], dirs)
    names = [name for name in re.split(r"[,\s]+", ignored or "") if name]
    servers = commands_in(given)
    if len(servers) > 1 and command in ONE_KIND:
        raise ConfigError(
            f"{FLAG}: {command} takes one kind of server, and these are prefill and decode servers; give one "
            "of the commands"
        )
    found = deployed(servers, dirs, beside, names)
    if command == "capacity":
        for key, several in LIST_OF_CAPACITY.items():
            if key in found.settings:
                found.put(several, f"[{found.settings.pop(key)}]")
        for key in ("replicas", "routing"):
            found.settings.pop(key, None)
    if command == "roofline":
        set_lora_of_batches(found)
    overrides = [text for text in found.overrides if not _wins(text, beside)]
    _tell(found, overrides)
    return [*overrides, *rest]


NEEDS = {
    FLAG: "a command line in quotation marks, or a file with one",
    IGNORE: "the flags and variables of the command to leave out, with commas",
}


def _given(words: Sequence[str], flag: str) -> tuple[str | None, list[str]]:
    given, kept, rest = None, [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != flag:
            kept.append(word)
            continue
        if given is not None:
            raise ConfigError(f"{flag}: is given twice; leave one out")
        given = value if equals else next(rest, "")
        if not given.strip():
            raise ConfigError(f"{flag}: needs {NEEDS[flag]}")
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
    own = Override.parse(re.sub(r"^pools\.(prefill|decode)\.(?!replicas=)", "", text))
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
    by_reason: dict[str, list[str]] = {}
    for flag, reason in found.without_effect.items():
        by_reason.setdefault("" if EVIDENT.match(reason) else reason, []).append(flag)
    for reason, flags in sorted(by_reason.items()):
        told = f" ({reason})" if reason else ""
        print(f"windtunnel: --from: without effect on time: {', '.join(flags)}{told}", file=sys.stderr)
    if found.ignored:
        names = ", ".join(dict.fromkeys(found.ignored))
        print(f"windtunnel: --from: left out, as {IGNORE} says: {names}", file=sys.stderr)
