"""A real or simulated run as plain tables, the form in which runs are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sim.metrics.measured import request_metrics
from sim.records.run import RunRecords
from sim.records.table import Gaps, to_pandas


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """Tables of a run; all times in seconds on one clock that is 0 when the workload begins.

    requests: sorted by arrival, with the columns status, arrival_s, scheduled_s, first_token_s, last_token_s,
    finished_s, prompt_tokens, output_tokens of the simulator's table
    (`sim.records.requests.RequestLog.table`), NaN if unknown or if it did not happen. gaps: between tokens;
    None: not recorded. iterations: the simulator's table; None: not recorded. samples: a server's log with
    the columns time_s, running, waiting, kv_use_share. num_kv_blocks: of one replica. notes: caveats of the
    recording. block_ids: of each prompt's full blocks of block_size tokens, equal for equal contents; empty:
    unknown.
    """

    name: str
    requests: pd.DataFrame
    gaps: Gaps | None = None
    iterations: pd.DataFrame | None = None
    samples: pd.DataFrame | None = None
    num_kv_blocks: int | None = None
    num_replicas: int = 1
    notes: tuple[str, ...] = ()
    block_ids: tuple[tuple[int, ...], ...] = ()
    block_size: int = 16

    @property
    def end_s(self) -> float:
        """Time of the last known event, in seconds."""
        moments = self.requests[["arrival_s", "first_token_s", "last_token_s"]].to_numpy(dtype=np.float64)
        ends_s = [float(np.nanmax(moments))] if moments.size and not np.isnan(moments).all() else [0.0]
        if self.iterations is not None and len(self.iterations):
            ends_s.append(float((self.iterations["start_s"] + self.iterations["duration_s"]).max()))
        return max(ends_s)

    @property
    def latencies(self) -> pd.DataFrame:
        """The requests with ttft_s, tpot_s and e2e_s, defined as in `sim.metrics.definitions`."""
        return request_metrics(self.requests, None)

    def trimmed(self, *, warmup_s: float, cooldown_s: float) -> Measured:
        """Keeps what happened from warmup_s to cooldown_s before the last arrival.

        Requests count by their arrival, gaps by their end, iterations by their start.
        """
        if not (warmup_s or cooldown_s):
            return self
        arrival_s = self.requests["arrival_s"].to_numpy(dtype=np.float64)
        until_s = arrival_s.max() - cooldown_s if len(arrival_s) else 0.0
        kept = (arrival_s >= warmup_s) & (arrival_s <= until_s)
        gaps, iterations, samples = self.gaps, self.iterations, self.samples
        if gaps is not None:
            inside = (gaps.gap_end_s >= warmup_s) & (gaps.gap_end_s <= until_s)
            gaps = Gaps(gaps.gap_s[inside], gaps.gap_count[inside], gaps.gap_end_s[inside])
        if iterations is not None:
            start_s = iterations["start_s"].to_numpy(dtype=np.float64)
            iterations = iterations[(start_s >= warmup_s) & (start_s <= until_s)]
        if samples is not None:
            time_s = samples["time_s"].to_numpy(dtype=np.float64)
            samples = samples[(time_s >= warmup_s) & (time_s <= until_s)]
            samples = samples if len(samples) > 1 else None
        return replace(
            self,
            requests=self.requests[kept],
            gaps=gaps,
            iterations=iterations,
            samples=samples,
            block_ids=tuple(ids for ids, is_kept in zip(self.block_ids, kept, strict=False) if is_kept),
        )


def of_records(records: RunRecords, name: str = "simulated") -> Measured:
    """Converts records in the simulator's schema, simulated or real."""
    return Measured(
        name=name,
        requests=to_pandas(records.requests).sort_values(["arrival_s", "request_id"], ignore_index=True),
        gaps=Gaps(records.gap_s, records.gap_count, records.gap_end_s),
        iterations=to_pandas(records.iterations),
        num_kv_blocks=records.pools[0].num_kv_blocks,
        num_replicas=records.num_replicas,
        block_size=records.pools[0].block_size,
    )
