"""Configs that a file brings along: they are data, and may name only classes that are known to be harmless.

A run's or a sweep's folder may come from someone else. Building what it records would import and call
whatever its `_target_` keys name; so only classes of windtunnel and of installed plugins are allowed, unless
the user trusts the folder (`--trust`). A plugin is a distribution with entry points of the group
`windtunnel.plugins`; the modules that they name are allowed, with all that they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from sim.settings.build import TARGET, locate
from sim.settings.errors import ConfigError

OWN_PACKAGES = ("policies", "hwmodels", "sim", "kernels", "realengine", "experiments")
PLUGINS = "windtunnel.plugins"
_REFERENCE = re.compile(r"\$\{\w+(?:\.\w+)*\}")
"""An interpolation that stands for another value of the same config; others may read the environment."""


def check_recorded(config: Mapping[Any, Any], where: str) -> None:
    """Raises ConfigError for a recorded config that names classes of others, or reads more than itself.

    where: the setting that named the folder, with its value, for messages.
    """
    allowed = (*OWN_PACKAGES, *(found.module for found in entry_points(group=PLUGINS)))
    for key, value in _texts(config, ""):
        if key.rpartition(".")[2] == TARGET:
            if not _is_of(value, allowed) or not _is_of(_home(value, key), allowed):
                raise ConfigError(
                    f"{where}: its config asks for {key}={value}, which belongs neither to windtunnel nor to "
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
    """Yields every text of a config with its key; a `_target_` that is no text is one, too."""
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
