"""Writes files atomically: a file gets its name only when it is complete, even if the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(file: Path, content: bytes | str) -> None:
    """Writes a file; readers see either the old or the complete new content. Text is written as UTF-8."""
    with written_whole(file) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder to write to; at the end it is renamed to the file.

    If writing fails, the temporary file is removed and an existing file is kept. Raises OSError with the name
    of the file.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        named = error.filename if error.filename not in (None, str(part)) else str(file)
        raise OSError(error.errno, error.strerror or str(error), named) from error
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
