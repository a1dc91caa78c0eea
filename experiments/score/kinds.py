"""The kinds of measured tables: their columns, their metrics, and the functions that predict a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments.score import kv_memory, lora, mlperf, modes, per_request, public, runs, silicon
from experiments.study import measured_requests
from hwmodels.levels import LatencyLevel
from sim.setup.scenario import Scenario


class Kind(NamedTuple):
    """One kind of table of measurements."""

    columns: tuple[str, ...]
    positive: tuple[str, ...]
    metrics: tuple[str, ...]
    """Predicted metrics, in the order of the output."""
    groups: tuple[str, ...]
    scenario_of: Callable[[dict[str, Any], LatencyLevel], Scenario]
    predict: Callable[[dict[str, Any], LatencyLevel], dict[str, float]]
    rows: Callable[[pd.DataFrame, Path], pd.DataFrame] | None = None
    """Turns the table and its path into one row per prediction; None: the table has that form."""
    unused: Callable[[pd.DataFrame], list[str]] | None = None
    """Returns the columns of settings that no prediction uses."""


KINDS = {
    "silicon": Kind(
        silicon.COLUMNS,
        silicon.POSITIVE,
        modes.METRICS,
        ("arch", "mode", "model", "gpu", "backend", "weights", "concurrency_band"),
        modes.scenario_of,
        modes.predict,
    ),
    "experiments": Kind(
        runs.COLUMNS,
        runs.POSITIVE,
        runs.METRICS,
        ("set", "model", "gpu", "workload"),
        runs.scenario_of,
        runs.predict,
    ),
    "requests": Kind(
        per_request.COLUMNS,
        per_request.POSITIVE,
        per_request.METRICS,
        ("run",),
        measured_requests.scenario_of,
        per_request.predict,
        per_request.by_run,
        per_request.unused_settings,
    ),
    "mlperf": Kind(
        mlperf.COLUMNS,
        mlperf.POSITIVE,
        mlperf.METRICS,
        ("scenario", "model", "gpu", "weights"),
        mlperf.scenario_of,
        mlperf.predict,
    ),
    "kv_memory": Kind(
        kv_memory.COLUMNS,
        kv_memory.POSITIVE,
        kv_memory.METRICS,
        kv_memory.GROUPS,
        kv_memory.scenario_of,
        kv_memory.predict,
        kv_memory.with_halves,
    ),
    "lora": Kind(
        lora.COLUMNS,
        lora.POSITIVE,
        lora.METRICS,
        lora.GROUPS,
        lora.scenario_of,
        lora.predict,
        lora.checked,
    ),
    "public": Kind(
        public.COLUMNS,
        public.POSITIVE,
        public.METRICS,
        public.GROUPS,
        public.scenario_of,
        public.predict,
        public.checked,
    ),
}
