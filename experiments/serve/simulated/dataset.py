"""Reads the texts of a dataset, which simulated outputs repeat."""

from __future__ import annotations

import json
from pathlib import Path

from hwmodels.bounded_files import UnreadableFileError, read_text

KEYS = ("text", "output")
MAX_BYTES = 256 << 20


def read_texts(file: Path | None) -> list[str]:
    """Returns the texts of a file of JSON lines. Raises ValueError, with the line, if it cannot be read."""
    if file is None:
        raise ValueError("serve.dataset=null: serve.text=dataset needs a file of JSON lines with texts")
    try:
        lines = read_text(file, MAX_BYTES).splitlines()
    except UnreadableFileError as error:
        raise ValueError(f"serve.dataset={file}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"serve.dataset={file}: cannot be read: {error}") from None
    texts = [_text_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"serve.dataset={file}: has no line with a text")
    return texts


def _text_of(file: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        for key in KEYS:
            if isinstance(row.get(key), str) and row[key]:
                return str(row[key])
    raise ValueError(f"serve.dataset={file}:{number}: expected an object with a text in {' or '.join(KEYS)}")
