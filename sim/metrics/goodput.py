"""Goodput and SLO attainment of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.definitions import Window, per, times
from sim.metrics.figure import EndedRun, Figure, Part
from sim.metrics.slo import Slo
from sim.metrics.sums import TableTotals, Totals
from sim.records.table import AnyTable, column


class Goodput(Figure):
    """Goodput and SLO attainment; None without an SLO.

    requests_per_s: good requests that finished in the window, per second. share: good requests among those
    that arrived in the window, rejected ones included. Without arrivals the shares are NaN and attained is
    None.
    """

    name = "goodput"

    def add(self, part: Part) -> None:
        if part.setting.slo is not None:
            add_goodput(self.inside, part.requests, part.measured, part.window, part.setting.slo)

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        return None if run.setting.slo is None else goodput_figures(self.inside, run.window, run.setting.slo)


def goodput(table: AnyTable, measured: AnyTable, window: Window, slo: Slo) -> dict[str, Any]:
    """Computes the figures of `Goodput` of a table.

    table: `request_metrics` with slo_met; measured: its rows that arrived in the window.
    """
    totals = TableTotals()
    add_goodput(totals, table, measured, window, slo)
    return goodput_figures(totals, window, slo)


def add_goodput(totals: Totals, table: AnyTable, measured: AnyTable, window: Window, slo: Slo) -> None:
    """Adds the counts of `Goodput`."""
    finished_s = times(table, "finished_s")
    totals.add("good_inside", column(table, "slo_met") & window.holds(finished_s))
    totals.add("slo_met", column(measured, "slo_met", np.bool_))
    totals.add("slo_measured", np.ones(len(measured), np.bool_))
    for term, met in slo.terms_met(measured).items():
        totals.add(f"slo_{term}_met", met)


def goodput_figures(totals: Totals, window: Window, slo: Slo) -> dict[str, Any]:
    """Returns the figures of `Goodput` from its counts."""
    count = totals["slo_measured"]
    share = per(totals["slo_met"], count)
    return {
        "requests_per_s": per(totals["good_inside"], window.duration_s),
        "share": share,
        "target": slo.attainment_target,
        "attained": bool(share >= slo.attainment_target) if count else None,
        "term_shares": {term: per(totals[f"slo_{term}_met"], count) for term in slo.limits_s},
        "slo": {"name": slo.name, **{f"{term}_ms": getattr(slo, f"{term}_ms") for term in slo.limits_s}},
    }
