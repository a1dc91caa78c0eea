"""Flags with secrets: their values become environment variables, so that no file of a run has them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sim.settings.errors import ConfigError


def without_secrets(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns the words without secret flags, the values of which it puts into the environment.

    variables: environment variable of each flag. Both `--flag VALUE` and `--flag=VALUE` are read. Raises
    ConfigError for a flag without a value.
    """
    kept, rest = [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in variables:
            kept.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value:
            raise ConfigError(f"{flag}: needs a value, as in {flag}=VALUE; or set {variables[flag]}")
        os.environ[variables[flag]] = value
    return kept
