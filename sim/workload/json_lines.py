"""Reads files with one JSON object per line, and checks the values of its keys.

Every error has file, line and column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from sim.workload.trace_files import lines_of, shown
from sim.workload.values import is_tokens, tokens_rule, whole_number


class Rule(NamedTuple):
    """Rule for the value of a key, its text for messages, and how a sound value is read."""

    is_sound: Callable[[Any], bool]
    text: str
    read: Callable[[Any], Any] | None = None


class Line(NamedTuple):
    """A line of a file, and the JSON object in it."""

    path: Path
    number: int
    text: str
    row: dict[str, Any]

    def check(self, rules: Mapping[str, Rule], row: dict[str, Any] | None = None) -> None:
        """Raises ValueError for the first key that is missing or breaks its rule; reads the others in place.

        row: an object inside that of the line; None: the object of the line.
        """
        found = self.row if row is None else row
        for key, (is_sound, rule, read) in rules.items():
            if key not in found:
                raise ValueError(
                    f"{self.path}:{self.number}:1: no key {key}; expected {', '.join(rules)}, "
                    f"found {shown(', '.join(found), 200)}"
                )
            if not is_sound(found[key]):
                raise self.bad(key, rule, found[key])
            if read is not None:
                found[key] = read(found[key])

    def bad(self, key: str, rule: str, found: object) -> ValueError:
        """Returns the error of a value; its column is that of the key."""
        column = self.text.index(f'"{key}"') + 1 if f'"{key}"' in self.text else 1
        return ValueError(f"{self.path}:{self.number}:{column}: {key}: expected {rule}, found {shown(found)}")


def objects_of(path: Path, wanted: Iterable[str], num_lines: int = 0) -> Iterator[Line]:
    """Yields the objects of a file. Raises ValueError.

    wanted: names of the keys, for an empty file. num_lines: lines at the beginning that are left out.
    """
    number = num_lines
    for number, text in enumerate(islice(lines_of(path), num_lines, None), num_lines + 1):
        if text.isspace():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{number}:{error.colno}: expected one JSON object per line: {error.msg}"
            ) from None
        except RecursionError:
            raise ValueError(f"{path}:{number}:1: nests values too deeply to be read") from None
        except ValueError as error:  # an integer of thousands of digits
            raise ValueError(f"{path}:{number}:1: expected one JSON object per line: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}:1: expected a JSON object, found {shown(text.strip())}")
        yield Line(path, number, text, row)
    if not number:
        raise ValueError(f"{path}:1:1: expected JSON lines with {', '.join(wanted)}, found an empty file")


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def keys_of(path: Path) -> dict[str, None]:
    """Returns the keys in the first lines of a file, in their order."""
    return dict.fromkeys(key for line in islice(objects_of(path, ()), NAMED_LINES) for key in line.row)


NAMED_LINES = 100
COUNT = Rule(is_tokens, tokens_rule(1), whole_number)
TOKENS = Rule(partial(is_tokens, least=0), tokens_rule(0), whole_number)
IDS = Rule(_is_list_of_ids, "a list of whole numbers")
TEXT = Rule(lambda value: isinstance(value, str) and bool(value), "a text")
NUMBER = Rule(lambda value: type(value) in (int, float), "a number")
"""A number of any size; the clock of a trace checks its range."""
