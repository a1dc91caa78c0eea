"""Reads JSON files of any size object by object: the elements of one list, or objects one after another."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.workload.trace_files import opened, shown

PIECE = 1 << 18
"""Bytes that are read at once; more while an element is longer."""
MAX_ELEMENT = 1 << 28
"""Characters from which an element is refused."""
CUT_SHORT = 16
"""An error so few characters before the end of the text read so far may be due to the cut."""

_DECODER = json.JSONDecoder()
_BLANKS = " \t\r\n"


def objects_in(path: Path, wanted: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a file with their numbers from 1.

    The file holds a list of objects, or objects with nothing, blanks or line ends between them. wanted: what
    the objects should be, for messages. Raises ValueError that names the element.
    """
    text = _Text(path)
    text.skip(_BLANKS)
    is_list = text.skip("[", at_most=1)
    number = 0
    while True:
        text.skip(_BLANKS + ("," if is_list and number else ""))
        if text.has_ended or (is_list and text.next == "]"):
            break
        number += 1
        found = text.value(number)
        if not isinstance(found, dict):
            raise ValueError(f"{path}: element {number}: expected {wanted}, found {shown(found)}")
        yield number, found
    if is_list and text.has_ended:
        raise ValueError(
            f"{path}: element {number + 1}: expected more elements or ], found the end of the file"
        )
    if not number:
        raise ValueError(f"{path}: expected {wanted}, found none")


class _Text:
    """The text of a file, of which only the part that is being read is in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = opened(path)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0
        self._is_read = False

    @property
    def has_ended(self) -> bool:
        while self._at == len(self._text) and not self._is_read:
            self._read_more(PIECE)
        return self._at == len(self._text)

    @property
    def next(self) -> str:
        return self._text[self._at]

    def skip(self, characters: str, at_most: int | None = None) -> int:
        """Skips characters of a set; returns their number."""
        count = 0
        while count != at_most and not self.has_ended and self.next in characters:
            self._at += 1
            count += 1
        return count

    def value(self, number: int) -> Any:
        """Returns the value that begins here."""
        size = PIECE
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                self._at = end
                return found
            except json.JSONDecodeError as error:
                length = len(self._text) - self._at
                may_be_cut = error.pos >= len(self._text) - CUT_SHORT or "Unterminated" in error.msg
                if self._is_read or not may_be_cut:
                    raise ValueError(
                        f"{self._path}: element {number}: expected JSON: {error.msg} after "
                        f"{error.pos - self._at:,} characters of it"
                    ) from None
                if length > MAX_ELEMENT:
                    raise ValueError(
                        f"{self._path}: element {number}: must have at most {MAX_ELEMENT:,} characters"
                    ) from None
            except RecursionError:
                raise ValueError(
                    f"{self._path}: element {number}: nests values too deeply to be read"
                ) from None
            except ValueError as error:  # an integer of thousands of digits
                raise ValueError(f"{self._path}: element {number}: {error}") from None
            self._read_more(size)
            size *= 2

    def _read_more(self, size: int) -> None:
        try:
            data = self._file.read(size)
            more = self._decode.decode(data, final=not data)
        except UnicodeDecodeError:
            raise ValueError(f"{self._path}: expected UTF-8 text, found other bytes") from None
        except (EOFError, OSError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self._path}: cannot be read: {error}") from None
        self._is_read = not data
        self._text, self._at = self._text[self._at :] + more, 0
