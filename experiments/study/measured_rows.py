"""Reads whole numbers from rows of measurements, checks context lengths, and simulates scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.study.presets import NotSimulatedError
from hwmodels.model import ModelSpec
from sim.metrics.measured import request_metrics
from sim.records.run import RunRecords
from sim.records.table import to_pandas
from sim.setup.scenario import Scenario


def whole(row: Mapping[str, Any], name: str) -> int:
    """Returns a whole number of the row. Raises NotSimulatedError if it is missing or a fraction."""
    value = row.get(name)
    if pd.isna(value):
        raise NotSimulatedError(f"{name} is missing")
    number = pd.to_numeric(value, errors="coerce")
    if not number >= 1 or number % 1:
        raise NotSimulatedError(f"{name}={value}: must be a whole number >= 1")
    return int(number)


def check_context(prompt_tokens: int, output_tokens: int, model: ModelSpec, limit: int | None = None) -> None:
    """Raises NotSimulatedError if prompt plus output exceed `limit`, or, without one, the model's context."""
    longest = model.max_position_embeddings if limit is None else limit
    if prompt_tokens + output_tokens > longest:
        raise NotSimulatedError(
            f"{prompt_tokens:,} prompt tokens plus {output_tokens:,} output tokens: "
            f"must be <= {longest:,} in total, the context length of {model.name}"
        )


def simulated(scenario: Scenario) -> tuple[RunRecords, pd.DataFrame]:
    """Returns the run and its table of requests. Raises NotSimulatedError if a request did not finish.

    Raises KeyboardInterrupt after Ctrl-C.
    """
    records = scenario.simulate(scenario.source())
    if records.interrupted:
        raise KeyboardInterrupt
    table = request_metrics(to_pandas(records.requests), None)
    finished = (table["status"] == "finished").sum()
    if finished < len(table):
        raise NotSimulatedError(f"{len(table) - finished} of {len(table)} requests do not fit the KV cache")
    return records, table
