"""Reads the config folders: groups, their choices, and the comments in their YAML files.

Reads files directly, so that `list`, shell completion and error messages need not start Hydra.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from policies.user_code import cause_of
from sim.settings.errors import ConfigError, suggest

CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"

GROUP_OF = {"decode_routing": "routing"}
"""Keys with choices from a group of another name: routing@decode_routing=power_of_two."""

_TARGET = re.compile(r"^_target_:\s*([\w.]+)", re.MULTILINE)
_KEY_LINE = re.compile(r"(?P<indent> *)(?P<key>\w+):.*?(?:\s#\s*(?P<comment>.*))?$")


class Choice(NamedTuple):
    """One YAML file of a group."""

    name: str
    file: Path

    @property
    def description(self) -> str:
        """First comment line of the file."""
        return first_comment(self.file)


def config_dirs(user_dir: Path | None, own_dir: Path = CONFIG_DIR) -> list[Path]:
    """Returns the folders with choices: windtunnel's own and, if given, the user's. Raises ConfigError."""
    if user_dir is None:
        return [own_dir]
    if not user_dir.is_dir():
        raise ConfigError(f"--config-dir={user_dir}: no such folder")
    return [own_dir, user_dir.resolve()]


def find_groups(dirs: Sequence[Path]) -> dict[str, list[Choice]]:
    """Returns every group (`workload`, `workload/arrivals`) with its choices, both sorted by name.

    The folder `hydra`, with Hydra's own settings, is not a group. If two folders have the same choice, the
    first one is used, as in Hydra.
    """
    found: dict[str, dict[str, Choice]] = {}
    for config_dir in dirs:
        for group, choices in _choices_by_group(config_dir):
            for choice in choices:
                found.setdefault(group, {}).setdefault(choice.name, choice)
    return {group: [by_name[name] for name in sorted(by_name)] for group, by_name in sorted(found.items())}


def check_choice(key: str, value: str, group: str, groups: Mapping[str, Sequence[Choice]]) -> None:
    """Raises ConfigError unless a group has a choice of that name. key: where it is chosen."""
    choices = [choice.name for choice in groups[group]]
    if value not in choices:
        raise ConfigError(
            f"{key}={value}: no such choice; {suggest(value, choices, listed_by=f'windtunnel list {group}')}"
        )


def with_choice(error: ConfigError, dirs: Sequence[Path]) -> ConfigError:
    """Returns the error with the policy named by its choice in the config folders, not by its class."""
    found = cause_of(error)
    if found is None or found.named is None:
        return error
    key, name, path = found.named
    family = key.rpartition(".")[2]
    for choice in find_groups(dirs).get(GROUP_OF.get(family, family), ()):
        target = _TARGET.search(choice.file.read_text(encoding="utf-8", errors="replace"))
        if choice.name != name and target is not None and target[1] == path:
            renamed = str(error).replace(f"{key}={name} ", f"{key}={choice.name} ")
            error.args = (renamed, *error.args[1:])
            return error
    return error


def first_comment(file: Path) -> str:
    """Returns the first comment line of a YAML file that is not a Hydra directive, or an empty text."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            return ""
        text = line.lstrip("# ").strip()
        if text and not text.startswith("@package"):
            return text
    return ""


def key_comments(file: Path, prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> the comment after the key in a YAML file (empty if there is none).

    Reads block style only, as our config files are written; lists are skipped.
    """
    comments: dict[str, str] = {}
    parents: list[tuple[int, str]] = [(-1, prefix)] if prefix else []
    for line in file.read_text(encoding="utf-8").splitlines():
        match = _KEY_LINE.match(line)
        if not match:
            continue
        indent = len(match["indent"])
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, match["key"]))
        comments[".".join(name for _, name in parents)] = (match["comment"] or "").strip()
    return comments


def _choices_by_group(config_dir: Path) -> Iterator[tuple[str, list[Choice]]]:
    """Yields the groups of a folder; `Path.glob` takes three times as long."""
    _, tops, _ = next(os.walk(config_dir), ("", [], []))
    for top in tops:
        for folder, _, files in os.walk(config_dir / top) if top != "hydra" else ():
            names = [name.removesuffix(".yaml") for name in files if name.endswith(".yaml")]
            if config_dir != CONFIG_DIR:  # a user's folder may hold pipes and links to devices
                names = [name for name in names if Path(folder, f"{name}.yaml").is_file()]
            group = Path(folder).relative_to(config_dir).as_posix()
            yield group, [Choice(name, Path(folder, f"{name}.yaml")) for name in names]
