"""Determines the warm-up of a run and confidence intervals of its figures from this run alone.

The methods are in `sim.metrics.steady`. The warm-up is determined from the series of TTFT, which reflects the
queue, and of TPOT, which reflects the batch, of the requests in order of arrival. E2E follows from both and
varies too much with the length of the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.confidence import CONFIDENCE
from sim.metrics.definitions import PERCENTILES
from sim.metrics.steady import MEAN, Batched, Figure, RunInterval, interval_of, percentile, warm_up
from sim.records.table import AnyTable, column

SERIES = ("ttft", "tpot")
"""Latencies from which the warm-up is determined."""
LATENCIES = ("ttft", "tpot", "e2e")


class FoundWarmUp(NamedTuple):
    """A warm-up that was determined from a run, and the evidence for it."""

    warmup_s: float
    """0 if nothing is cut."""
    evidence: dict[str, Any]
    """Section `warmup` of the summary."""


def find_warm_up(requests: AnyTable) -> FoundWarmUp:
    """Determines the warm-up by MSER-5: it ends with the arrival of the first request in the steady state.

    Nothing is cut if one of the series does not settle. requests: `request_metrics` of the whole run.
    """
    in_order = requests.take(np.argsort(column(requests, "arrival_s", np.float64), kind="stable"))
    series = {name: column(in_order, f"{name}_s", np.float64) for name in SERIES}
    found = {name: warm_up(values) for name, values in series.items()}
    # If all answers have one token, there is no TPOT.
    asked = {name: found[name] for name, values in series.items() if not np.isnan(values).all()}
    is_settled = bool(asked) and all(one.is_settled for one in asked.values())
    num_cut = max((one.num_values for one in asked.values()), default=0) if is_settled else 0
    return FoundWarmUp(
        float(column(in_order, "arrival_s")[num_cut]) if num_cut else 0.0,
        {
            "method": "MSER-5",
            "settled": is_settled,
            "requests": num_cut,
            "of_requests": len(in_order),
            **{
                name: {
                    "settled": one.is_settled,
                    "requests": one.num_values,
                    "mean_before_s": _mean(series[name][: one.num_values]),
                    "mean_after_s": _mean(series[name][one.num_values :]),
                }
                for name, one in asked.items()
            },
        },
    )


def sections(
    latencies: Mapping[str, Batched],
    throughput: Mapping[str, RunInterval],
    goodput: Mapping[str, RunInterval] | None = None,
) -> dict[str, Any]:
    """Returns the section `intervals` of the summary."""
    found = {
        name: {key: interval_of(series, figure) for key, figure in _FIGURES.items()}
        for name, series in latencies.items()
    }
    found["throughput"] = dict(throughput)
    if goodput is not None:
        found["goodput"] = dict(goodput)
    plain = {section: {key: _to_json(one) for key, one in keys.items()} for section, keys in found.items()}
    return {"confidence": CONFIDENCE, **plain}


_FIGURES: Mapping[str, Figure] = {"mean_s": MEAN, **{f"p{q}_s": percentile(q) for q in PERCENTILES}}


def share_interval(series: Batched, num_met: int) -> RunInterval:
    """Computes the interval of a share; a share of 0 or 1 has a one-sided bound at a distance of 3 / n.

    series: 1 for each request that counts, 0 for each other one; num_met: number of the former.

    This rule of three approximates 1 - 0.05^(1 / n) for n independent requests. Source: Hanley and
    Lippman-Hand, If nothing goes wrong, is everything all right?, JAMA 249, 1983.
    """
    if not series.count or 0 < num_met < series.count:
        return interval_of(series)
    beyond = min(3 / series.count, 1.0)
    all_met = num_met > 0
    return RunInterval(float(all_met), 1 - beyond if all_met else 0.0, 1.0 if all_met else beyond, 0)


def _to_json(one: RunInterval) -> dict[str, Any]:
    return {
        "low": one.low,
        "high": one.high,
        "batches": one.num_batches,
        "lack": None if one.lack is None else one.lack.value,
    }


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
