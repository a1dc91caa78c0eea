"""What is installed beside us, by the metadata of the distributions."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def version() -> str:
    """The version of windtunnel, from the metadata of its distribution."""
    return importlib.metadata.version("windtunnel")


def owner(package: str, root: Path) -> str:
    """The distribution that put a package in the place of our own in `root`, and what to do about it."""
    distributions = importlib.metadata.packages_distributions().get(package, [])
    others = sorted({name for name in distributions if name != "windtunnel"})
    if others:
        return f"it belongs to {', '.join(others)}; install windtunnel in an environment without it"
    return f"remove that folder from PYTHONPATH, or install windtunnel again: pip install -e {root}"
