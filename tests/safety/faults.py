"""Lets the n-th call that writes to a folder fail, as a full disk, a quota or a broken drive would."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CALLS = ("mkdir", "open", "write", "fsync", "rename", "close")


class Faults:
    """Counts the calls about files below `root`, and fails the one with number `fails_at`, counted from 1.

    A disk that is full stays full: with `stays`, all later calls of that kind fail as well.
    """

    def __init__(self, root: Path, fails_at: int, *, stays: bool = False) -> None:
        self.root = root.absolute()
        self.fails_at = fails_at
        self.stays = stays
        self.num_calls = 0
        self.failed = ""
        """The call that failed, and its file; empty so far."""

    def call(self, what: str, path: Any) -> None:
        """Counts a call. Raises OSError if it is the one that fails."""
        assert what in CALLS
        file = Path(os.fsdecode(path)).absolute()
        if not file.is_relative_to(self.root):
            return
        self.num_calls += 1
        again = self.stays and self.failed.startswith(f"{what} ")
        if self.num_calls == self.fails_at or again:
            self.failed = self.failed or f"{what} {file.relative_to(self.root)}"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class _Writer:
    """A file that is open for writing; its first two writes and its close are counted."""

    def __init__(self, opened: Any, path: Any, faults: Faults) -> None:
        self._opened, self._path, self._faults = opened, path, faults
        self._num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._opened)

    def write(self, content: Any) -> int:
        self._num_writes += 1
        if self._num_writes <= 2:
            self._faults.call("write", self._path)
        written: int = self._opened.write(content)
        return written

    def close(self) -> None:
        """Closes the file in any case, as the kernel does."""
        was_open = not self._opened.closed
        self._opened.close()
        if was_open:
            self._faults.call("close", self._path)


@contextmanager
def failing(root: Path, fails_at: int, *, stays: bool = False) -> Iterator[Faults]:
    """Patches what our code writes with: Path and open, os.fsync, os.replace and os.mkdir."""
    faults = Faults(root, fails_at, stays=stays)
    opens, replace, fsync, mkdir = io.open, os.replace, os.fsync, os.mkdir
    paths: dict[int, Any] = {}

    def open_file(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        is_path = isinstance(file, str | bytes | os.PathLike)
        if is_path and set(mode) & set("wax+"):
            faults.call("open", file)
        opened = opens(file, mode, *given, **named)
        if not is_path:
            return opened
        paths[opened.fileno()] = file
        return _Writer(opened, file, faults) if set(mode) & set("wax+") else opened

    def sync(number: int) -> None:
        faults.call("fsync", paths.get(number, "/"))
        fsync(number)

    def rename(source: Any, target: Any, **named: Any) -> None:
        faults.call("rename", target)
        replace(source, target, **named)

    def make(path: Any, *given: Any, **named: Any) -> None:
        if not os.path.isdir(path):
            faults.call("mkdir", path)
        mkdir(path, *given, **named)

    with (
        mock.patch("io.open", open_file),
        mock.patch("builtins.open", open_file),
        mock.patch("os.fsync", sync),
        mock.patch("os.replace", rename),
        mock.patch("os.mkdir", make),
    ):
        yield faults
