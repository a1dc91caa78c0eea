"""Finds measured latencies that are impossible, such as those of a table in seconds or microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.study.presets import NotSimulatedError
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Role
from sim.report.wording import plural
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario

PHYSICAL_SHARE = 0.8
"""Share of the shortest possible time below which a latency is rejected; data sheets are not exact."""

LONGEST_MS = {"ttft": 3_600e3, "tpot": 10e3, "itl": 10e3}
"""Longest plausible latency in ms, by the beginning of the metric's name."""


def impossible_rows(
    path: Path,
    table: pd.DataFrame,
    metrics: Iterable[str],
    scenario_of: Callable[[dict[str, Any]], Scenario],
) -> dict[Any, str]:
    """Returns reasons by id of rows whose TTFT, TPOT or ITL is beyond what the devices can do.

    Speculative decoding or a wrong label causes a few of them. Raises ConfigError with the first reason if
    half of the rows or more are impossible, as in a table in another unit. Rows that cannot be simulated have
    no lower limit; the predictions contain their reasons.
    """
    checked = [name for name in metrics if name in table and name.partition("_")[0] in LONGEST_MS]
    found = {}
    rows: Any = table.to_dict("records")
    for row in rows:
        measured = {name: float(row[name]) for name in checked if pd.notna(row[name])}
        reason = _too_long(measured) or _too_short(measured, row, scenario_of)
        if reason is not None:
            found[row["id"]] = reason
    if found and 2 * len(found) >= len(table):
        first, reason = next(iter(found.items()))
        raise ConfigError(
            f"measured={path}: id={first}: {reason}; times must be in ms. If they are, check model, GPU and "
            f"sizes ({len(found):,} of {plural(len(table), 'row')})"
        )
    return found


def _too_long(measured: dict[str, float]) -> str | None:
    for name, value in measured.items():
        longest = LONGEST_MS[name.partition("_")[0]]
        if value > longest:
            return f"{name}={value:g}: must be <= {longest:,.0f}"
    return None


def _too_short(
    measured: dict[str, float], row: dict[str, Any], scenario_of: Callable[[dict[str, Any]], Scenario]
) -> str | None:
    if not measured:
        return None
    try:
        scenario = scenario_of(row)
    except (NotSimulatedError, ValueError):
        return None
    limit_ms = 1e3 * least_step_seconds(scenario)
    for name, value in measured.items():
        if value < PHYSICAL_SHARE * limit_ms:
            return (
                f"{name}={value:g}: {scenario.layout.num_devices} x {scenario.hardware.name} cannot read "
                f"the weights of {scenario.model.name} in less than {limit_ms:.3g} ms"
            )
    return None


def least_step_seconds(scenario: Scenario) -> float:
    """Computes the seconds to read a token's weights: (bytes - L2) / memory bandwidth of all devices."""
    devices, device = scenario.layout.num_devices, scenario.hardware
    beyond = active_weight_bytes(scenario.model) - devices * device.l2_bytes
    return float(np.maximum(beyond, 0.0) / (devices * device.memory_bandwidth_bytes_per_s))


def active_weight_bytes(model: ModelSpec) -> float:
    """Returns the bytes of all layers' matrices and the LM head, with the routed experts of one token."""
    total = model.embedding_elements * model.bytes_per_weight(Role.plain, model.lm_head_weights)
    for block in model.blocks:
        always = [m for m in block.layer_matrices(model.hidden_size) if m.role is not Role.routed]
        visited = block.layer_active_elements(model.hidden_size) - sum(m.elements for m in always)
        layer = sum(model.matrix_bytes(m) for m in always)
        stored = dict(block.formats).get("expert_down_proj")
        total += block.count * (layer + visited * model.bytes_per_weight(Role.routed, stored))
    return total
