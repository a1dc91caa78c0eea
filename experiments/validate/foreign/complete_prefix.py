"""Reads truncated text files: their complete lines, or a JSON object's complete values."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from sim.workload.trace_files import PIECE, opened

MAX_BYTES = 1 << 30
"""Largest text of a result, decompressed; a million requests with their gaps have some."""
_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


class Prefix(NamedTuple):
    """Lines with their ends; is_cut: compressed data stopped early, or the last line has no end."""

    lines: list[str]
    is_cut: bool


def read_lines(path: Path) -> Prefix:
    """Reads all readable lines of a text file, also .gz and .zst. Raises ValueError if it is not UTF-8."""
    data, is_cut = _readable(path)
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=not is_cut)
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, found other bytes at {error.start}") from None
    lines = io.StringIO(text, newline="").readlines()
    return Prefix(lines, is_cut or bool(lines and not lines[-1].endswith("\n")))


def _readable(path: Path) -> tuple[bytes, bool]:
    """Returns the bytes of a file that can be read, and whether compressed data stop early.

    A result has its figures in one line, however long. Raises ValueError beyond `MAX_BYTES`.
    """
    pieces: list[bytes] = []
    size, is_cut = 0, False
    try:
        with opened(path) as file:
            while piece := file.read1(PIECE):  # a cut shows after what lies before it
                pieces.append(piece)
                size += len(piece)
                if size > MAX_BYTES:
                    raise ValueError(f"must have at most {MAX_BYTES:,} bytes of text")
    except gzip.BadGzipFile as error:
        if not size:
            raise ValueError(f"is not gzip data, although its name ends with .gz: {error}") from None
        is_cut = True
    except (EOFError, zlib.error):
        is_cut = True
    except OSError as error:
        if error.errno is not None:
            raise ValueError(f"cannot be read: {error.strerror}") from None
        is_cut = True  # of zstd
    return b"".join(pieces), is_cut


def complete_lines(prefix: Prefix) -> list[str]:
    """Returns the complete lines: the last line of a truncated file may be cut."""
    return [line for line in prefix.lines if line.endswith("\n")]


def read_object(text: str) -> tuple[dict[str, Any], bool]:
    """Returns the JSON object at the start of a text, and whether it is complete.

    Of a truncated object it returns the complete members, and of an unfinished list the complete elements.
    Raises ValueError if the text does not begin with an object, or is not JSON before its end.

    '{"a": 1, "b": [2, 3' gives {"a": 1, "b": [2]}: the 3 may have been a 35.
    """
    try:
        found, _ = _DECODER.raw_decode(text.lstrip())
    except json.JSONDecodeError:
        return _members(text), False
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")
    return found, True


def read_list(text: str) -> tuple[list[Any], bool]:
    """Returns the elements of the JSON list at the start of a text, and whether it is complete.

    Of a truncated list it returns the complete elements. Raises ValueError if the text begins with no list.
    """
    begin = _skip(text, 0)
    if not text.startswith("[", begin):
        raise ValueError("expected a JSON list")
    found, end = _elements(text, begin)
    return found, end is not None


def _members(text: str) -> dict[str, Any]:
    start = _skip(text, 0)
    if start >= len(text) or text[start] != "{":
        raise ValueError("expected a JSON object")
    found: dict[str, Any] = {}
    at: int | None = _skip(text, start + 1)
    while at is not None:
        key, behind = _value(text, at, ":")
        if behind is None or not isinstance(key, str):
            break
        begin = _skip(text, behind + 1)
        if begin < len(text) and text[begin] == "[":
            found[key], end = _elements(text, begin)
        else:
            value, end = _value(text, begin, ",}")
            if end is not None:
                found[key] = value
        at = _skip(text, end + 1) if end is not None and end < len(text) and text[end] == "," else None
    return found


def _elements(text: str, begin: int) -> tuple[list[Any], int | None]:
    """Returns the complete elements of the list at text[begin] and the position after it; None: no end."""
    found: list[Any] = []
    at = _skip(text, begin + 1)
    if at < len(text) and text[at] == "]":
        return found, _skip(text, at + 1)
    while True:
        value, behind = _value(text, at, ",]")
        if behind is None:
            return found, None
        found.append(value)
        if text[behind] == "]":
            return found, _skip(text, behind + 1)
        at = _skip(text, behind + 1)


def _value(text: str, at: int, followed_by: str) -> tuple[Any, int | None]:
    """Returns the value at text[at] and the position of the next token; None if the text ends before."""
    try:
        value, behind = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        return None, None
    behind = _skip(text, behind)
    return (value, behind) if behind < len(text) and text[behind] in followed_by else (None, None)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at
