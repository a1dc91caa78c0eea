"""Reads one request of a run from the run's folder.

Raises ConfigError if files or the request are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.report.run_files import check_run_folder, read_summary, read_table
from sim.metrics.slo import TERMS
from sim.records.request_phases import RequestPhase, phases_of
from sim.report.run_files import BURSTS
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStory:
    """One request of a run. limits_s: the SLO's terms; rows: its events; end_s: end of the run."""

    request: dict[str, Any]
    rows: list[Any]
    phases: list[RequestPhase]
    limits_s: dict[str, float]
    end_s: float
    measured: pd.DataFrame
    """Rows of requests.parquet that arrived in the measurement window, which the summary is about."""
    num_kept: int | None = None
    """Draft tokens of the request that stayed; None if no engine speculates."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas that the request was on."""
        return len({row.replica for row in self.rows if row.replica >= 0})


def _num_kept(folder: Path, request_id: int) -> int:
    """Counts the draft tokens of a request that stayed, those of attempts that were lost included."""
    bursts = read_table(folder, BURSTS, [("request_id", "==", request_id)])
    return int(bursts["kept_tokens"].sum())


def read_request(folder: Path, request_id: int) -> RequestStory:
    """Reads a request from a run's folder."""
    check_run_folder(folder, ("summary.json", "requests.parquet", "events.parquet"))
    requests = read_table(folder, "requests.parquet")
    ids = requests["request_id"]
    if not len(ids):
        raise ConfigError(f"run={folder}: no request arrived in this run")
    if request_id not in set(ids.tolist()):
        raise ConfigError(
            f"request={request_id}: no such request; the run has requests {ids.min()} to {ids.max()}"
        )
    events = read_table(folder, "events.parquet", [("request_id", "==", request_id)])
    summary = read_summary(folder)
    slo = (summary["goodput"] or {}).get("slo", {})
    trimmed = summary["trimmed"]
    rows = list(events.itertuples(index=False))
    return RequestStory(
        request={str(name): value for name, value in requests[ids == request_id].iloc[0].items()},
        rows=rows,
        phases=phases_of(rows, summary["simulated_s"]),
        limits_s={term: slo[f"{term}_ms"] / 1e3 for term in TERMS if f"{term}_ms" in slo},
        end_s=summary["simulated_s"],
        num_kept=_num_kept(folder, request_id) if "speculation" in summary else None,
        measured=requests[requests["arrival_s"].between(trimmed["start_s"], trimmed["end_s"])],
    )
