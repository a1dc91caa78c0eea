"""Adds up what the plots of report.html show, from parts of the records of a run."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from sim.metrics.folds.bins import Bins
from sim.metrics.folds.points import Points
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import Sketch
from sim.metrics.folds.states import States
from sim.metrics.series import octaves
from sim.metrics.slo import Slo
from sim.metrics.utilisation import KINDS, batch_tokens, iteration_kind, of_pools
from sim.metrics.window import Window
from sim.records.chunk import RecordChunk

MAX_REPLICAS_APART: Final = 2
MAX_REQUEST_POINTS: Final = 3000
MAX_POINTS_PER_KIND: Final = 1200
ALL: Final = "all limits"


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
    """Sums over time and by prompt length, and samples of points; start_s: of the measured part."""

    def __init__(self, start_s: float) -> None:
        self.by_time = Bins(start_s)
        self.whole_run = Bins()
        self.octaves: dict[int, Octave] = {}
        """By the shortest prompt of the octave."""
        self.requests = Points(MAX_REQUEST_POINTS)
        self.iterations = [Points(MAX_POINTS_PER_KIND) for _ in KINDS]
        self.states = States(4, MAX_REPLICAS_APART + 1)

    def add(self, chunk: RecordChunk, table: pd.DataFrame, window: Window, setting: FoldSetting) -> None:
        """Adds a part of the records. table: `request_metrics` of its requests; window: the measured part."""
        first_s = table["first_token_s"].to_numpy(np.float64)
        self.whole_run.count("arrivals", table["arrival_s"].to_numpy(np.float64))
        self.whole_run.count("input_tokens", first_s, table["prompt_tokens"].to_numpy())
        measured = table[window.holds(table["arrival_s"].to_numpy(np.float64))]
        if len(measured):
            self._add_requests(measured, setting.slo)
        self._add_iterations(chunk, window, setting)

    def merge(self, other: PlotsFold) -> None:
        """Adds the records of other, which is not changed."""
        self.by_time.merge(other.by_time)
        self.whole_run.merge(other.whole_run)
        self.requests.merge(other.requests)
        self.states.merge(other.states)
        for mine, theirs in zip(self.iterations, other.iterations, strict=True):
            mine.merge(theirs)
        for lower, octave in other.octaves.items():
            self.octaves.setdefault(lower, Octave()).merge(octave)

    def _add_requests(self, measured: pd.DataFrame, slo: Slo | None) -> None:
        arrival_s, ttft_s = (measured[name].to_numpy(np.float64) for name in ("arrival_s", "ttft_s"))
        held: dict[str, Any] = {}
        if slo is not None:
            held = {ALL: measured["slo_met"].to_numpy(np.bool_), **slo.terms_met(measured)}
        self.by_time.count("requests", arrival_s)
        for name, met in held.items():
            self.by_time.count(name, arrival_s[met])
        lengths = measured["prompt_tokens"].to_numpy(np.int64)
        lower, index = octaves(lengths)
        for place, shortest in enumerate(lower.tolist()):
            rows = index == place
            octave = self.octaves.setdefault(shortest, Octave())
            octave.num += int(rows.sum())
            octave.ttft.add(ttft_s[rows])
            for name, met in held.items():
                octave.met[name] = octave.met.get(name, 0) + int(met[rows].sum())
        began = ~np.isnan(ttft_s)
        ids = measured["request_id"].to_numpy(np.int64)
        self.requests.add(ids[began], lengths[began].astype(np.float64), ttft_s[began])

    def _add_iterations(self, chunk: RecordChunk, window: Window, setting: FoldSetting) -> None:
        iterations = chunk.iterations
        start_s, duration_s = (iterations[name].to_numpy(np.float64) for name in ("start_s", "duration_s"))
        replica, tokens = (
            iterations["replica"].to_numpy(np.int64),
            batch_tokens(iterations).astype(np.float64),
        )
        pool = chunk.pool_by_replica[replica]
        blocks = iterations["kv_blocks_used"].to_numpy(np.float64)
        share = blocks * (100 / of_pools(setting.pool_records, "num_kv_blocks", pool))
        running, waiting = (iterations[name].to_numpy(np.float64) for name in ("running", "waiting"))
        group = np.minimum(replica, MAX_REPLICAS_APART)
        self.states.add(group, start_s, duration_s, [running, waiting, share, tokens])
        number = (replica << 40) + iterations["iteration"].to_numpy(np.int64)
        kind = iteration_kind(iterations)
        kind[start_s + duration_s <= window.start_s] = -1
        for index, points in enumerate(self.iterations):
            rows = np.flatnonzero(kind == index)
            points.add(number[rows], tokens[rows], duration_s[rows])


class Plots(NamedTuple):
    """All that the plots need beside the summary; saved as plots.bin.

    sketches, rates: see `MeasuredFold`.
    """

    sketches: dict[str, Sketch]
    rates: Bins
    more: PlotsFold
