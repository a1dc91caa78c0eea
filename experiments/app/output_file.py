"""Check of an output file's path before a command runs, and the message if a file cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.app.job import CannotWriteError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_output_file(name: str, path: str) -> None:
    """Raises ValueError if the path is a folder, or if the folder of the file does not exist."""
    if Path(path).is_dir():
        raise ValueError(f"{name}={path}: is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{name}={path}: there is no folder {Path(path).resolve().parent}; create it first")


def check_distinct_files(**paths: str | None) -> None:
    """Raises ValueError if two of these settings name the same file, which one would overwrite."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        first = seen.setdefault(Path(path).resolve(), name)
        if first != name:
            raise ValueError(f"{name}={path}: is the file of {first}, which it would overwrite; name another")


@contextmanager
def file_errors_reported(place: Path, cure: str = "choose another hydra.run.dir") -> Iterator[None]:
    """Raises CannotWriteError in place of an OSError about a file or folder, what is in it, or what holds it.

    An OSError about any other file comes from a policy or from a bug, and keeps its traceback. cure: what the
    user can do apart from making room on a full disk.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or not _is_above_or_below(
            Path(error.filename).absolute(), place.absolute()
        ):
            raise
        advice = f"make room or {cure}" if error.errno in FULL else cure
        raise CannotWriteError(f"{error.filename}: {error.strerror}; {advice}") from error


def _is_above_or_below(path: Path, other: Path) -> bool:
    return path.is_relative_to(other) or other.is_relative_to(path)
