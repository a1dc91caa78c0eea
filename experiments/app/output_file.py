"""A file that a command is to write: refused before anything runs where it cannot be written."""

from __future__ import annotations

from pathlib import Path


def check_output_file(name: str, path: str) -> None:
    """Raise ValueError, name=path: rule, for a folder and for a file in a folder that is not there."""
    if Path(path).is_dir():
        raise ValueError(f"{name}={path}: is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{name}={path}: no folder {Path(path).resolve().parent}")
