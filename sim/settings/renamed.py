"""Renamed settings and groups: their old names are accepted for one version, with a note."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache

NEW_NAMES = {"handover": "kv_transfer", "troubles": "failures"}
"""Old name -> new name of keys of the root and of groups."""

_OLD_KEY = re.compile(rf"(?P<prefix>[+~]*)(?P<old>{'|'.join(NEW_NAMES)})(?=[./@=]|$)")


def with_new_names(overrides: Iterable[str]) -> list[str]:
    """Replaces old names in the overrides by new ones; prints one note per old name on stderr."""
    return [_OLD_KEY.sub(_replacement, text, count=1) if _OLD_KEY.match(text) else text for text in overrides]


def _replacement(found: re.Match[str]) -> str:
    old = found["old"]
    _note(old)
    return f"{found['prefix']}{NEW_NAMES[old]}"


@cache
def _note(old: str) -> None:
    """Prints the note once per process."""
    print(
        f"windtunnel: {old} is now called {NEW_NAMES[old]}; the old name is accepted for one more version.",
        file=sys.stderr,
    )
