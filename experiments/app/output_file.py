"""Check of an output file's path, made before a command runs."""

from __future__ import annotations

from pathlib import Path


def check_output_file(name: str, path: str) -> None:
    """Raises ValueError if the path is a folder, or if the folder of the file does not exist."""
    if Path(path).is_dir():
        raise ValueError(f"{name}={path}: is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{name}={path}: there is no folder {Path(path).resolve().parent}; create it first")
