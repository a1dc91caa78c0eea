"""Checks that a workload knows the latencies that an SLO limits."""

from __future__ import annotations

from sim.metrics.slo import WORKLOAD_TERMS, Slo
from sim.workload.base import Workload
from sim.workload.marked import answers_of, branching_key
from sim.workload.own_figures import own_slo_terms


def check_slo(slo: Slo | None, workload: Workload) -> None:
    """Raises ValueError for a limit of a latency that no request of the workload has."""
    limited = () if slo is None else slo.workload_terms
    for term in limited:
        assert slo is not None
        setting = f"slo.{term}_ms={slo.limits_s[term] * 1e3:g}"
        if term not in own_slo_terms(workload):
            raise ValueError(f"{setting}: {WORKLOAD_TERMS[term]}, or set slo.{term}_ms=null")
        width, key = answers_of(workload).width, f"{branching_key(workload)}.width"
        if term == "publish" and width > 1:
            raise ValueError(
                f"{setting}, {key}={width}: the time to publish of requests with several outputs is not "
                f"known; set {key}=1 or slo.publish_ms=null"
            )
