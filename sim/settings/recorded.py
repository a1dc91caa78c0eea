"""Checks what is read from the folder of a run or a sweep: configs may only name trusted classes.

Such a folder may come from another user. Building its config imports and calls everything that its `_target_`
keys name, so only classes of windtunnel and of installed plugins are allowed, unless the user trusts the
folder (`--trust`). A plugin is a distribution with entry points of the group `windtunnel.plugins`; the
modules that these name are allowed, with all that they contain.

JSON files that are data, such as the summary of a run, are read there, too: damage is reported in one
sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hwmodels.checks import UnreadableFileError, read_text
from policies.user_code import PACKAGES
from sim.settings.build import TARGET, locate
from sim.settings.errors import ConfigError

PLUGINS = "windtunnel.plugins"
IMPORTED = "metrics.own["
"""Keys that name classes as plain texts begin like this."""
_REFERENCE = re.compile(r"\$\{\w+(?:\.\w+)*\}")
"""Matches an interpolation of another key of the same config; others may read the environment."""


def check_recorded(config: Mapping[Any, Any], where: str) -> None:
    """Raises ConfigError for a config that names other classes, or refers to more than its own keys.

    where: the setting that named the folder, with its value, for messages.
    """
    allowed = (*PACKAGES, *(found.module for found in entry_points(group=PLUGINS)))
    for key, value in _texts(config, ""):
        if key.rpartition(".")[2] == TARGET or key.startswith(IMPORTED):
            try:
                is_allowed = _is_of(value, allowed) and _is_of(_home(value, key), allowed)
            except ConfigError as error:
                raise ConfigError(
                    f"{where}: its config.yaml is damaged or of another version: {error}"
                ) from error
            if not is_allowed:
                raise ConfigError(
                    f"{where}: its config contains {key}={value}, which belongs neither to windtunnel nor to "
                    "an installed plugin; add --trust if you trust the folder and that code"
                )
        elif "${" in value and not _REFERENCE.fullmatch(value):
            raise ConfigError(
                f"{where}: its config contains {key}={value}; a recorded config may refer only to its own "
                "keys; add --trust if you trust the folder"
            )


def _home(path: str, key: str) -> str:
    """Returns the module in which the class or function with that path is defined."""
    return str(getattr(locate(path, key.rpartition(".")[0]), "__module__", ""))


def _is_of(path: str, modules: tuple[str, ...]) -> bool:
    """Returns whether a dotted path lies in one of the modules."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields every text of a config with its key; the value of a `_target_` is always yielded as text."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{key}.{name}" if key else str(name)
            if name == TARGET:
                yield inner, str(item)
            else:
                yield from _texts(item, inner)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _texts(item, f"{key}[{i}]")
    elif isinstance(value, str):
        yield key, value


def read_json_object(file: Path, where: str = "") -> dict[str, Any]:
    """Reads a file that holds one JSON object. where: the setting that named its folder, for messages.

    Raises ConfigError for a file that cannot be read, is empty or cut short, or holds something else.
    """
    name = f"{where}: {file.name}" if where else str(file)
    text = ""
    try:
        text = read_text(file)
        found = json.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except UnreadableFileError as error:
        raise ConfigError(f"{name}: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: must be UTF-8 text, byte {error.start} is not") from None
    except RecursionError:
        raise ConfigError(f"{name}: nests values too deeply to be read") from None
    except ValueError as error:
        what = "is empty" if not text else f"is damaged or cut short: {error}"
        raise ConfigError(f"{name}: {what}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: must hold one JSON object, holds a {type(found).__name__}")
    return found
