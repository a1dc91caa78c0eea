"""Reads one request of a run from the run's folder.

Raises ConfigError if files or the request are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sim.metrics.slo import TERMS
from sim.records.request_phases import RequestPhase, phases_of
from sim.settings.errors import ConfigError
from sim.settings.json_files import read_json_object


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStory:
    """One request of a run. limits_s: the SLO's terms; rows: its events; end_s: end of the run."""

    request: dict[str, Any]
    rows: list[Any]
    phases: list[RequestPhase]
    limits_s: dict[str, float]
    end_s: float

    @property
    def num_replicas(self) -> int:
        """Number of replicas that the request was on."""
        return len({row.replica for row in self.rows if row.replica >= 0})


def read_request(folder: Path, request_id: int) -> RequestStory:
    """Reads a request from a run's folder."""
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; give the folder that windtunnel simulate printed")
    requests = _table(folder, "requests.parquet")
    ids = requests["request_id"]
    if not len(ids):
        raise ConfigError(f"run={folder}: no request arrived in this run")
    if request_id not in set(ids.tolist()):
        raise ConfigError(
            f"request={request_id}: no such request; the run has requests {ids.min()} to {ids.max()}"
        )
    events = _table(folder, "events.parquet", request_id)
    summary = read_json_object(folder / "summary.json", f"run={folder}")
    slo = (summary["goodput"] or {}).get("slo", {})
    rows = list(events.itertuples(index=False))
    return RequestStory(
        request={str(name): value for name, value in requests[ids == request_id].iloc[0].items()},
        rows=rows,
        phases=phases_of(rows, summary["simulated_s"]),
        limits_s={term: slo[f"{term}_ms"] / 1e3 for term in TERMS if f"{term}_ms" in slo},
        end_s=summary["simulated_s"],
    )


def _table(folder: Path, name: str, request_id: int | None = None) -> pd.DataFrame:
    file = folder / name
    if not file.is_file():
        inner = sorted(folder.glob(f"*/{name}"))
        if inner:
            raise ConfigError(
                f"run={folder}: contains several runs; choose one, such as run={inner[0].parent}"
            )
        raise ConfigError(f"run={folder}: contains no {name}; simulate it again with output.tables=true")
    filters = None if request_id is None else [("request_id", "==", request_id)]
    return pd.read_parquet(file, filters=filters)
