"""The simulator: clock, replicas, workloads, records and metrics. `from sim import simulate, study`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.app.api import simulate
    from experiments.study.api import study
    from experiments.study.study import Findings
    from sim.api import Result
    from sim.settings.errors import ConfigError

__all__ = ["ConfigError", "Findings", "Result", "simulate", "study"]

_HOMES = {
    "simulate": "experiments.app.api",  # it composes settings, of which this package knows nothing
    "study": "experiments.study.api",
    "Findings": "experiments.study.study",
    "Result": "sim.api",
    "ConfigError": "sim.settings.errors",
}


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, as most of this package needs neither Hydra nor plotly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
