"""The section `intervals` of the summary: confidence intervals of headline figures, from one run alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.definitions import times
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.metrics.measured import Latencies
from sim.metrics.steady import sections, share_interval
from sim.records.table import column


class Intervals(Figure):
    """Intervals by the keys of the figures in the summary.

    Each has low, high and batches, or in `lack` the reason why there is no interval.
    """

    name = "intervals"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self._start_s = setting.start_s
        self.forget_measured()

    def forget_measured(self) -> None:
        super().forget_measured()
        self.rates = self.kept.rates(self._start_s)
        self.met = self.kept.shares()

    def merge(self, other: Intervals) -> None:
        super().merge(other)
        self.rates.merge(other.rates)
        self.met.merge(other.met)

    def add(self, part: Part) -> None:
        requests, rates = part.requests, self.rates
        finished_s = times(requests, "finished_s")
        rates.count("finished", finished_s[(column(requests, "status") == "finished")])
        samples = column(requests, "samples", np.int64) if "samples" in requests else None
        rates.count("tokens", times(requests, "first_token_s"), samples)
        rates.count("tokens", part.gap_end_s, part.gap_count)
        if "kept_tokens" in part.iterations:
            rates.count("tokens", part.ends_s, column(part.iterations, "kept_tokens"))
        if part.setting.slo is not None:
            measured = part.measured
            met = times(measured, "slo_met")
            self.inside.add("met", met > 0)
            self.met.add_requests(column(measured, "request_id", np.int64), times(measured, "arrival_s"), met)
            rates.count("met", finished_s[column(requests, "slo_met", np.bool_)])

    def value(self, run: EndedRun) -> dict[str, Any]:
        latencies: Latencies = run.figures[Latencies.name]
        series = {name: latency.series() for name, latency in latencies.of_requests.items()}
        throughput = {
            "requests_per_s": self.rates.interval("finished", run.window),
            "output_tokens_per_s": self.rates.interval("tokens", run.window),
        }
        if run.setting.slo is None:
            return sections(series, throughput)
        share = share_interval(self.met.series(), int(self.inside["met"]))
        return sections(
            series,
            throughput,
            {"share": share, "requests_per_s": self.rates.interval("met", run.window)},
        )
