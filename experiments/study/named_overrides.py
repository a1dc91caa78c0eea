"""Lists of overrides in one line: `mine: engine=vllm batching=static`, with or without a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OPENING, CLOSING, QUOTES = "[{(", "]})", "'\""


def by_name(lines: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Name -> overrides, which have blanks between them; without a name, a line is called by what it says.

    Equal names: the last one wins.
    """
    found = {}
    for line in lines:
        name, colon, overrides = line.partition(":")
        is_named = colon and "=" not in name
        found[name.strip() if is_named else line] = split(overrides if is_named else line)
    return found


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


def check(name: str, overrides: Sequence[str], reserved: Mapping[str, str]) -> None:
    """Raise ValueError for what is no override, and for a key of the root that is reserved: key -> why."""
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ValueError(f"{name}={override}: must be key=value, several with a blank between")
        key = override.lstrip("+~").partition("=")[0]
        root = key.partition(".")[0].partition("/")[0]
        if root in reserved:
            raise ValueError(f"{name}={key}: must not be set here; {reserved[root]}")
