"""The measured part of a run: the latencies of its requests, its goodput, and confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.definitions import Window, longest_tokens, measured_window, per, times
from sim.metrics.dialects import MetricsSettings
from sim.metrics.distributions import Distribution
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.metrics.slo import Slo
from sim.metrics.steady import LATENCIES, FoundWarmUp, find_warm_up, sections, share_interval
from sim.metrics.sums import TableTotals, Totals
from sim.records.run import RunRecords
from sim.records.table import AnyTable, column

T = TypeVar("T", bound=AnyTable)
SHOWN = ("ttft", "tpot", "itl", "e2e")
"""Latencies that the plots show, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The requests of a run, and the part of it without warm-up and cool-down."""

    table: AnyTable
    """`request_metrics` of the whole run."""
    requests: AnyTable
    """The rows of `table` that arrived in the window."""
    window: Window
    warmup_s: float
    cooldown_s: float
    found: FoundWarmUp | None
    """The warm-up that was determined from the run (warmup_s=auto)."""

    @property
    def trimmed(self) -> dict[str, Any]:
        """The sections `trimmed` and `warmup` of the summary."""
        return {
            "trimmed": trimmed(
                self.window, self.warmup_s, self.cooldown_s, len(self.table) - len(self.requests)
            ),
            "warmup": None if self.found is None else self.found.evidence,
        }


class Latencies(Figure):
    """TTFT, TPOT, E2E, queue time and ITL, and the output tokens/s per user.

    Covers requests that arrived in the window, and gaps between tokens that ended in it.
    """

    name = "latencies"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.forget_measured()

    def forget_measured(self) -> None:
        super().forget_measured()
        self.of_requests = {name: self.kept.latency() for name in LATENCIES}
        self.others = {name: self.kept.values() for name in ("queue", "itl", "speed")}

    def merge(self, other: Latencies) -> None:
        super().merge(other)
        for name, latency in self.of_requests.items():
            latency.merge(other.of_requests[name])
        for name, values in self.others.items():
            values.merge(other.others[name])

    def add(self, part: Part) -> None:
        measured = part.measured
        ids, arrival_s = column(measured, "request_id", np.int64), times(measured, "arrival_s")
        self.inside.add("requests", np.ones(len(measured), np.bool_))
        self.whole.add("requests", np.ones(len(part.requests), np.bool_))
        for name, latency in self.of_requests.items():
            latency.add_requests(ids, arrival_s, times(measured, f"{name}_s"))
        self.others["queue"].add(times(measured, "queue_s"))
        self.others["speed"].add(definitions.speeds_of(times(measured, "tpot_s")))
        self.others["itl"].add(part.gap_s, part.gaps_inside)

    @property
    def shown(self) -> dict[str, Distribution]:
        """The distributions of latencies by name, as the plots show them."""
        return {name: self.others["itl"] if name == "itl" else self.of_requests[name] for name in SHOWN}

    def value(self, run: EndedRun) -> dict[str, Any]:
        names = (*LATENCIES, "queue", "itl")
        return {name: (self.of_requests | self.others)[name].describe() for name in names}

    @property
    def num_left_out(self) -> int:
        """Number of requests that arrived outside the window."""
        return int(self.whole["requests"] - self.inside["requests"])

    def per_user(self) -> dict[str, float | int]:
        """Returns the output tokens/s per user."""
        return speed_figures(self.others["speed"])


def speed_figures(speed: Distribution) -> dict[str, float | int]:
    """Returns the statistics of the output tokens/s per user."""
    return definitions.speed_description(
        speed.count, speed.mean, speed.percentiles(definitions.SPEED_PERCENTILES)
    )


def trimmed(window: Window, warmup_s: float, cooldown_s: float, num_left_out: int) -> dict[str, Any]:
    """Returns the section `trimmed` of the summary."""
    return {
        "warmup_s": warmup_s,
        "cooldown_s": cooldown_s,
        "start_s": window.start_s,
        "end_s": window.end_s,
        "requests_left_out": num_left_out,
    }


def measure(
    records: RunRecords,
    metrics: MetricsSettings,
    slo: Slo | None,
    own_s: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> Measured:
    """Returns the measured part of a run by the settings.

    own_s: latencies computed by the workload, by name, in seconds (`sim.workload.base.own_latencies`).
    """
    table = request_metrics(records.requests, slo, own_s)
    found = find_warm_up(table) if metrics.warmup_s == "auto" else None
    warmup_s = metrics.known_warmup_s if found is None else found.warmup_s
    window = measured_window(records.end_s, warmup_s=warmup_s, cooldown_s=metrics.cooldown_s)
    return Measured(
        table=table,
        requests=table[window.holds(times(table, "arrival_s"))],
        window=window,
        warmup_s=warmup_s,
        cooldown_s=metrics.cooldown_s,
        found=found,
    )


def request_metrics(
    requests: T,
    slo: Slo | None,
    own_s: Mapping[str, NDArray[np.float64]] = MappingProxyType({}),
) -> T:
    """Adds the columns ttft_s, tpot_s, e2e_s, queue_s (NaN if missing) and, with an SLO, slo_met.

    own_s: additional latencies, by name, that become columns.
    """
    arrival_s, first_s, last_s = (
        times(requests, f"{name}_s") for name in ("arrival", "first_token", "last_token")
    )
    finished = column(requests, "status") == "finished"
    longest = longest_tokens(requests)
    tpot_s = definitions.tpot_s(first_s, last_s, longest)
    table = requests.assign(
        ttft_s=definitions.ttft_s(arrival_s, first_s),
        tpot_s=np.where(finished, tpot_s, np.nan),
        e2e_s=np.where(finished, definitions.e2e_s(arrival_s, last_s), np.nan),
        queue_s=definitions.queue_s(arrival_s, times(requests, "scheduled_s")),
        **{f"{name}_s": seconds for name, seconds in own_s.items()},
    )
    return table if slo is None else table.assign(slo_met=slo.met(table))


class Goodput(Figure):
    """Goodput and SLO attainment; None without an SLO.

    requests_per_s: good requests that finished in the window, per second. share: share of good requests among
    those that arrived in the window, including rejected ones. Without arrivals the shares are NaN and
    attained is None.
    """

    name = "goodput"

    def add(self, part: Part) -> None:
        if part.setting.slo is not None:
            add_goodput(self.inside, part.requests, part.measured, part.window, part.setting.slo)

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        return None if run.setting.slo is None else goodput_figures(self.inside, run.window, run.setting.slo)


def goodput(table: AnyTable, measured: AnyTable, window: Window, slo: Slo) -> dict[str, Any]:
    """Computes the metrics of `Goodput` of a table.

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
    """Returns the metrics of `Goodput` from its counts."""
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


class Intervals(Figure):
    """Intervals by the keys of the metrics in the summary.

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
