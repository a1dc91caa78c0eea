"""Replays the requests of a measured run as a workload, and builds the run's scenario.

A table has one row per request; the GPU, model and engine limits of its run are in runs.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.study.measured_rows import check_context, whole
from experiments.study.presets import base_scenario
from hwmodels.levels.rooflines import LatencyLevel
from policies.caching.prefix import PrefixCaching
from policies.core.request import Segment
from sim.setup.scenario import Scenario
from sim.workload.base import Source, WorkloadNotes
from sim.workload.distributions import FloatArray, IntArray
from sim.workload.table import TableSource


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
    base = base_scenario(row["model"], row["gpu"], "vllm")
    requests: pd.DataFrame = row["requests"]
    limit = None if pd.isna(row["max_model_len"]) else whole(row, "max_model_len")
    for prompt, output in zip(requests["input_tokens"], requests["output_tokens"], strict=True):
        check_context(int(prompt), int(output), base.model, limit)
    engine = replace(
        base.engine,
        max_num_seqs=whole(row, "max_num_seqs"),
        max_num_batched_tokens=whole(row, "max_num_batched_tokens"),
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        max_model_len=limit,
        num_kv_blocks=None if pd.isna(row["num_gpu_blocks"]) else whole(row, "num_gpu_blocks"),
    )
    caching, block_size = base.caching, base.caching.block_size
    block_ids: tuple[tuple[int, ...], ...] = ()
    if "prefix_block_ids" in requests:
        block_size = base.caching.block_size if pd.isna(row.get("block_size")) else whole(row, "block_size")
        caching = PrefixCaching(block_size=block_size)
        block_ids = tuple(block_ids_of(text) for text in requests["prefix_block_ids"])
    return replace(
        base,
        latency=latency,
        engine=engine,
        caching=caching,
        tensor_parallel_size=whole(row, "tp"),
        workload=Replayed(
            arrival_s=requests["arrival_s"].to_numpy(dtype=np.float64),
            prompt_tokens=requests["input_tokens"].to_numpy(dtype=np.int64),
            output_tokens=requests["output_tokens"].to_numpy(dtype=np.int64),
            block_ids=block_ids,
            block_size=block_size,
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
