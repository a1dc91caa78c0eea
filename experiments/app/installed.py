"""Installed distributions: windtunnel's version, and the distribution that installed a package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def version() -> str:
    """Returns the version of windtunnel, from the metadata of its distribution."""
    return importlib.metadata.version("windtunnel")


def owner(package: str, root: Path) -> str:
    """Returns which distribution installed a package in place of the one in `root`, and the remedy."""
    distributions = importlib.metadata.packages_distributions().get(package, [])
    others = sorted({name for name in distributions if name != "windtunnel"})
    if others:
        return f"it belongs to {', '.join(others)}; install windtunnel in an environment without it"
    return f"remove that folder from PYTHONPATH, or install windtunnel again: pip install -e {root}"
