"""Checks of user input: numbers in settings, and files.

The checks of settings classes test for finite numbers, because NaN passes a comparison like `value < 0`. Only
regular files are read, within a limit known in advance. A pipe may never send data, a device may never end,
and a small compressed table may hold gigabytes; of a table only the footer is read for the check. Every
reader of the project's commands opens its files here or in `sim.workload.trace_files`, which uses this
module.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any


def check_finite(name: str, value: float, *, unit: str = "", zero_allowed: bool = False) -> None:
    """Raises ValueError unless value is a finite number > 0, or >= 0 if zero_allowed."""
    if is_finite(value) and (value > 0 or (zero_allowed and value == 0)):
        return
    rule = f"must be a finite number {'>=' if zero_allowed else '>'} 0 {unit}".rstrip()
    raise ValueError(f"{name}={value}: {rule}")


def check_whole(name: str, value: int, *, remedy: str = "") -> None:
    """Raises ValueError, ending with the remedy, unless value is an integer >= 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name}={value}: must be a whole number >= 1{remedy}")


def check_curve(
    curve: Any, *, capabilities: Iterable[str] = (), zero_allowed: str = "", most_share: float = 1.0
) -> None:
    """Raises ValueError unless the parameters of a curve are finite and > 0, and its shares at most 1.

    curve: a dataclass. capabilities: allowed compute capabilities. zero_allowed: a field that may be 0.
    most_share: the largest value of a field that is a share.
    """
    for entry in fields(curve):
        name, value = entry.name, getattr(curve, entry.name)
        if name == "compute_capability":
            if value not in capabilities:
                raise ValueError(
                    f"compute_capability={value}: must be one of {', '.join(capabilities)}; "
                    "choose that of the most similar device"
                )
        elif not isinstance(value, bool):
            check_finite(name, value, zero_allowed=name == zero_allowed)
            if "_share" in name and value > most_share:
                raise ValueError(f"{name}={value}: must be a share, > 0 and <= 1")


def is_finite(value: object) -> bool:
    """Tests whether a value is a finite number; booleans and integers beyond a float's range are not."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: object) -> bool:
    """Tests whether a value is an integer; a boolean is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


MAX_BYTES = 1 << 30
"""Size of the largest text file that is read completely."""
LEAST_TABLE_BYTES = 1 << 28
MAX_EXPANSION = 100
"""Allowed memory of a table above `LEAST_TABLE_BYTES`, as a multiple of its file size."""
TABLE_LIMIT = "WINDTUNNEL_MAX_TABLE_BYTES"
"""Environment variable that overrides the maximum memory of a Parquet table."""
NUMBER_BYTES, TEXT_BYTES = 8, 64
"""Memory of a value in a table: of a number, and of a Python object with a short text."""


class UnreadableFileError(ValueError):
    """A file that is not regular, or too large; the message does not name it."""


def open_regular(file: Path, max_bytes: int | None = None) -> IO[bytes]:
    """Opens a regular file without waiting for a writer. max_bytes: its maximum size; None: any.

    Raises OSError, and UnreadableFileError.
    """
    opened = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(opened)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(21, "is a folder", str(file))
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableFileError("must be a regular file, not a pipe, socket or device")
        if max_bytes is not None and found.st_size > max_bytes:
            raise UnreadableFileError(f"must have at most {max_bytes:,} bytes, has {found.st_size:,}")
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


def read_bytes(file: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the content of a file. Raises OSError, and UnreadableFileError, also if the file grows."""
    with open_regular(file, max_bytes) as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UnreadableFileError(f"must have at most {max_bytes:,} bytes, has more")
    return content


def read_text(file: Path, max_bytes: int = MAX_BYTES, *, errors: str = "strict") -> str:
    """Returns the text of a file in UTF-8, with line feeds as line ends.

    Raises as `read_bytes`, and UnicodeDecodeError.
    """
    text = read_bytes(file, max_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_table(file: Path) -> None:
    """Raises UnreadableFileError if a Parquet file is not regular, or expands to too much memory.

    Its footer states the number of values of its columns; repeated ones take no room in the file. Also raises
    OSError, and ValueError for a footer that cannot be read.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415  (0.1 s, and no other function of this module needs it)

    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        about = pq.read_metadata(opened)
    total = 0
    for i in range(about.num_row_groups):
        group = about.row_group(i)
        for k in range(group.num_columns):
            column = group.column(k)
            is_text = column.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
            total += column.num_values * (TEXT_BYTES if is_text else NUMBER_BYTES)
    given = os.environ.get(TABLE_LIMIT, "")
    limit = int(given) if given.isdecimal() else max(LEAST_TABLE_BYTES, MAX_EXPANSION * size)
    if total > limit:
        raise UnreadableFileError(
            f"its {about.num_rows:,} rows of {about.num_columns:,} columns would take {total:,} bytes of "
            f"memory, and may take {limit:,}; set the environment variable {TABLE_LIMIT} to a higher limit "
            "if it is sound"
        )
