"""What runs in another process imports the same files as this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])


def python_path() -> str:
    """PYTHONPATH for such a process: our own root first, then whatever this one has."""
    own = [ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *(p for p in sys.path if p)]
    return os.pathsep.join(dict.fromkeys(path for path in own if path))


@contextmanager
def passed_on() -> Iterator[None]:
    """Set it for processes that are started inside.

    Safe path: `python -m` would put the working directory in front, and a file there, say random.py or sim/,
    in the place of ours.
    """
    own = {"PYTHONPATH": python_path(), "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
