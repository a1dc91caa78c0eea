"""Computes a digest of all files that a run's figures depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = (("policies", "*.py"), ("hwmodels", "*"), ("sim", "*.py"), ("configs", "*.yaml"))


def code_version(config_dirs: Sequence[Path], more: Sequence[str] = ()) -> str:
    """Returns 12 hexadecimal digits. config_dirs: our folder of configs, then the user's.

    more: further folders of code, which must be equal on all machines of a run.
    """
    digest = hashlib.blake2b(digest_size=6)
    parts = [*PARTS, *((folder, "*.py") for folder in more)]
    files = [file for part, pattern in parts for file in sorted((ROOT / part).rglob(pattern))]
    files += [file for folder in config_dirs[1:] for file in sorted(folder.rglob("*.yaml"))]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
