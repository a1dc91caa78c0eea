"""Runs over time as curves that can be compared: requests in flight, running and waiting, and KV use.

Each quantity is read from the best source that the real runs have: iterations, a server's log, or the
requests' timestamps. The simulated run is read in the same way, but from its iterations instead of a log. In
timestamps, a request runs from its first scheduling to its last token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.validate.fidelity.measured import Measured
from sim.metrics.definitions import Times
from sim.metrics.series import mean_and_max_over_time

NUM_BUCKETS = 500

QUANTITIES = {
    "in_flight": "requests in flight",
    "running": "requests running",
    "waiting": "requests waiting",
    "kv_use_share": "KV blocks in use",
}
STATE_COLUMNS = {"running": "running", "waiting": "waiting", "kv_use_share": "kv_blocks_used"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One quantity of all runs, averaged over equal time spans; arrays are [B], one per real run in reals.

    time_s: middles of the spans. source: where the real runs' values were read. difference: mean absolute
    difference over time between the simulated run and the mean of the real runs; noise: the same between two
    real runs, the largest of all pairs, NaN for a single run.
    """

    name: str
    title: str
    source: str
    time_s: Times
    simulated: Times
    reals: tuple[Times, ...]

    @property
    def real(self) -> Times:
        return np.asarray(np.mean(self.reals, axis=0), dtype=np.float64)

    @property
    def real_mean(self) -> float:
        return float(self.real.mean())

    @property
    def simulated_mean(self) -> float:
        return float(self.simulated.mean())

    @property
    def difference(self) -> float:
        return float(np.abs(self.simulated - self.real).mean())

    @property
    def noise(self) -> float:
        pairs = itertools.combinations(self.reals, 2)
        return max((float(np.abs(one - other).mean()) for one, other in pairs), default=math.nan)


def curves(simulated: Measured, reals: Sequence[Measured], num_buckets: int = NUM_BUCKETS) -> list[Curve]:
    """Returns the quantities that all real runs have, from 0 s to the end of the last run."""
    end_s = max(run.end_s for run in (simulated, *reals))
    if not end_s > 0:
        return []
    edges_s = np.linspace(0.0, end_s, num_buckets + 1)
    found = []
    for name, title in QUANTITIES.items():
        source = _common_source(name, reals)
        own = _source_of(name, simulated, source)
        if source is None or own is None:
            continue
        found.append(
            Curve(
                name=name,
                title=title,
                source=source,
                time_s=(edges_s[:-1] + edges_s[1:]) / 2,
                simulated=_values(name, simulated, own, edges_s),
                reals=tuple(_values(name, run, source, edges_s) for run in reals),
            )
        )
    return found


def _common_source(name: str, reals: Sequence[Measured]) -> str | None:
    known = [set(_sources(name, run)) for run in reals]
    shared = set.intersection(*known)
    return next((source for source in ("iterations", "log", "requests") if source in shared), None)


def _source_of(name: str, simulated: Measured, source: str | None) -> str | None:
    """Returns the simulated values' source if the real ones come from `source`."""
    wanted = "iterations" if source == "log" else source
    return wanted if wanted in _sources(name, simulated) else None


def _sources(name: str, run: Measured) -> list[str]:
    """Returns the sources of a quantity that a run has."""
    found = []
    if name in STATE_COLUMNS and run.iterations is not None and len(run.iterations):
        has_total = name != "kv_use_share" or bool(run.num_kv_blocks)
        if STATE_COLUMNS[name] in run.iterations and has_total:
            found.append("iterations")
    if run.samples is not None and name in run.samples and run.samples[name].notna().any():
        found.append("log")
    if name == "in_flight" or (name in ("running", "waiting") and run.requests["scheduled_s"].notna().any()):
        found.append("requests")
    return found


def _values(name: str, run: Measured, source: str, edges_s: Times) -> Times:
    if source == "iterations":
        return _of_iterations(name, run, edges_s)
    if source == "log":
        assert run.samples is not None
        return _of_samples(run.samples, name, edges_s)
    begins, ends = {
        "in_flight": ("arrival_s", "last_token_s"),
        "waiting": ("arrival_s", "scheduled_s"),
        "running": ("scheduled_s", "last_token_s"),
    }[name]
    end_s = _column(run.requests, ends)
    if "finished_s" in run.requests:  # rejected and aborted requests have left
        gone = run.requests["status"].isin(["rejected", "aborted"]).to_numpy()
        end_s = np.where(gone, _column(run.requests, "finished_s"), end_s)
    return between(_column(run.requests, begins), end_s, edges_s)


def between(begin_s: Times, end_s: Times, edges_s: Times) -> Times:
    """Computes the mean number of begun and not ended items per bucket; NaN: never. [N], [N] -> [B].

    One item from 1 s to 3 s and buckets of 2 s from 0 s give 0.5 and 0.5.
    """
    begun = ~np.isnan(begin_s)
    begin_s, end_s = begin_s[begun], np.where(np.isnan(end_s[begun]), np.inf, end_s[begun])
    return (_integral(begin_s, edges_s) - _integral(end_s, edges_s)) / np.diff(edges_s)


def _integral(moments_s: Times, edges_s: Times) -> Times:
    """Computes the seconds since each time, summed over all times, that fall into each bucket."""
    ordered = np.sort(moments_s[np.isfinite(moments_s)])
    upto = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, edges_s, side="right")
    return np.diff(count * edges_s - upto[count])


def _of_iterations(name: str, run: Measured, edges_s: Times) -> Times:
    """Returns the sum over replicas; for KV use, their mean."""
    assert run.iterations is not None
    total = np.zeros(len(edges_s) - 1)
    for _, rows in (
        run.iterations.groupby("replica") if "replica" in run.iterations else [(0, run.iterations)]
    ):
        mean, _ = mean_and_max_over_time(
            _column(rows, "start_s"), _column(rows, "duration_s"), _column(rows, STATE_COLUMNS[name]), edges_s
        )
        total += mean
    if name == "kv_use_share":
        return total / (float(run.num_kv_blocks or 1) * run.num_replicas)
    return total


def _of_samples(samples: pd.DataFrame, name: str, edges_s: Times) -> Times:
    """Averages samples, each of which stands for the time nearest to it; 0 outside."""
    time_s, value = _column(samples, "time_s"), np.nan_to_num(_column(samples, name))
    middles_s = (time_s[1:] + time_s[:-1]) / 2
    borders_s = np.concatenate(([2 * time_s[0] - middles_s[0]], middles_s, [time_s[-1]]))
    mean, _ = mean_and_max_over_time(borders_s[:-1], np.diff(borders_s), value, edges_s)
    return mean


def to_json(curve: Curve) -> Mapping[str, object]:
    """Returns figures and points as plain data, rounded to six digits."""

    def rounded(values: NDArray[np.float64]) -> list[float]:
        return [float(f"{value:.6g}") for value in values]

    return {
        "name": curve.name,
        "title": curve.title,
        "source": curve.source,
        "simulated_mean": curve.simulated_mean,
        "real_mean": curve.real_mean,
        "mean_absolute_difference": curve.difference,
        "noise": None if math.isnan(curve.noise) else curve.noise,
        "time_s": rounded(curve.time_s),
        "simulated": rounded(curve.simulated),
        "reals": [rounded(values) for values in curve.reals],
    }


def _column(table: pd.DataFrame, name: str) -> Times:
    return table[name].to_numpy(dtype=np.float64)
