"""Accumulators of the data that the plots of report.html show.

Computing the components of an iteration takes several times as long as all its other metrics, so in streaming
runs a sample represents all iterations. Half of the iterations have level 0, a quarter level 1, and so on, by
their numbers; the sample consists of all iterations from the lowest level at which it is small enough. Each
part of a run includes at least the sample of the whole run, because this level rises with the number of
iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel
from sim.metrics.definitions import Window, times
from sim.metrics.distributions import Distribution, Kept
from sim.metrics.figure import (
    KINDS,
    EndedRun,
    Figure,
    FigureSetting,
    Part,
    PoolHardware,
    batch_tokens,
    component_seconds,
    iteration_kind,
    pieces,
)
from sim.metrics.measured import Latencies
from sim.metrics.series import Bins, Block, Ints, Points, PointsByKind, States, added, octave_of, place_of
from sim.metrics.slo import Slo
from sim.records.run import RecordChunk, RunRecords
from sim.records.table import AnyTable, Table, column

MAX_SAMPLE: Final = 8192
"""Size of the sample in runs that stream."""
_LOG_PLACES: Final = 20
_NUM_LEVELS: Final = _LOG_PLACES + 1
"""Number of levels; enough for 10^10 iterations of a kind, beyond which the sample grows."""
_PER_S: Final = 2.0**30
"""Seconds are added as integers in units of 2^-30 s, so the order of addition does not matter."""


class _PoolTimes:
    """Iterations and seconds of a pool; all arrays are [kinds, levels]."""

    def __init__(self, max_sample: float) -> None:
        self._max_sample = max_sample
        self.counts = _zeros()
        self.busy = _zeros()
        self.components: dict[str, Ints] = {}
        """By component, the seconds of iterations in the sample, and of some at lower levels."""

    @property
    def in_sample(self) -> NDArray[np.bool_]:
        """Returns, for each kind, which levels are in the sample, [kinds, levels]."""
        upwards = np.cumsum(self.counts[:, ::-1], axis=1)[:, ::-1]
        found: NDArray[np.bool_] = upwards <= self._max_sample
        found[:, -1] = True
        return found


class KindTimes:
    """Adds up the busy seconds by kind of iteration (`KINDS`), and within it by component.

    The components are scaled to the recorded duration, so that the seconds of a kind sum to its recorded
    time. max_sample: maximum number of iterations per kind and pool whose components are computed. With more
    iterations, the seconds of a kind are exact, and are divided among its components as in the sample.
    """

    def __init__(self, num_pools: int, max_sample: float) -> None:
        self._pools = [_PoolTimes(max_sample) for _ in range(num_pools)]

    def add(
        self, index: int, iterations: AnyTable, inside_s: NDArray[np.float64], model: IterationModel
    ) -> None:
        """Adds iterations of a pool. inside_s: seconds of each inside the window."""
        pool, rows = self._pools[index], np.flatnonzero(inside_s > 0)
        if not len(rows):
            return
        number, replica = (column(iterations, name, np.int64)[rows] for name in ("iteration", "replica"))
        kind = iteration_kind(iterations)[rows]
        place = kind * _NUM_LEVELS + _levels((replica << 40) + number)
        pool.counts += _sums(place)
        pool.busy += _sums(place, inside_s[rows])
        chosen = np.flatnonzero(pool.in_sample.reshape(-1)[place])
        for piece in pieces(len(chosen)):
            own = rows[chosen[piece]]
            for component, part_s in component_seconds(iterations.take(own), inside_s[own], model):
                sums = pool.components.setdefault(component, _zeros())
                sums += _sums(place[chosen[piece]], part_s)

    def merge(self, other: KindTimes) -> None:
        """Adds the iterations of other, which is not changed."""
        for mine, theirs in zip(self._pools, other._pools, strict=True):
            mine.counts += theirs.counts
            mine.busy += theirs.busy
            for component, sums in theirs.components.items():
                mine.components.setdefault(component, _zeros())[:] += sums

    @property
    def busy_s(self) -> float:
        """Returns the busy seconds of all replicas."""
        return sum(int(pool.busy.sum()) for pool in self._pools) / _PER_S

    @property
    def is_sample(self) -> bool:
        """Returns whether the seconds of components come from a sample."""
        return any(not pool.in_sample[:, 0].all() for pool in self._pools)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Returns the seconds by kind of iteration, and within it by component."""
        found: dict[str, dict[str, float]] = {name: {} for name in KINDS}
        for pool in self._pools:
            chosen = pool.in_sample
            of_sample = {name: (sums * chosen).sum(axis=1) for name, sums in pool.components.items()}
            busy = pool.busy.sum(axis=1)
            for kind, name in enumerate(KINDS):
                whole = int(sum(int(sums[kind]) for sums in of_sample.values()))
                for component, sums in of_sample.items():
                    share = int(sums[kind]) / whole if whole else 0.0
                    own_s = share * int(busy[kind]) / _PER_S
                    found[name][component] = found[name].get(component, 0.0) + own_s
        return found


def _zeros() -> Ints:
    return np.zeros((len(KINDS), _NUM_LEVELS), np.int64)


def _levels(number: NDArray[np.int64]) -> NDArray[np.int8]:
    """Returns the level of each iteration: the number of zeros with which its place begins in binary."""
    return _LEVELS[(place_of(number) >> np.uint64(64 - _LOG_PLACES)).astype(np.int64)]


def _levels_of_places() -> NDArray[np.int8]:
    """Returns the level by the first bits of the place."""
    found = np.zeros(1 << _LOG_PLACES, np.int8)
    for level in range(1, _NUM_LEVELS):
        found[: 1 << (_LOG_PLACES - level)] = level
    return found


_LEVELS: Final = _levels_of_places()


def _sums(place: NDArray[np.int64], seconds: NDArray[np.float64] | None = None) -> Ints:
    """Returns the counts of iterations, or the units of seconds, [kinds, levels]. place: in this array."""
    weights = None if seconds is None else np.rint(seconds * _PER_S)
    sums = np.bincount(place, weights, minlength=len(KINDS) * _NUM_LEVELS)
    return sums.astype(np.int64).reshape(len(KINDS), _NUM_LEVELS)


MAX_REPLICAS_APART: Final = 2
"""With more replicas, their mean and maximum are drawn instead of two lines per replica."""
MAX_REQUEST_POINTS: Final = 3000
MAX_POINTS_PER_KIND: Final = 1200
ALL: Final = "all limits"
_BLOCK: Final = 1 << 15
"""Iterations that are added together: their columns stay in the CPU cache."""
OVER_TIME: Final = ("accepted_tokens", "draft_passes")
BY_BATCH: Final = ("decode_seqs", "kept_tokens", "verified_tokens")


class Octave:
    """Requests with prompt lengths of one octave: their TTFT, and how many met the SLO and each limit."""

    def __init__(self, kept: Kept) -> None:
        self.num = 0
        self.met: dict[str, int] = {}
        self.ttft = kept.values()

    def merge(self, other: Octave) -> None:
        """Adds the requests of other, which is not changed."""
        self.num += other.num
        for name, count in other.met.items():
            self.met[name] = self.met.get(name, 0) + count
        self.ttft.merge(other.ttft)


class Drafts:
    """Sums for the plot of speculation, apart from the acceptance by place; start_s: of the measured part."""

    def __init__(self, start_s: float) -> None:
        self.by_time = Bins(start_s)
        """Sums of the columns `OVER_TIME`."""
        self._by_batch: dict[str, Ints] = {name: np.zeros(0, np.int64) for name in BY_BATCH}

    def add(self, part: Part) -> None:
        """Adds iterations. Those of replicas that do not speculate may lack the columns of drafts."""
        iterations, times_s, measured = part.iterations, part.ends_s, part.ends_inside
        if "draft_passes" in iterations:
            drafting = measured & (column(iterations, "draft_passes") > 0)
            for name in OVER_TIME:
                self.by_time.count(name, times_s[drafting], column(iterations, name)[drafting])
        seqs = column(iterations, "decode_seqs")
        decodes = np.flatnonzero(measured & (seqs > 0))
        for name in BY_BATCH if len(decodes) else ():
            values: NDArray[Any] = column(iterations, name)[decodes] if name in iterations else seqs[:0]
            if len(values):
                sums = np.bincount(seqs[decodes], weights=values).astype(np.int64)
                self._by_batch[name] = added(self._by_batch[name], sums)

    def merge(self, other: Drafts) -> None:
        """Adds the iterations of other, which is not changed."""
        self.by_time.merge(other.by_time)
        for name, sums in other._by_batch.items():
            self._by_batch[name] = added(self._by_batch[name], sums)

    @property
    def has_passes(self) -> bool:
        """Returns whether draft tokens were verified."""
        return bool(self.by_time.sums)

    def by_batch(self) -> Table:
        """Returns the sums of the columns `BY_BATCH`, by the number of sequences in the batch: `seqs`."""
        sums = self._by_batch
        seqs = np.flatnonzero(sums["decode_seqs"])
        every = {name: added(sums[name], np.zeros_like(sums["decode_seqs"]))[seqs] for name in BY_BATCH}
        return Table({"seqs": seqs, **every})


class PlotFigures(Figure):
    """Sums over time and by prompt length, and samples of points."""

    name = "plots"

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self._start_s, self._num_pools = setting.start_s, len(setting.pools)
        self._speculates = setting.speculates
        self.whole_run = Bins()
        """Arrivals, requests that finished, input and output tokens over time."""
        self.states = States(4, MAX_REPLICAS_APART + 1)
        """Four quantities of the replicas over all iterations of the run, including the warm-up."""
        self.forget_measured()

    def forget_measured(self) -> None:
        super().forget_measured()
        self.by_time = Bins(self._start_s)
        """Requests that arrived, and how many of them met the SLO and its limits."""
        self.octaves: dict[int, Octave] = {}
        """By the shortest prompt of the octave."""
        self.requests = Points(MAX_REQUEST_POINTS)
        self.iterations = PointsByKind(len(KINDS), MAX_POINTS_PER_KIND)
        self.times = KindTimes(self._num_pools, inf if self.kept.is_exact else MAX_SAMPLE)
        self.drafts = Drafts(self._start_s) if self._speculates else None

    def merge(self, other: PlotFigures) -> None:
        self.by_time.merge(other.by_time)
        self.whole_run.merge(other.whole_run)
        self.requests.merge(other.requests)
        self.states.merge(other.states)
        self.iterations.merge(other.iterations)
        self.times.merge(other.times)
        if other.drafts is not None:
            self.drafts = self.drafts or Drafts(self._start_s)
            self.drafts.merge(other.drafts)
        for lower, octave in other.octaves.items():
            self.octaves.setdefault(lower, Octave(self.kept)).merge(octave)

    def add(self, part: Part) -> None:
        table, rates = part.requests, self.whole_run
        first_s, finished = times(table, "first_token_s"), (column(table, "status") == "finished")
        samples = column(table, "samples", np.int64) if "samples" in table else None
        rates.count("arrivals", times(table, "arrival_s"))
        rates.count("input_tokens", first_s, column(table, "prompt_tokens"))
        rates.count("finished", times(table, "finished_s")[finished])
        rates.count("tokens", first_s, samples)
        rates.count("tokens", part.gap_end_s, part.gap_count)
        if "kept_tokens" in part.iterations:
            rates.count("tokens", part.ends_s, column(part.iterations, "kept_tokens"))
        self._add_requests(part.measured, part.setting.slo)
        if len(part.iterations):
            self._add_iterations(part)

    def value(self, run: EndedRun) -> None:
        """Returns None: the summary does not contain plot data."""

    def _add_requests(self, table: AnyTable, slo: Slo | None) -> None:
        if not len(table):
            return
        arrival_s, ttft_s = times(table, "arrival_s"), times(table, "ttft_s")
        held: dict[str, NDArray[np.bool_]] = {}
        if slo is not None:
            held = {ALL: column(table, "slo_met", np.bool_), **slo.terms_met(table)}
        self.by_time.count("requests", arrival_s)
        for name, met in held.items():
            self.by_time.count(name, arrival_s[met])
        lengths = column(table, "prompt_tokens", np.int64)
        exponent = octave_of(lengths)
        order = np.argsort(exponent, kind="stable")
        num = np.bincount(exponent)
        sorted_s = ttft_s[order]
        held = {name: met[order] for name, met in held.items()}
        for place in np.flatnonzero(num).tolist():
            end = int(num[: place + 1].sum())
            own = slice(end - int(num[place]), end)
            octave = self.octaves.setdefault(1 << place, Octave(self.kept))
            octave.num += int(num[place])
            octave.ttft.add(sorted_s[own])
            for name, met in held.items():
                octave.met[name] = octave.met.get(name, 0) + int(met[own].sum())
        ids = column(table, "request_id", np.int64)
        began = np.flatnonzero(
            (place_of(ids) <= self.requests.limits[0]) | (ttft_s >= self.requests.limits[1])
        )
        began = began[~np.isnan(ttft_s[began])]
        self.requests.add(ids[began], lengths[began].astype(np.float64), ttft_s[began])

    def _add_iterations(self, part: Part) -> None:
        if self.drafts is None and OVER_TIME[0] in part.iterations:
            self.drafts = Drafts(self._start_s)
        if self.drafts is not None:
            self.drafts.add(part)
        for index, (pool, rows) in enumerate(zip(part.setting.pools, part.rows_by_pool, strict=True)):
            self.times.add(index, part.iterations[rows], part.inside_s[rows], pool.model)
        percent_per_block = 100 / part.by_replica("num_kv_blocks")
        self.iterations.add(
            self._block(
                part.iterations[begin : begin + _BLOCK],
                percent_per_block,
                part.inside_s[begin : begin + _BLOCK] > 0,
            )
            for begin in range(0, len(part.iterations), _BLOCK)
        )

    def _block(
        self, iterations: AnyTable, percent_per_block: NDArray[np.float64], inside: NDArray[np.bool_]
    ) -> Block:
        """Adds the states of iterations; returns their points. percent_per_block: of the KV, by replica."""
        start_s, duration_s = times(iterations, "start_s"), times(iterations, "duration_s")
        replica, tokens = column(iterations, "replica", np.int64), batch_tokens(iterations)
        share = column(iterations, "kv_blocks_used") * percent_per_block[replica]
        running, waiting = (column(iterations, name) for name in ("running", "waiting"))
        group = np.minimum(replica, MAX_REPLICAS_APART)
        self.states.add(group, start_s, duration_s, [running, waiting, share, tokens])
        number = (replica << 40) + column(iterations, "iteration", np.int64)
        points = iteration_kind(iterations), number, tokens, duration_s
        if inside.all():
            return points
        measured = np.flatnonzero(inside)
        return points[0][measured], number[measured], tokens[measured], duration_s[measured]


class Plots(NamedTuple):
    """All data that the plots need in addition to the summary; saved as plots.bin."""

    latencies: dict[str, Distribution]
    """See `sim.metrics.measured.Latencies.shown`."""
    figures: PlotFigures

    @classmethod
    def of(cls, figures: Mapping[str, Figure]) -> Plots:
        """Returns the plot data of the metrics of a run, by name."""
        latencies, plots = figures[Latencies.name], figures[PlotFigures.name]
        assert isinstance(latencies, Latencies)
        assert isinstance(plots, PlotFigures)
        return cls(latencies.shown, plots)


def plots_of(
    records: RunRecords,
    requests: AnyTable,
    window: Window,
    models: Sequence[IterationModel],
    slo: Slo | None,
) -> Plots:
    """Returns the plot data of complete tables. requests: with `request_metrics`. models: one per pool."""
    pools = [PoolHardware(model=model) for model in models]
    setting = FigureSetting(pools=pools, pool_records=records.pools, slo=slo)
    part = Part.of(setting, window, RecordChunk.of(records), requests)
    figures: dict[str, Figure] = {kind.name: kind(setting) for kind in (Latencies, PlotFigures)}
    for figure in figures.values():
        figure.add(part)
    return Plots.of(figures)
