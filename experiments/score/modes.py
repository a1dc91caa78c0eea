"""kind=silicon: rows of whole engines, aggregated or disaggregated; columns as in silicon_e2e.csv.gz."""

from __future__ import annotations

from typing import Any

from experiments.score import disaggregated, silicon
from experiments.study.measured_rows import simulated
from experiments.study.presets import NotSimulatedError
from hwmodels.levels import LatencyLevel
from sim.setup.scenario import Scenario

METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s_per_gpu")
MODES = {"agg": silicon.scenario_of, "disagg": disaggregated.scenario_of}


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes `METRICS`: means over requests, and output tokens/s per GPU.

    Raises NotSimulatedError or ValueError for a row that cannot be simulated.
    """
    return figures_of(scenario_of(row, latency))


def figures_of(scenario: Scenario) -> dict[str, float]:
    """Simulates the scenario and computes `METRICS`. Raises NotSimulatedError."""
    records, table = simulated(scenario)
    num_devices = sum(pool.layout.num_devices * pool.replicas for pool in scenario.pools_by_name.values())
    return {
        "ttft_ms": 1e3 * float(table["ttft_s"].mean()),
        "tpot_ms": 1e3 * float(table["tpot_s"].mean()),
        "e2e_ms": 1e3 * float(table["e2e_s"].mean()),
        "output_tokens_per_s_per_gpu": float(table["output_tokens"].sum()) / records.end_s / num_devices,
    }


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a row. Raises NotSimulatedError, or ValueError for a layout that cannot be."""
    if row["mode"] not in MODES:
        raise NotSimulatedError(f"mode={row['mode']}: must be {' or '.join(MODES)}")
    return MODES[row["mode"]](row, latency)
