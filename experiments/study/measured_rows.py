"""What rows of all kinds have in common: whole numbers, a context that must hold them, a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.study.presets import NotSimulatedError
from hwmodels.model.model_spec import ModelSpec
from sim.metrics.measured import request_metrics
from sim.records.run import RunRecords
from sim.setup.scenario import Scenario


def whole(row: Mapping[str, Any], name: str) -> int:
    """The row's number of things. Raises NotSimulatedError for an empty cell and for 2.5 of them."""
    value = row[name]
    if pd.isna(value):
        raise NotSimulatedError(f"{name} is missing")
    number = pd.to_numeric(value, errors="coerce")
    if not number >= 1 or number % 1:
        raise NotSimulatedError(f"{name}={value}: must be a whole number >= 1")
    return int(number)


def check_context(prompt_tokens: int, output_tokens: int, model: ModelSpec, limit: int | None = None) -> None:
    """Raises NotSimulatedError where prompt and answer exceed limit, or without one the model's context."""
    longest = model.max_position_embeddings if limit is None else limit
    if prompt_tokens + output_tokens > longest:
        raise NotSimulatedError(
            f"{prompt_tokens:,} prompt and {output_tokens:,} output tokens: "
            f"must be <= {longest:,} together, the context of {model.name}"
        )


def simulated(scenario: Scenario) -> tuple[RunRecords, pd.DataFrame]:
    """The run and its table of requests. Raises NotSimulatedError unless all of them were answered."""
    records = scenario.simulate(scenario.source())
    table = request_metrics(records.requests, None)
    finished = (table["status"] == "finished").sum()
    if finished < len(table):
        raise NotSimulatedError(f"{len(table) - finished} of {len(table)} requests do not fit the KV cache")
    return records, table
