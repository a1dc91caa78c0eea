"""Simulates a candidate with a number of replicas on the traffic of each seed, and measures its figures.

A process keeps the traffic of the last seeds in memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.capacity.settings import CapacitySettings
from experiments.study.longer_traffic import last_begin_s, longer_traffic
from experiments.study.seeds import DRAWING, draws
from experiments.study.steady_state import Lack, lack_of
from experiments.study.trace_runs import TraceRun, trace_interval
from sim.metrics.confidence import Interval
from sim.metrics.result import RunResult
from sim.metrics.slo import Slo
from sim.records.table import column, to_pandas
from sim.settings.scenario import run
from sim.setup.replica_bounds import Demand, least_limit
from sim.setup.scenario import Scenario
from sim.workload.base import BeginsByRate, Source
from sim.workload.listed import ListedSource, busiest_window, listed, repeated
from sim.workload.modified import faster

KEPT = 6
"""Number of traffics that a process keeps in memory."""


class Run(NamedTuple):
    """Figures of a simulation with one seed."""

    share: float
    """Share of all requests within the SLO; for a run that was ended early, an upper bound."""
    is_cut: bool
    """True if the run was ended early because the target was out of reach."""
    rate_per_s: float
    """Arrivals per second."""
    term_shares: Mapping[str, float]
    """Term -> share of the requests within its limit."""
    term_limits_s: Mapping[str, float]
    """Term -> the smallest limit that the target's share of the requests meets, in seconds."""
    loosened_s: Mapping[str, float]
    """Term -> the smallest limit with which the whole SLO is attained, in seconds; inf if there is none."""
    figures: Mapping[str, float]
    """Values of `FIGURES`, NaN if one does not exist, and `at_target` of each term of the SLO."""
    waits: Mapping[str, float]
    """Cause -> mean time that a request waited, in seconds."""
    batch: tuple[float, float]
    """Means over iterations with decodes: decoding sequences, and context tokens of each."""
    notes: tuple[str, ...]
    intervals: Mapping[str, Interval] = {}
    """Of a trace: intervals of the share and of the figures of single requests, by name."""
    lack: Lack | None = None
    """Why the run does not show a steady state; None if it does."""
    num_requests: int = 0


FIGURES = (
    "usd_per_million_output_tokens",
    "output_tokens_per_s",
    "goodput_per_s",
    "tpot_p50_s",
    "watts",
    "gpu_busy",
    "mfu",
    "mbu",
    "kv_peak",
    "bill_usd_per_hour",
)


def at_target(term: str) -> str:
    """Returns the name of the figure with the latency at the percentile of the SLO's target, in seconds."""
    return f"{term}_at_target_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Task that simulates the seeds in turn; with stop, it ends after the first seed that misses the SLO."""

    name: str
    scenario: Scenario
    """Scenario of the candidate; its number of replicas is replaced."""
    replicas: int
    load: float
    seeds: tuple[int, ...]
    window_s: float | None
    stop: bool = True
    num_requests: int | None = None
    """Number of requests of a longer, or shorter, run of the same traffic; None: the planned window."""
    is_trace: bool = False
    """True if all seeds give the same runs, so that their intervals come from blocks of their requests."""

    def run(self) -> list[Run]:
        """Simulates the seeds one after the other and returns their figures."""
        runs = []
        for seed in self.seeds:
            runs.append(self._run(seed))
            if self.stop and not keeps(runs[-1], self.scenario.slo):
                break
        return runs

    def _run(self, seed: int) -> Run:
        scenario = replace(reseeded(self.scenario, seed), replicas=self.replicas, load=self.load)
        is_whole = not (scenario.metrics.warmup_s or scenario.metrics.cooldown_s)
        scenario = replace(scenario, sim=replace(scenario.sim, stop_missed=self.stop and is_whole))
        source: Source | None = sessions_of(replace(scenario, load=1.0))
        has_sessions, period = source is not None, None
        if self.num_requests is not None and (has_sessions or self._is_whole(seed)):
            scenario, source, period = longer_traffic(replace(scenario, load=1.0), self.num_requests)
            scenario = replace(scenario, load=self.load)
        elif source is None:
            source, _ = traffic(self.scenario, seed, self.window_s)
            if self.num_requests is not None:
                period, source = len(source.listed), repeated(source, self.num_requests)
        until_s = last_begin_s(source) / self.load
        result = run(scenario, source if self.load == 1 else faster(source, self.load))
        found = _measured(result, self.replicas * self.scenario.layout.num_devices)
        target = 1.0 if scenario.slo is None else scenario.slo.attainment_target
        lack = lack_of(to_pandas(result.requests), until_s, has_sessions=has_sessions, target=target)
        if self.is_trace and not found.is_cut:
            found = found._replace(intervals=_intervals(result, found, target, period))
        return found._replace(lack=lack, num_requests=len(result.requests))

    def _is_whole(self, seed: int) -> bool:
        """Returns whether the planned window is all of the workload's traffic, which then can be drawn on."""
        planned, start_s = traffic(self.scenario, seed, self.window_s)
        last_s = planned.last_arrival_s or 0.0
        return start_s == 0 and (self.window_s is None or last_s < 0.999 * self.window_s)


def reseeded(scenario: Scenario, seed: int) -> Scenario:
    """Returns the scenario with another seed, as composing it with seed=... would."""
    parts: dict[str, Any] = {
        name: replace(part, seed=seed)
        for name in DRAWING
        if getattr(part := getattr(scenario, name), "seed", None) == scenario.seed
    }
    return replace(scenario, seed=seed, **parts)


def distinct_seeds(scenarios: Sequence[Scenario], settings: CapacitySettings) -> tuple[int, ...]:
    """Returns the seeds that give different runs of at least one of the scenarios, which share a workload.

    A trace, for example, is the same with every seed. Raises ValueError if the traffic cannot be read.
    """
    if any(draws(scenario) for scenario in scenarios):
        return settings.seeds
    found: set[int] = set()
    for scenario in {scenario.max_model_len: scenario for scenario in scenarios}.values():
        own: list[int] = []
        for seed in settings.seeds:
            here, _ = traffic(scenario, seed, settings.window_s)
            if all(here.listed != traffic(scenario, other, settings.window_s)[0].listed for other in own):
                own.append(seed)
        found.update(own)
    return tuple(seed for seed in settings.seeds if seed in found)


def keeps(one: Run, slo: Slo | None) -> bool:
    """Returns whether the run attains the SLO."""
    assert slo is not None
    return not one.is_cut and one.share >= slo.attainment_target


def traffic(scenario: Scenario, seed: int, window_s: float | None) -> tuple[ListedSource, float]:
    """Returns the requests of a seed in the planned window, and the second at which the window begins.

    Raises ValueError if the workload cannot be read.
    """
    scales = (scenario.prompt_scale, scenario.output_scale)
    key = (pickle.dumps(scenario.workload), seed, scenario.max_model_len, window_s, scales)
    found: tuple[ListedSource, float] = _kept(_traffic, key, lambda: _read(scenario, seed, window_s))
    return found


def sessions_of(scenario: Scenario) -> Source | None:
    """Returns the traffic of a scenario if requests follow ended ones, as those of an agent do; else None.

    Such traffic is simulated anew in every run, because times of later requests depend on the fleet.
    """
    source = scenario.source()
    return source if isinstance(source, BeginsByRate) else None


def demand_of(scenario: Scenario, settings: CapacitySettings, seed: int) -> Demand:
    """Returns the demand of a seed's traffic, for bounds."""
    return Demand.of(traffic(scenario, seed, settings.window_s)[0])


def _read(scenario: Scenario, seed: int, window_s: float | None) -> tuple[ListedSource, float]:
    source = listed(replace(scenario, seed=seed, load=1.0).source())
    return (source, 0.0) if window_s is None else busiest_window(source, window_s)


_traffic: dict[Hashable, Any] = {}


def _kept(known: dict[Hashable, Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the known value of a key, or makes it; the values used last are kept."""
    found = known.pop(key) if key in known else make()
    known[key] = found
    while len(known) > KEPT:
        known.pop(next(iter(known)))
    return found


def _measured(result: RunResult, num_devices: int) -> Run:
    summary, slo, requests = result.summary, result.slo, to_pandas(result.requests)
    assert slo is not None
    goodput, cut = summary["goodput"], summary["missed"]
    share = goodput["share"]
    judged = {term: _judged(result, term) for term in slo.limits_s}
    energy = summary["energy"] or {}
    figures = {
        "usd_per_million_output_tokens": summary["cost"]["usd_per_million_output_tokens"],
        "output_tokens_per_s": summary["throughput"]["output_tokens_per_s"],
        "goodput_per_s": goodput["requests_per_s"],
        "tpot_p50_s": summary["tpot"]["p50_s"],
        "watts": energy.get("mean_device_w"),
        "gpu_busy": summary["gpu_busy"],
        "mfu": summary["mfu"],
        "mbu": summary["mbu"],
        "kv_peak": summary["kv"]["peak_use_share"],
        "bill_usd_per_hour": None
        if summary["bill_usd"] is None
        else 3600 * summary["bill_usd"] / max(summary["simulated_s"], 1e-9),
    }
    plain = {name: float("nan") if value is None else float(value) for name, value in figures.items()}
    plain["watts"] *= num_devices
    term_limits_s = {
        term: least_limit(values, slo.attainment_target) if len(values) else float("inf")
        for term, values in judged.items()
    }
    plain |= {at_target(term): limit_s for term, limit_s in term_limits_s.items()}
    return Run(
        share=1 - cut["missed"] / cut["requests"] if cut else float(share),
        is_cut=cut is not None,
        rate_per_s=len(requests) / max(float(requests["arrival_s"].max()), 1e-9),
        term_shares={
            term: float((values <= slo.limits_s[term]).mean()) if len(values) else 0.0
            for term, values in judged.items()
        },
        term_limits_s=term_limits_s,
        loosened_s={term: float("inf") if cut else _loosened_s(requests, slo, term) for term in slo.limits_s},
        figures=plain,
        waits={cause: value or 0.0 for cause, value in summary["waiting"]["by_cause_s"].items()},
        batch=_batch(result),
        notes=tuple(summary["notes"]),
    )


def _intervals(result: RunResult, found: Run, target: float, period: int | None) -> dict[str, Interval]:
    """Returns the intervals of the figures of single requests of one run of a trace, by name in `Run`."""
    run = TraceRun.of(result)
    figures = {
        "share": ("goodput.share", found.share),
        "goodput_per_s": ("goodput.requests_per_s", found.figures["goodput_per_s"]),
        "tpot_p50_s": ("tpot.p50_s", found.figures["tpot_p50_s"]),
        **{
            at_target(term): (f"{term}.p{100 * target:g}_s", limit_s)
            for term, limit_s in found.term_limits_s.items()
            if target < 1 and limit_s < float("inf")
        },
    }
    return {name: trace_interval(run, key, value, period) for name, (key, value) in figures.items()}


def _judged(result: RunResult, term: str) -> NDArray[np.float64]:
    """Returns the values of a term, in seconds, of the requests for which they are known; inf if missed.

    In a run that was ended early, they are not known for all requests.
    """
    requests, slo = to_pandas(result.requests), result.slo
    assert slo is not None
    values = requests[f"{term}_s"].to_numpy(np.float64)
    values = np.where(np.isnan(values), np.where(slo.terms_met(requests)[term], 0.0, np.inf), values)
    if result.records.missed is None:
        return values
    if term == "ttft":  # requests that arrived shortly before the end might still have met the limit
        came_s = requests["arrival_s"].to_numpy(np.float64)
        is_judged = np.isfinite(values) | (came_s <= result.records.end_s - slo.limits_s[term])
    else:
        is_judged = (requests["status"] == "finished").to_numpy(np.bool_)
    judged: NDArray[np.float64] = values[is_judged]
    return judged


def _loosened_s(requests: pd.DataFrame, slo: Slo, term: str) -> float:
    held = slo.terms_met(requests)
    others = (requests["status"] == "finished").to_numpy(np.bool_)
    for name, met in held.items():
        if name != term:
            others = others & met
    values = requests[f"{term}_s"].to_numpy(np.float64)
    values = np.where(np.isnan(values) & held[term], 0.0, values)
    values = np.where(others, values, np.inf)
    return least_limit(values, slo.attainment_target) if len(values) else float("inf")


def _batch(result: RunResult) -> tuple[float, float]:
    iterations = result.records.iterations
    seqs = column(iterations, "decode_seqs", np.float64)
    decoding = seqs > 0
    if not decoding.any():
        return 0.0, 0.0
    context = column(iterations, "decode_context_tokens", np.float64)[decoding].sum()
    total = float(seqs[decoding].sum())
    return total / int(decoding.sum()), float(context) / total
