"""kind=requests: runs with every request's timestamps; columns as in vllm_requests/requests.csv.gz.

The arrivals are replayed open loop with the output lengths that were forced. What the table does not say of a
run (GPU, model, engine limits) stands in runs.csv beside it. With prefix_block_ids, a number for each full
block of the prompt, equal where prefixes are, the engine caches prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.score.rows import check_context, simulated, whole
from experiments.study.presets import base_scenario
from hwmodels.levels.rooflines import LatencyLevel
from policies.caching.prefix import PrefixCaching
from policies.core.request import Segment
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario
from sim.workload.base import Source, WorkloadNotes
from sim.workload.distributions import FloatArray, IntArray
from sim.workload.table import TableSource

COLUMNS = ("id", "run", "arrival_s", "input_tokens", "output_tokens")
METRICS = ("ttft_mean_ms", "tpot_mean_ms", "e2e_mean_ms")
POSITIVE = ("input_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replayed:
    """A workload: the rows of a table."""

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    block_ids: tuple[tuple[int, ...], ...] = ()
    """Of each prompt's full blocks; empty: contents are all different."""
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


def by_run(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """One row a run: its settings from runs.csv, its requests as arrays, and the means that were measured."""
    settings_path = path.parent / "runs.csv"
    try:
        settings = pd.read_csv(settings_path).set_index("run")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"measured={path}: its runs' settings, {settings_path}, cannot be read: {error}"
        ) from error
    rows = []
    for run, requests in table.sort_values("arrival_s").groupby("run"):
        if run not in settings.index:
            raise ConfigError(f"measured={path}: run={run}: no such run in {settings_path}")
        measured = {
            f"{name}_mean_ms": float(requests[f"{name}_ms"].mean())
            for name in ("ttft", "tpot", "e2e")
            if f"{name}_ms" in requests
        }
        row = {str(name): value for name, value in settings.loc[run].items()}
        rows.append({"id": run, "run": run, **row, **measured, "requests": requests})
    return pd.DataFrame(rows)


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """`METRICS`, over all requests of the run. Raises NotSimulatedError or ValueError."""
    scenario = scenario_of(row, latency)
    _, table = simulated(scenario)
    return {f"{name}_mean_ms": 1e3 * float(table[f"{name}_s"].mean()) for name in ("ttft", "tpot", "e2e")}


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
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
        block_ids = tuple(_ids(text) for text in requests["prefix_block_ids"])
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


def _ids(text: Any) -> tuple[int, ...]:
    """Numbers with blanks between them; none where the cell is empty."""
    if pd.isna(text):
        return ()
    try:
        return tuple(map(int, str(text).split()))
    except ValueError:
        raise ValueError(
            f"prefix_block_ids={str(text)[:40]}: must be whole numbers with blanks between"
        ) from None
