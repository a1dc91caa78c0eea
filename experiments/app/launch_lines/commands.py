"""Finds the command that starts a server in a text or a file, without executing anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from experiments.app.launch_lines.deployment import servers_of, with_roles
from experiments.app.launch_lines.manifests import commands_of_manifest
from experiments.app.launch_lines.python_files import started
from experiments.app.launch_lines.shell import (
    ASSIGNMENT,
    Command,
    commands_of_script,
    commands_of_words,
    read_text,
    words_of,
)
from experiments.app.launch_lines.versions import version_in
from sim.settings.errors import ConfigError

FORMS = (
    "'vllm serve MODEL ...', 'python -m vllm.entrypoints.openai.api_server ...', "
    "'python -m sglang.launch_server ...', 'sglang serve ...' or 'trtllm-serve MODEL ...'"
)


def commands_in(given: str) -> list[Command]:
    """Returns the command in a text, or in the file of that name. Raises ConfigError.

    Several are returned only if they are the prefill and decode servers of one deployment.
    """
    given, variables = _before_a_file(given)
    path = _file(given)
    if path is None:
        text, found = given, list(commands_of_script(given, Path()))
        where = "--from"
    else:
        text = read_text(path)
        is_yaml = path.suffix in (".yaml", ".yml", ".json") or re.search(
            r"^\s*(apiVersion|services):", text, re.M
        )
        found = list(commands_of_manifest(text, path.parent)) if is_yaml else []
        if path.suffix == ".py":
            found = list(_from_python(text, path.parent, variables))
        if not found:  # a script, or YAML that quotes one
            found = list(commands_of_script(text, path.parent, variables))
        where = str(path)
    if not found:
        if path is None and not re.search(r"\s", given.strip()):
            raise ConfigError(f"--from {given}: no such file, and no command; give a file, or {FORMS}")
        raise ConfigError(f"{where}: has no command that starts a server; it must contain {FORMS}")
    found = [each for one in found for each in servers_of(one)]
    found = [each for each in found if not _is_a_further_node(each)] or found
    found = list({(each.engine, each.tokens, each.role): each for each in found}.values())
    if len(found) > 1:
        found = with_roles(found)
    if len({(each.engine, each.tokens) for each in found}) > 1 and found[0].role is None:
        shown = "; ".join(f"{each.engine}: {shlex.join(each.tokens)[:80]}" for each in found[:4])
        raise ConfigError(
            f"{where}: has {len(found)} commands that start a server; give one of them ({shown})"
        )
    if found[0].role is None:
        found = found[:1]
    version = version_in(found[0].engine, _without_comments(text))
    return [replace(each, version=version) for each in found]


def command_in(given: str) -> Command:
    """Returns the only command in a text or a file. Raises ConfigError, also for several."""
    found = commands_in(given)
    if len(found) > 1:
        raise ConfigError(
            f"--from: has {len(found)} commands, of prefill and decode servers; give one of them"
        )
    return found[0]


def _is_a_further_node(command: Command) -> bool:
    """Returns whether the command adds a node to the server that another command starts."""
    if "--headless" in command.tokens:
        return True
    ranks = re.findall(r"--node[-_]rank[= ](\d+)", " ".join(command.tokens))
    return any(int(rank) > 0 for rank in ranks)


def _without_comments(text: str) -> list[str]:
    return [line for line in text.split("\n") if not line.lstrip().startswith("#")]


def _before_a_file(given: str) -> tuple[str, dict[str, str]]:
    """Returns a file's name and the variables before it, as in `TP=8 bash bench.sh`; otherwise the text."""
    words, variables = words_of(given), {}
    while words and (found := ASSIGNMENT.match(words[0])) is not None and words[0] != found[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words and words[0] in ("bash", "sh", "source", "."):
        words.pop(0)
    if len(words) == 1 and _file(words[0]) is not None:
        return words[0], variables
    return given, {}


def _file(given: str) -> Path | None:
    """Returns the path if the text is the name of something that exists; a folder is refused on reading."""
    if "\n" in given or "\0" in given or len(given) > 4000:
        return None
    try:
        path = Path(given).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _from_python(text: str, folder: Path, variables: Mapping[str, str]) -> Iterator[Command]:
    """Yields the commands of a Python file, and the engines that it starts without a server."""
    for words, engine in started(text):
        if engine is None:
            yield from commands_of_words(words, variables, {}, folder)
        else:
            tokens = tuple(words)
            yield Command(engine=engine, tokens=tokens, environment=variables, folder=folder, is_offline=True)
