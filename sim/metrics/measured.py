"""Computes the measured part of a run and the figures that simulated and observed runs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.by_class import LATENCIES, figures_by_class
from sim.metrics.one_run import FoundWarmUp, find_warm_up
from sim.metrics.settings import MetricsSettings
from sim.metrics.slo import Slo
from sim.metrics.window import Window, measured_window
from sim.records.run import RunRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The requests of a run, and the part of it without warm-up and cool-down."""

    table: pd.DataFrame
    """`request_metrics` of the whole run."""
    requests: pd.DataFrame
    """The rows of `table` that arrived in the window."""
    window: Window
    warmup_s: float
    cooldown_s: float
    found: FoundWarmUp | None
    """The warm-up that was determined from the run (warmup_s=auto)."""
    gaps_inside: NDArray[np.int64]
    """`RunRecords.gap_count` with 0 for gaps that end outside the window, which avoids a copy of the gaps."""

    def figures(self, records: RunRecords, slo: Slo | None) -> dict[str, Any]:
        """Computes the trimmed parts, and the latencies of all requests and of each class."""
        num_left_out = len(self.table) - len(self.requests)
        return {
            "trimmed": trimmed(self.window, self.warmup_s, self.cooldown_s, num_left_out),
            "warmup": None if self.found is None else self.found.evidence,
            **{name: definitions.describe(_times(self.requests, f"{name}_s")) for name in LATENCIES},
            "itl": definitions.describe(records.gap_s, self.gaps_inside),
            **figures_by_class(self.table, self.window, slo),
        }


def trimmed(window: Window, warmup_s: float, cooldown_s: float, num_left_out: int) -> dict[str, Any]:
    """Returns the section `trimmed` of the summary."""
    return {
        "warmup_s": warmup_s,
        "cooldown_s": cooldown_s,
        "start_s": window.start_s,
        "end_s": window.end_s,
        "requests_left_out": num_left_out,
    }


def measure(
    records: RunRecords,
    metrics: MetricsSettings,
    slo: Slo | None,
    own_s: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> Measured:
    """Returns the measured part of a run by the settings.

    own_s: latencies that the workload knows, by name, in seconds (`sim.workload.own_figures.own_latencies`).
    """
    table = request_metrics(records.requests, slo, own_s)
    found = find_warm_up(table) if metrics.warmup_s == "auto" else None
    warmup_s = metrics.known_warmup_s if found is None else found.warmup_s
    window = measured_window(records.end_s, warmup_s=warmup_s, cooldown_s=metrics.cooldown_s)
    return Measured(
        table=table,
        requests=table[window.holds(_times(table, "arrival_s"))],
        window=window,
        warmup_s=warmup_s,
        cooldown_s=metrics.cooldown_s,
        found=found,
        gaps_inside=records.gap_count * window.holds(records.gap_end_s),
    )


def request_metrics(
    requests: pd.DataFrame,
    slo: Slo | None,
    own_s: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> pd.DataFrame:
    """Adds the columns ttft_s, tpot_s, e2e_s, queue_s (NaN if missing) and, with an SLO, slo_met.

    own_s: further latencies, by name, that become columns.
    """
    arrival_s, first_s, last_s = (
        _times(requests, f"{name}_s") for name in ("arrival", "first_token", "last_token")
    )
    finished = (requests["status"] == "finished").to_numpy(dtype=np.bool_)
    longest = requests.get("longest_tokens", requests["output_tokens"]).to_numpy()
    tpot_s = definitions.tpot_s(first_s, last_s, longest)
    table = requests.assign(
        ttft_s=definitions.ttft_s(arrival_s, first_s),
        tpot_s=np.where(finished, tpot_s, np.nan),
        e2e_s=np.where(finished, definitions.e2e_s(arrival_s, last_s), np.nan),
        queue_s=definitions.queue_s(arrival_s, _times(requests, "scheduled_s")),
        **{f"{name}_s": seconds for name, seconds in own_s.items()},
    )
    return table if slo is None else table.assign(slo_met=slo.met(table))


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)
