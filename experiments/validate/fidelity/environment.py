"""Environment of a validation for its report: versions, machine, digest of the configuration."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sim.report.files import config_digest

PACKAGES = (
    "windtunnel",
    "simpy",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "hydra-core",
    "plotly",
    "torch",
    "triton",
)


def environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the environment as plain data, without importing the packages; None for a missing version."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "config_digest": config_digest(config),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
