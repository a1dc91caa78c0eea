"""The figures by which two runs are compared, computed in the same way for both.

Rates are per second from the first arrival to the last token. KV use and the numbers of running and waiting
requests are compared as curves: `experiments.validate.fidelity.curves`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.validate.fidelity.measured import Measured
from sim.metrics.definitions import describe
from sim.metrics.slo import Slo

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A figure. family and statistic: key of its threshold; unit: s, req/s or tok/s."""

    name: str
    label: str
    family: str
    statistic: str
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledSlo:
    """An SLO with scaled limits, as in DistServe's attainment over SLO scale (OSDI 2024)."""

    scale: float
    slo: Slo

    @property
    def label(self) -> str:
        return f"goodput, SLO {self.slo.name}".strip()

    @property
    def limits(self) -> str:
        return ", ".join(f"{LATENCIES[term]} {1e3 * s:g} ms" for term, s in self.slo.limits_s.items())


def scaled(slo: Slo | None, scales: Sequence[float]) -> list[ScaledSlo]:
    """Returns the SLO at each scale, nothing without an SLO."""
    if slo is None:
        return []
    return [
        ScaledSlo(
            scale=scale,
            slo=Slo(
                name=f"{slo.name} × {scale:g}".strip(),
                attainment_target=slo.attainment_target,
                **{f"{term}_ms": 1e3 * limit_s * scale for term, limit_s in slo.limits_s.items()},
            ),
        )
        for scale in scales
    ]


def metric_values(run: Measured, slos: Sequence[ScaledSlo]) -> dict[Metric, float]:
    """Computes every figure of a run in SI units; NaN if it does not exist, such as ITL without gaps."""
    table = run.latencies
    values: dict[Metric, float] = {}
    for family, label in LATENCIES.items():
        figures = _description(run, table, family)
        for statistic in STATISTICS:
            metric = Metric(
                name=f"{family}_{statistic}_s",
                label=f"{label} {statistic}",
                family=family,
                statistic=statistic,
                unit="s",
            )
            values[metric] = float(figures[f"{statistic}_s"])
    span_s = _span_s(table)
    finished = (table["status"] == "finished").to_numpy(dtype=np.bool_)
    for name, count, unit in (
        ("requests", float(finished.sum()), "req/s"),
        ("output_tokens", float(table["output_tokens"].sum()), "tok/s"),
    ):
        label = f"throughput, {name.split('_')[-1]}"
        metric = Metric(name=f"{name}_per_s", label=label, family="throughput", statistic=name, unit=unit)
        values[metric] = count / span_s
    for one in slos:
        metric = Metric(
            name=f"goodput_x{one.scale:g}_per_s",
            label=one.label,
            family="goodput",
            statistic=f"x{one.scale:g}",
            unit="req/s",
        )
        values[metric] = float(one.slo.met(table).sum()) / span_s
    return values


def _description(run: Measured, table: pd.DataFrame, family: str) -> dict[str, float | int]:
    if family != "itl":
        return describe(table[f"{family}_s"].to_numpy(dtype=np.float64))
    if run.gaps is None:
        return describe(np.zeros(0))
    return describe(run.gaps.gap_s, run.gaps.gap_count)


def _span_s(table: pd.DataFrame) -> float:
    """Returns the seconds from the first arrival to the last token; NaN if no time passed."""
    span_s = float(table["last_token_s"].max() - table["arrival_s"].min()) if len(table) else 0.0
    return span_s if span_s > 0 else math.nan
