"""Replays the requests of a measured run as a workload, and builds the run's scenario.

A table has one row per request; the GPU, model and engine limits of its run are in runs.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.study.measured_rows import check_context, whole
from experiments.study.vllm_runs import given, vllm_scenario
from hwmodels.levels import LatencyLevel
from policies.core.request import Segment
from sim.setup.scenario import Scenario
from sim.workload.base import Source, WorkloadNotes
from sim.workload.chunks import TableSource
from sim.workload.distributions import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replayed:
    """Workload of the rows of a table."""

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    block_ids: tuple[tuple[int, ...], ...] = ()
    """Ids of each prompt's full blocks; empty: all contents differ."""
    block_size: int = 16

    def source(self, *, seed: int, max_model_len: int) -> Source:
        return TableSource(
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            notes=WorkloadNotes(),
            segments=self._segments if self.block_ids else None,
        )

    def _segments(self, row: int, num_tokens: int) -> tuple[Segment, ...]:
        return tuple(Segment(block_id, self.block_size) for block_id in self.block_ids[row])


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a run's row in runs.csv. Raises NotSimulatedError or ValueError."""
    requests: pd.DataFrame = row["requests"]
    limit = whole(row, "max_model_len") if given(row, "max_model_len") else None
    base = vllm_scenario(row, latency, limit)
    for prompt, output in zip(requests["input_tokens"], requests["output_tokens"], strict=True):
        check_context(int(prompt), int(output), base.model, limit)
    block_ids: tuple[tuple[int, ...], ...] = ()
    if "prefix_block_ids" in requests:
        block_ids = tuple(block_ids_of(text) for text in requests["prefix_block_ids"])
    return replace(
        base,
        workload=Replayed(
            arrival_s=requests["arrival_s"].to_numpy(dtype=np.float64),
            prompt_tokens=requests["input_tokens"].to_numpy(dtype=np.int64),
            output_tokens=requests["output_tokens"].to_numpy(dtype=np.int64),
            block_ids=block_ids,
            block_size=base.caching.block_size,
        ),
    )


def block_ids_of(text: Any, where: str = "") -> tuple[int, ...]:
    """Parses whole numbers separated by spaces; an empty cell has none. where: start of the message.

    Raises ValueError.
    """
    if pd.isna(text):
        return ()
    try:
        return tuple(map(int, str(text).split()))
    except ValueError:
        raise ValueError(
            f"{where}prefix_block_ids={str(text)[:40]}: must be whole numbers separated by spaces"
        ) from None
