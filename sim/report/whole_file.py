"""Files that appear under their names only once they are whole, whatever ends the process while it writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(file: Path, content: bytes | str) -> None:
    """Writes a file; a reader sees the file from before or the whole new one. Text is written as UTF-8."""
    with written_whole(file) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Yields a temporary name beside the file to write to; at the end the data get the file's name.

    Nothing is left under either name if the writing fails. Raises OSError, which names the file.
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
