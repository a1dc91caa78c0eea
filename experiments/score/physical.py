"""Measured latencies that cannot be right, as of a table in seconds or microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.errors import ConfigError
from experiments.score.presets import NotSimulatedError
from hwmodels.layers.matrices import Role
from hwmodels.model_spec import ModelSpec
from sim.scenario import Scenario

PHYSICAL_SHARE = 0.8
"""Of the shortest possible time; what is below is refused. Data sheets are not that exact."""

LONGEST_MS = {"ttft": 3_600e3, "tpot": 10e3, "itl": 10e3}
"""By the beginning of a metric's name. An hour for the first token, and 10 s for each of the others."""


def check_latencies(
    path: Path,
    table: pd.DataFrame,
    metrics: Iterable[str],
    scenario_of: Callable[[dict[str, Any]], Scenario],
) -> None:
    """Raise ConfigError for the first row whose TTFT, TPOT or ITL is beyond what devices can do.

    Rows that cannot be simulated have no lower limit: their reason is in the predictions.
    """
    checked = {name: name.partition("_")[0] for name in metrics if name in table}
    checked = {name: kind for name, kind in checked.items() if kind in LONGEST_MS}
    for _, columns in table.iterrows():
        row = dict(columns)
        measured = {name: float(row[name]) for name in checked if pd.notna(row[name])}
        for name, value in measured.items():
            if value > LONGEST_MS[checked[name]]:
                rule = f"must be <= {LONGEST_MS[checked[name]]:,.0f}"
                raise ConfigError(f"measured={path}: id={row['id']}: {name}={value:g}: {rule}; is it in ms?")
        if not measured:
            continue
        try:
            scenario = scenario_of(row)
        except (NotSimulatedError, ValueError):
            continue
        limit_ms = 1e3 * least_step_seconds(scenario)
        for name, value in measured.items():
            if value < PHYSICAL_SHARE * limit_ms:
                count = scenario.layout.num_devices
                raise ConfigError(
                    f"measured={path}: id={row['id']}: {name}={value:g}: {count} x {scenario.hardware.name} "
                    f"cannot read the weights of {scenario.model.name} in less than {limit_ms:.3g} ms; "
                    "is it in ms? If so, check model, GPU and sizes"
                )


def least_step_seconds(scenario: Scenario) -> float:
    """Seconds to read what one token is multiplied with: (bytes - L2) / memory bandwidth, of all devices."""
    devices, device = scenario.layout.num_devices, scenario.hardware
    beyond = active_weight_bytes(scenario.model) - devices * device.l2_bytes
    return float(np.maximum(beyond, 0.0) / (devices * device.memory_bandwidth_bytes_per_s))


def active_weight_bytes(model: ModelSpec) -> float:
    """Of all layers' matrices and the LM head, routed experts as many as one token visits."""
    total = model.embedding_elements * model.bytes_per_weight(Role.plain)
    for block in model.blocks:
        always = [m for m in block.layer_matrices(model.hidden_size) if m.role is not Role.routed]
        visited = block.layer_active_elements(model.hidden_size) - sum(m.elements for m in always)
        layer = sum(m.elements * model.bytes_per_weight(m.role) for m in always)
        total += block.count * (layer + visited * model.bytes_per_weight(Role.routed))
    return total
