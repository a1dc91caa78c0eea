"""Parser of `key=value` arguments, for the commands with few settings, which Hydra does not compose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim.settings.errors import ConfigError, suggest


def key_values(arguments: Iterable[str], allowed: Sequence[str]) -> dict[str, str]:
    """Returns the values by key; if a key is given twice, the last value counts.

    Raises ConfigError for an argument without `=` and for a key that is not allowed.
    """
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in allowed:
            raise ConfigError(f"{key}: no such setting; {suggest(key, allowed)}")
        given[key] = value
    return given
