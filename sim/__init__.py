"""The simulator: clock, replicas, workloads, records and metrics. `from sim import simulate`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.app.api import simulate, simulate_streamed
    from sim.api import Result
    from sim.settings.errors import ConfigError
    from sim.streamed_api import StreamedResult

__all__ = ["ConfigError", "Result", "StreamedResult", "simulate", "simulate_streamed"]

_HOMES = {
    "simulate": "experiments.app.api",  # these two compose settings, of which this package knows nothing
    "simulate_streamed": "experiments.app.api",
    "Result": "sim.api",
    "StreamedResult": "sim.streamed_api",
    "ConfigError": "sim.settings.errors",
}


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, as most of this package needs neither Hydra nor plotly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
