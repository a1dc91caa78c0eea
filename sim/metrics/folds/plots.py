"""Adds up what the plots of report.html show, from parts of the records of a run."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.folds.bins import Bins
from sim.metrics.folds.drafts import DraftsFold
from sim.metrics.folds.points import Block, Points, PointsByKind, place_of
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import Sketch
from sim.metrics.folds.states import States
from sim.metrics.folds.times import TimesFold
from sim.metrics.series import octave_of
from sim.metrics.slo import Slo
from sim.metrics.utilisation import KINDS, batch_tokens, iteration_kind, of_pools
from sim.metrics.window import Window
from sim.records.chunk import RecordChunk

MAX_REPLICAS_APART: Final = 2
MAX_REQUEST_POINTS: Final = 3000
MAX_POINTS_PER_KIND: Final = 1200
ALL: Final = "all limits"
_BLOCK: Final = 1 << 15
"""Iterations that are added together: their columns stay in the CPU cache."""


class Octave:
    """Requests with prompt lengths of one octave: their TTFT, and how many met the SLO and each limit."""

    def __init__(self) -> None:
        self.num = 0
        self.met: dict[str, int] = {}
        self.ttft = Sketch()

    def merge(self, other: Octave) -> None:
        """Adds the requests of other, which is not changed."""
        self.num += other.num
        for name, count in other.met.items():
            self.met[name] = self.met.get(name, 0) + count
        self.ttft.merge(other.ttft)


class PlotsFold:
    """Sums over time and by prompt length, and samples of points.

    start_s: of the measured part. speculates: whether a pool may speculate.
    """

    def __init__(self, start_s: float, *, speculates: bool = False) -> None:
        self.by_time = Bins(start_s)
        self.whole_run = Bins()
        self.octaves: dict[int, Octave] = {}
        """By the shortest prompt of the octave."""
        self.requests = Points(MAX_REQUEST_POINTS)
        self.iterations = PointsByKind(len(KINDS), MAX_POINTS_PER_KIND)
        self.states = States(4, MAX_REPLICAS_APART + 1)
        self.drafts = DraftsFold(start_s) if speculates else None

    def add(self, chunk: RecordChunk, table: pd.DataFrame, window: Window, setting: FoldSetting) -> None:
        """Adds a part of the records. table: `request_metrics` of its requests; window: the measured part."""
        first_s = table["first_token_s"].to_numpy(np.float64)
        self.whole_run.count("arrivals", table["arrival_s"].to_numpy(np.float64))
        self.whole_run.count("input_tokens", first_s, table["prompt_tokens"].to_numpy())
        self._add_requests(table, window, setting.slo)
        self._add_iterations(chunk, window, setting)

    def merge(self, other: PlotsFold) -> None:
        """Adds the records of other, which is not changed."""
        self.by_time.merge(other.by_time)
        self.whole_run.merge(other.whole_run)
        self.requests.merge(other.requests)
        self.states.merge(other.states)
        self.iterations.merge(other.iterations)
        if self.drafts is not None and other.drafts is not None:
            self.drafts.merge(other.drafts)
        for lower, octave in other.octaves.items():
            self.octaves.setdefault(lower, Octave()).merge(octave)

    def _add_requests(self, table: pd.DataFrame, window: Window, slo: Slo | None) -> None:
        measured = window.holds(table["arrival_s"].to_numpy(np.float64))
        rows = slice(None) if measured.all() else np.flatnonzero(measured)
        arrival_s, ttft_s = (table[name].to_numpy(np.float64)[rows] for name in ("arrival_s", "ttft_s"))
        if not len(arrival_s):
            return
        held: dict[str, NDArray[np.bool_]] = {}
        if slo is not None:
            held = {ALL: table["slo_met"].to_numpy(np.bool_), **slo.terms_met(table)}
            held = {name: met[rows] for name, met in held.items()}
        self.by_time.count("requests", arrival_s)
        for name, met in held.items():
            self.by_time.count(name, arrival_s[met])
        lengths = table["prompt_tokens"].to_numpy(np.int64)[rows]
        exponent = octave_of(lengths)
        order = np.argsort(exponent, kind="stable")
        num = np.bincount(exponent)
        sorted_s = ttft_s[order]
        held = {name: met[order] for name, met in held.items()}
        for place in np.flatnonzero(num).tolist():
            end = int(num[: place + 1].sum())
            own = slice(end - int(num[place]), end)
            octave = self.octaves.setdefault(1 << place, Octave())
            octave.num += int(num[place])
            octave.ttft.add(sorted_s[own])
            for name, met in held.items():
                octave.met[name] = octave.met.get(name, 0) + int(met[own].sum())
        ids = table["request_id"].to_numpy(np.int64)[rows]
        began = np.flatnonzero(
            (place_of(ids) <= self.requests.limits[0]) | (ttft_s >= self.requests.limits[1])
        )
        began = began[~np.isnan(ttft_s[began])]
        self.requests.add(ids[began], lengths[began].astype(np.float64), ttft_s[began])

    def _add_iterations(self, chunk: RecordChunk, window: Window, setting: FoldSetting) -> None:
        percent_per_block = 100 / of_pools(setting.pool_records, "num_kv_blocks", chunk.pool_by_replica)
        if self.drafts is not None:
            self.drafts.add(chunk.iterations)
        self.iterations.add(
            self._block(chunk.iterations[begin : begin + _BLOCK], percent_per_block, window)
            for begin in range(0, len(chunk.iterations), _BLOCK)
        )

    def _block(
        self, iterations: pd.DataFrame, percent_per_block: NDArray[np.float64], window: Window
    ) -> Block:
        """Adds the states of iterations; returns their points. percent_per_block: of the KV, by replica."""
        start_s, duration_s = (iterations[name].to_numpy(np.float64) for name in ("start_s", "duration_s"))
        replica, tokens = iterations["replica"].to_numpy(np.int64), batch_tokens(iterations)
        blocks = iterations["kv_blocks_used"].to_numpy()
        share = blocks * percent_per_block[replica]
        running, waiting = (iterations[name].to_numpy() for name in ("running", "waiting"))
        group = np.minimum(replica, MAX_REPLICAS_APART)
        self.states.add(group, start_s, duration_s, [running, waiting, share, tokens])
        number = (replica << 40) + iterations["iteration"].to_numpy(np.int64)
        points = iteration_kind(iterations), number, tokens, duration_s
        if window.start_s > 0:
            measured = np.flatnonzero(start_s + duration_s > window.start_s)
            return points[0][measured], number[measured], tokens[measured], duration_s[measured]
        return points


class Plots(NamedTuple):
    """All that the plots need beside the summary; saved as plots.bin.

    sketches, rates, times: see `MeasuredFold`.
    """

    sketches: dict[str, Sketch]
    rates: Bins
    more: PlotsFold
    times: TimesFold
