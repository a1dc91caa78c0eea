"""Service level objective: the latencies a request must keep to count as good, and how many must."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.window import Window
from sim.records.requests import RequestLog, Status

TERMS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Limits in milliseconds, None for no limit; a request is good if it finished within all of them.

    attainment_target: the share of arrivals that must be good, 0.9 in DistServe (OSDI 2024), 0.99 in MLPerf.
    name: what reports call it.
    """

    name: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment_target: float = 0.9

    def __post_init__(self) -> None:
        given = [f"{term}_ms" for term in TERMS if getattr(self, f"{term}_ms") is not None]
        if not given:
            raise ValueError("no term given: set at least one of ttft_ms, tpot_ms, e2e_ms")
        for key in given:
            limit_ms = getattr(self, key)
            if not (limit_ms > 0 and math.isfinite(limit_ms)):
                raise ValueError(f"{key}={limit_ms}: must be a finite number > 0 ms; null for no limit")
        if not 0 < self.attainment_target <= 1:
            raise ValueError(f"attainment_target={self.attainment_target}: must be in (0, 1], 0.9 for 90 %")

    @property
    def limits_s(self) -> dict[str, float]:
        """The given terms and their limits, in seconds."""
        limits_ms = {term: getattr(self, f"{term}_ms") for term in TERMS}
        return {term: limit_ms / 1e3 for term, limit_ms in limits_ms.items() if limit_ms is not None}

    def met(self, requests: pd.DataFrame) -> NDArray[np.bool_]:
        """Which requests are good: finished, and every given term holds. Columns as for `terms_met`."""
        finished = (requests["status"] == "finished").to_numpy(dtype=np.bool_)
        for held in self.terms_met(requests).values():
            finished = finished & held
        return finished

    def is_met(self, log: RequestLog, request_id: int) -> bool:
        """Whether one request is good, as soon as it has ended."""
        if log.status[request_id] != Status.finished:
            return False
        ttft_s = log.first_token_s[request_id] - log.arrival_s[request_id]
        e2e_s = log.last_token_s[request_id] - log.arrival_s[request_id]
        num_tokens = log.longest_tokens[request_id]
        tpot_s = (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        latencies_s = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
        return all(latencies_s[term] <= limit_s for term, limit_s in self.limits_s.items())

    def terms_met(self, requests: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
        """For which requests each given term holds; it does not where the latency does not exist (NaN).

        Reads status, output_tokens or longest_tokens, ttft_s, tpot_s, e2e_s of `request_metrics`. A finished
        answer of one token has no TPOT: that term holds, as in vLLM's goodput.
        """
        held = {
            term: requests[f"{term}_s"].to_numpy(dtype=np.float64) <= limit_s
            for term, limit_s in self.limits_s.items()
        }
        if "tpot" in held:
            finished = (requests["status"] == "finished").to_numpy(dtype=np.bool_)
            longest = requests.get("longest_tokens", requests["output_tokens"])
            held["tpot"] |= finished & (longest.to_numpy() <= 1)
        return held


def goodput(table: pd.DataFrame, measured: pd.DataFrame, window: Window, slo: Slo) -> dict[str, Any]:
    """Good requests a second, by when they finished; shares are of the arrivals, rejected ones included.

    table: `request_metrics` with slo_met; measured: those of its rows that arrived in the window. NaN, and an
    attained of None, where there is nothing to count.
    """
    finished_s = table["finished_s"].to_numpy(dtype=np.float64)
    good_inside = table["slo_met"].to_numpy() & window.holds(finished_s)
    share = _per(int(measured["slo_met"].sum()), len(measured))
    return {
        "requests_per_s": _per(int(good_inside.sum()), window.duration_s),
        "share": share,
        "target": slo.attainment_target,
        "attained": bool(share >= slo.attainment_target) if len(measured) else None,
        "term_shares": {
            term: _per(int(met.sum()), len(measured)) for term, met in slo.terms_met(measured).items()
        },
        "slo": {"name": slo.name, **{f"{term}_ms": getattr(slo, f"{term}_ms") for term in slo.limits_s}},
    }


def _per(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
