"""Makes other processes import the same files as this one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])


def python_path() -> str:
    """Returns PYTHONPATH for other processes: our root first, then this process's path."""
    own = [ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep), *(p for p in sys.path if p)]
    return os.pathsep.join(dict.fromkeys(path for path in own if path))


@contextmanager
def passed_on() -> Iterator[None]:
    """Sets PYTHONPATH for processes that are started inside the context.

    PYTHONSAFEPATH keeps the working directory out of the path: `python -m` would put it first, and a file
    there such as random.py would replace the standard one.
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
