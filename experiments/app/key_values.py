"""`key=value` for the commands with a handful of settings, which Hydra does not compose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.settings.errors import ConfigError, suggest


def key_values(arguments: Iterable[str], allowed: Sequence[str]) -> dict[str, str]:
    """Values by key; of a key given twice, the last one. Raises ConfigError for any other argument."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in allowed:
            raise ConfigError(f"{key}: no such setting; {suggest(key, allowed)}")
        given[key] = value
    return given
