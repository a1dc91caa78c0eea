"""What runs in another process imports the same files as this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])


def python_path() -> str:
    """PYTHONPATH for such a process: our own root first, then whatever this one has."""
    own = [ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *(p for p in sys.path if p)]
    return os.pathsep.join(dict.fromkeys(path for path in own if path))


@contextmanager
def passed_on() -> Iterator[None]:
    """Set it for processes that are started inside."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = python_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
