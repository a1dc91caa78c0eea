"""Service level objectives (SLO): latency limits of a request and the share that must meet them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import longest_tokens
from sim.records.requests import RequestLog, Status
from sim.records.table import AnyTable, column

TERMS = ("ttft", "tpot", "e2e")
WORKLOAD_TERMS = {
    "publish": "the workload says nothing of what clients see; choose workload=clients with "
    "workload@workload.of=..., limit slo.ttft_ms instead",
    "task": "the workload has no tasks; choose one that has, such as workload=agentic, limit "
    "slo.e2e_ms instead",
}
"""Latencies that only some workloads provide (`sim.workload.base`), and the advice if one does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Latency limits in milliseconds, None for no limit; a request is good if it finishes within all of them.

    publish_ms: time to publish, of workloads with clients. task_ms: latency of the whole task that a request
    belongs to, of workloads with tasks; a call counts as good if its task does. attainment_target: the share
    of arrivals that must be good, 0.9 in DistServe (OSDI 2024), 0.99 in MLPerf. name: used in reports.
    """

    name: str = ""
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    publish_ms: float | None = None
    task_ms: float | None = None
    attainment_target: float = 0.9

    def __post_init__(self) -> None:
        keys = [f"{term}_ms" for term in (*TERMS, *WORKLOAD_TERMS)]
        given = [key for key in keys if getattr(self, key) is not None]
        if not given:
            raise ValueError(f"no limit given: set at least one of {', '.join(keys)}")
        for key in given:
            limit_ms = getattr(self, key)
            if not (limit_ms > 0 and math.isfinite(limit_ms)):
                raise ValueError(f"{key}={limit_ms}: must be a finite number > 0 ms, or null for no limit")
        if not 0 < self.attainment_target <= 1:
            raise ValueError(f"attainment_target={self.attainment_target}: must be in (0, 1], 0.9 for 90 %")

    @property
    def limits_s(self) -> dict[str, float]:
        """Limits that are set, in seconds, by latency (`TERMS`, then `WORKLOAD_TERMS`)."""
        limits_ms = {term: getattr(self, f"{term}_ms") for term in (*TERMS, *WORKLOAD_TERMS)}
        return {term: limit_ms / 1e3 for term, limit_ms in limits_ms.items() if limit_ms is not None}

    @property
    def request_limits_s(self) -> dict[str, float]:
        """Limits of latencies that every request has, in seconds: those of `TERMS` that are set."""
        return {term: limit_s for term, limit_s in self.limits_s.items() if term in TERMS}

    @property
    def workload_terms(self) -> tuple[str, ...]:
        """Limited latencies that only some workloads provide: those of `WORKLOAD_TERMS` that are set."""
        return tuple(term for term in self.limits_s if term in WORKLOAD_TERMS)

    def met(self, requests: AnyTable) -> NDArray[np.bool_]:
        """Returns which requests are good: finished within every limit. Reads the columns of `terms_met`."""
        finished: NDArray[np.bool_] = column(requests, "status") == "finished"
        for held in self.terms_met(requests).values():
            finished = finished & held
        return finished

    def is_met(self, log: RequestLog, request_id: int) -> bool:
        """Returns whether an ended request meets the limits of `TERMS`.

        A workload's own latencies are known only after the run.
        """
        if log.status[request_id] != Status.finished:
            return False
        ttft_s = log.first_token_s[request_id] - log.arrival_s[request_id]
        e2e_s = log.last_token_s[request_id] - log.arrival_s[request_id]
        num_tokens = log.longest_tokens[request_id]
        tpot_s = (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0
        latencies_s = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}
        return all(latencies_s[term] <= limit_s for term, limit_s in self.request_limits_s.items())

    def stages_met(self, log: RequestLog, request_id: int) -> tuple[bool, bool]:
        """Returns whether the prefill and the decode of an ended request met their limits.

        TTFT belongs to the prefill and TPOT to the decode; a missed E2E is attributed to the stage that took
        longer.
        """
        limits_s, arrival_s = self.request_limits_s, log.arrival_s[request_id]
        first_s, last_s = log.first_token_s[request_id], log.last_token_s[request_id]
        prefill_s, decode_s = first_s - arrival_s, last_s - first_s
        gaps = max(log.longest_tokens[request_id] - 1, 1)
        prefill_met = prefill_s <= limits_s.get("ttft", math.inf)
        decode_met = decode_s / gaps <= limits_s.get("tpot", math.inf)
        if prefill_s + decode_s > limits_s.get("e2e", math.inf):
            return prefill_met and prefill_s < decode_s, decode_met and prefill_s >= decode_s
        return prefill_met, decode_met

    def terms_met(self, requests: AnyTable) -> dict[str, NDArray[np.bool_]]:
        """Returns, for each limit, which requests meet it; a request without the latency (NaN) does not.

        Reads status, output_tokens or longest_tokens, and the latencies of `request_metrics`. A finished
        output of one token has no TPOT and meets the TPOT limit, as in vLLM's goodput.
        """
        held = {
            term: column(requests, f"{term}_s", np.float64) <= limit_s
            for term, limit_s in self.limits_s.items()
        }
        if "tpot" in held:
            finished = column(requests, "status") == "finished"
            held["tpot"] |= finished & (longest_tokens(requests) <= 1)
        return held


def check_no_workload_terms(slo: Slo | None, command: str) -> None:
    """Raises ValueError if an SLO limits a latency that only a simulated workload provides."""
    for term in WORKLOAD_TERMS:
        if slo is not None and term in slo.limits_s:
            raise ValueError(
                f"slo.{term}_ms={slo.limits_s[term] * 1e3:g}: {command} knows TTFT, TPOT and E2E of "
                f"single requests only; limit these, and set slo.{term}_ms=null"
            )
