"""Service level objectives (SLO): latency limits of a request and the share that must meet them."""

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
    """Latency limits in milliseconds, None for no limit; a request is good if it finishes within all of them.

    attainment_target: the share of arrivals that must be good, 0.9 in DistServe (OSDI 2024), 0.99 in MLPerf.
    name: used in reports.
    """

    name: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    attainment_target: float = 0.9

    def __post_init__(self) -> None:
        given = [f"{term}_ms" for term in TERMS if getattr(self, f"{term}_ms") is not None]
        if not given:
            raise ValueError("no limit given: set at least one of ttft_ms, tpot_ms, e2e_ms")
        for key in given:
            limit_ms = getattr(self, key)
            if not (limit_ms > 0 and math.isfinite(limit_ms)):
                raise ValueError(f"{key}={limit_ms}: must be a finite number > 0 ms, or null for no limit")
        if not 0 < self.attainment_target <= 1:
            raise ValueError(f"attainment_target={self.attainment_target}: must be in (0, 1], 0.9 for 90 %")

    @property
    def limits_s(self) -> dict[str, float]:
        """Limits that are set, in seconds, by latency (ttft, tpot, e2e)."""
        limits_ms = {term: getattr(self, f"{term}_ms") for term in TERMS}
        return {term: limit_ms / 1e3 for term, limit_ms in limits_ms.items() if limit_ms is not None}

    def met(self, requests: pd.DataFrame) -> NDArray[np.bool_]:
        """Returns which requests are good: finished within every limit. Reads the columns of `terms_met`."""
        finished = (requests["status"] == "finished").to_numpy(dtype=np.bool_)
        for held in self.terms_met(requests).values():
            finished = finished & held
        return finished

    def is_met(self, log: RequestLog, request_id: int) -> bool:
        """Returns whether one request, which has ended, is good."""
        if log.status[request_id] != Status.finished:
            return False
        ttft_s = log.first_token_s[request_id] - log.arrival_s[request_id]
        e2e_s = log.last_token_s[request_id] - log.arrival_s[request_id]
        num_tokens = log.longest_tokens[request_id]
        tpot_s = (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        latencies_s = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
        return all(latencies_s[term] <= limit_s for term, limit_s in self.limits_s.items())

    def terms_met(self, requests: pd.DataFrame) -> dict[str, NDArray[np.bool_]]:
        """Returns, for each limit, which requests meet it; a request without the latency (NaN) does not.

        Reads status, output_tokens or longest_tokens, ttft_s, tpot_s, e2e_s of `request_metrics`. A finished
        answer of one token has no TPOT and meets its limit, as in vLLM's goodput.
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
    """Computes goodput and SLO attainment.

    requests_per_s: good requests that finished in the window, per second. share: good requests among those
    that arrived in the window, rejected ones included. table: `request_metrics` with slo_met; measured: its
    rows that arrived in the window. Without arrivals the shares are NaN and attained is None.
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
