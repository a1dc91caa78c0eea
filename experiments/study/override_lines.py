"""Parses and checks lines of overrides in a study's settings, such as `mine: engine=vllm batching=static`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.app.settings.override import Override
from sim.settings.errors import ConfigError

OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""


class Line(NamedTuple):
    """A name and its overrides."""

    name: str
    overrides: tuple[str, ...]


def line_of(text: str) -> Line:
    """Parses overrides separated by spaces, with their name before a colon; else the line is its name."""
    name, colon, overrides = text.partition(":")
    if colon and "=" not in name:
        return Line(name.strip(), split(overrides))
    return Line(text, split(text))


def by_name(lines: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the overrides by name; of equal names, the last one wins."""
    return dict(map(line_of, lines))


def split(text: str) -> tuple[str, ...]:
    """Splits a line at spaces outside of quotes and brackets."""
    words, word, depth, quote = [], "", 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in QUOTES:
            quote = char
        elif char in OPENING:
            depth += 1
        elif char in CLOSING:
            depth -= 1
        elif char.isspace() and depth <= 0:
            words.append(word)
            word = ""
            continue
        word += char
    return tuple(filter(None, [*words, word]))


def check_whole(name: str, overrides: Iterable[str], rule: str = "must be key=value") -> None:
    """Raises ValueError for a text that is not key=value. name: the setting that holds it."""
    words = list(overrides)
    whole = [Override.parse(text).is_whole for text in words]
    if all(whole):
        return
    first = words[whole.index(False)]
    num_named = whole.index(True) if True in whole else 0
    if len(words) > 1 and num_named and all(whole[num_named:]):
        label, rest = " ".join(words[:num_named]), " ".join(words[num_named:])
        rule = f"a name must end with a colon; write '{label}: {rest}'"
        first = " ".join(words)
    raise ValueError(f"{name}={first}: {rule}")


def check_line(name: str, overrides: Iterable[str]) -> None:
    """Raises ValueError for a text in a line of overrides that is not key=value."""
    check_whole(name, overrides, "must be key=value pairs separated by spaces")


def check_reserved(name: str, overrides: Iterable[str], reserved: Mapping[str, str]) -> None:
    """Raises ValueError for an override of a reserved root key; `reserved` maps keys to reasons."""
    for text in overrides:
        override = Override.parse(text)
        if override.root in reserved:
            raise ValueError(f"{name}={override.name}: must not be set here; {reserved[override.root]}")


def check_base(overrides: Iterable[str], reserved: Mapping[str, str]) -> None:
    """Raises ConfigError for an override of the command line that sets a reserved root key."""
    for override in map(Override.parse, overrides):
        if override.root in reserved:
            raise ConfigError(f"{override.text}: must not be set here; {reserved[override.root]}")


def check_lines(name: str, lines: Sequence[str], reserved: Mapping[str, str]) -> None:
    """Raises ValueError unless the lines have different names and override no reserved key."""
    overrides = by_name(lines)
    if len(overrides) < len(lines):
        raise ValueError(f"{name}={list(lines)}: must have different names")
    for i, own in enumerate(overrides.values()):
        check_line(f"{name}[{i}]", own)
        check_reserved(f"{name}[{i}]", own, reserved)
