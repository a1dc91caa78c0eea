"""Overrides in the settings of a study: lines such as `mine: engine=vllm batching=static`, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sim.settings.override import Override

OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""


class Line(NamedTuple):
    """Several overrides, and what they are called."""

    name: str
    overrides: tuple[str, ...]


def line_of(text: str) -> Line:
    """Overrides separated by spaces, by name; without a name before a colon a line is its own name."""
    name, colon, overrides = text.partition(":")
    if colon and "=" not in name:
        return Line(name.strip(), split(overrides))
    return Line(text, split(text))


def by_name(lines: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Name -> overrides. Equal names: the last one wins."""
    return dict(map(line_of, lines))


def split(text: str) -> tuple[str, ...]:
    """The words of a line; blanks inside of quotes and brackets do not part them."""
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
    """Raise ValueError for what is no override. name: of the setting that holds them."""
    for text in overrides:
        if not Override.parse(text).is_whole:
            raise ValueError(f"{name}={text}: {rule}")


def check_line(name: str, overrides: Iterable[str]) -> None:
    """The same for the overrides of a line."""
    check_whole(name, overrides, "must be key=value pairs separated by spaces")


def check_reserved(name: str, overrides: Iterable[str], reserved: Mapping[str, str]) -> None:
    """Raise ValueError for an override of a key of the root that is reserved: key -> why."""
    for text in overrides:
        override = Override.parse(text)
        if override.root in reserved:
            raise ValueError(f"{name}={override.name}: must not be set here; {reserved[override.root]}")


def check_lines(name: str, lines: Sequence[str], reserved: Mapping[str, str]) -> None:
    """Raise ValueError unless the lines have different names and hold overrides of no reserved key."""
    overrides = by_name(lines)
    if len(overrides) < len(lines):
        raise ValueError(f"{name}={list(lines)}: must have different names")
    for i, own in enumerate(overrides.values()):
        check_line(f"{name}[{i}]", own)
        check_reserved(f"{name}[{i}]", own, reserved)
