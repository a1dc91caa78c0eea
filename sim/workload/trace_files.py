"""Opens trace files: plain, gzip or zstd text by their suffix; damage is reported as file:line:column."""

from __future__ import annotations

import codecs
import difflib
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from hwmodels.checks import UnreadableFileError, open_regular

CHUNK = 1 << 11
"""Bytes of zstd data decompressed at once; the result is at most 32,768 times as large, 64 MiB."""
MAX_LINE = 1 << 22
"""Length in characters from which a line is rejected; a small compressed file may contain a huge line."""
LINE_FEED, RETURN = b"\n\r"
PIECE = 1 << 18
"""Bytes of text that are read as columns at once."""


class UnusualTextError(Exception):
    """Text that cannot be read as columns; reading it line by line gives its values, or the error in it."""


def require_file(path: Path, setting: str = "path") -> None:
    """Raises ValueError, with the most similar name in the same folder, unless `path` is a regular file.

    A pipe or a device may never end.
    """
    if path.is_file():
        return
    if path.is_dir():
        kind = "trace file" if setting == "path" else "file"
        raise ValueError(f"{setting}={path}: is a folder; name a {kind} in it")
    if path.exists():
        raise ValueError(f"{setting}={path}: must be a regular file, not a pipe, socket or device")
    if not path.parent.is_dir():
        raise ValueError(
            f"{setting}={path}: no such folder {path.parent}; the working directory is {Path.cwd()}"
        )
    names = sorted(p.name for p in path.parent.iterdir() if p.is_file())
    nearest = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"{len(names)} files in {path.parent.resolve()}"
    raise ValueError(f"{setting}={path}: no such file; {hint}")


def require_size(path: Path, max_bytes: int, setting: str = "path") -> None:
    """Raises ValueError if a file is too large."""
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{setting}={path}: must have at most {max_bytes:,} bytes, has {size:,}")


def lines_of(path: Path) -> Iterator[str]:
    """Yields the lines of a text file with their line ends; .gz and .zst files are decompressed.

    Raises ValueError with file and line if the compressed data end early or the text is not UTF-8.
    """
    line = 0
    try:
        with io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline="") as file:
            read_line = partial(file.readline, MAX_LINE)
            for line, text in enumerate(iter(read_line, ""), 1):
                if len(text) == MAX_LINE:
                    raise ValueError(f"{path}:{line}:1: a line must have less than {MAX_LINE:,} characters")
                yield text
    except UnicodeDecodeError:
        raise ValueError(f"{path}:{line + 1}:1: expected UTF-8 text, found other bytes") from None
    except gzip.BadGzipFile as error:
        if line:
            raise ValueError(f"{path}:{line + 1}:1: the gzip data are damaged: {error}") from None
        raise ValueError(
            f"{path}: is not gzip data, although its name ends with .gz; rename it if it is plain text"
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
        raise ValueError(f"{path}:{line + 1}:1: expected more compressed data, found: {error}") from None


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yields the same text in pieces of whole lines, which end with a line feed, without blank lines.

    Raises UnusualTextError where `lines_of` raises ValueError, for other line ends, blank lines, and a file
    without text.
    """
    rest, is_first = b"", True
    try:
        with opened(path) as file:
            while data := file.read(PIECE):
                data = rest + (data.removeprefix(codecs.BOM_UTF8) if is_first else data)
                is_first = False
                cut = data.rfind(b"\n") + 1
                if cut:
                    yield _checked(data[:cut])
                rest = data[cut:]
                if len(rest) >= MAX_LINE:
                    raise UnusualTextError
        if rest:
            yield _checked(rest + b"\n")
    except (EOFError, OSError, zlib.error):
        raise UnusualTextError from None
    if is_first:
        raise UnusualTextError


def _checked(piece: bytes) -> bytes:
    """Returns a piece of whole lines. Raises UnusualTextError.

    A search for two bytes at once takes ten times as long as these comparisons.
    """
    text = np.frombuffer(piece, np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(text == LINE_FEED)[:-1] + 1])  # [lines]
    is_plain = b"\0" not in piece and not np.isin(text[starts], (LINE_FEED, RETURN)).any()
    if b"\r" in piece:
        is_plain &= bool((text[np.flatnonzero(text == RETURN) + 1] == LINE_FEED).all())
    if not piece.isascii():
        try:
            piece.decode()
        except UnicodeDecodeError:
            is_plain = False
    if not is_plain:
        raise UnusualTextError
    return piece


def opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Opens a file as bytes, which are decompressed if its name ends with .gz or .zst."""
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=_regular(path))
    if path.suffix in (".zst", ".zstd"):
        return io.BufferedReader(_ZstdFile(path))
    return _regular(path)


def _regular(path: Path) -> io.BufferedReader:
    try:
        opened = open_regular(path)
    except UnreadableFileError as error:
        raise ValueError(f"{path}: {error}") from None
    assert isinstance(opened, io.BufferedReader)
    return opened


class _ZstdFile(io.RawIOBase):
    """A zstd file as decompressed bytes. zstandard's own reader does not detect a truncated file."""

    def __init__(self, path: Path):
        self._compressed = _regular(path)
        self._zstd = importlib.import_module("zstandard")  # a compiled package that only such files need
        self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._frame_started = False
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._text:
            data = self._frame.unused_data or self._compressed.read(CHUNK)
            if self._frame.eof:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
                self._frame_started = False
            if not data:
                if self._frame_started:
                    raise EOFError("the zstd frame ends early")
                return 0
            self._frame_started = True
            try:
                self._text = memoryview(self._frame.decompress(data))
            except self._zstd.ZstdError as error:
                raise OSError(str(error)) from error
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def close(self) -> None:
        self._compressed.close()
        super().close()
