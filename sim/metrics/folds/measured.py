"""The accumulators of the measured part of a run, from parts of its records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.definitions import SPEED_PERCENTILES, speed_description
from sim.metrics.folds.batches import Distributions, GroupedSeries, IdGroups, MetSeries
from sim.metrics.folds.bins import Bins
from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.iterations import PoolFolds, add_iteration_sums, ends_s
from sim.metrics.folds.setting import FoldSetting
from sim.metrics.folds.sketch import Sketch
from sim.metrics.folds.times import TimesFold
from sim.metrics.folds.unfilled import UnfilledFold
from sim.metrics.one_run import LATENCIES, sections, share_interval
from sim.metrics.pressure import add_cache_use, add_preemption_use
from sim.metrics.steady import RunInterval, Series
from sim.metrics.summary import add_measured_requests
from sim.metrics.transfers import transferred
from sim.metrics.utilisation import of_pools, seconds_inside
from sim.metrics.window import Window
from sim.records.chunk import RecordChunk

ROWS_AT_ONCE: Final = 1 << 17
"""Iterations that are added together: a chunk has eight times as many, and copies of it would be the peak."""


class MeasuredFold:
    """Sums, distributions, groups of requests and rates over time inside the window, from start_s on."""

    def __init__(self, num_pools: int, start_s: float, *, plots: bool = False) -> None:
        self.totals = ExactTotals()
        self.pools = PoolFolds(num_pools)
        self.times = TimesFold(num_pools) if plots else None
        """Seconds by kind of iteration, which only the page shows."""
        self.unfilled: UnfilledFold | None = None
        """None as long as no replica reserves KV ahead."""
        self.sketches = {name: Sketch() for name in (*LATENCIES, "queue", "itl", "speed", "transfer")}
        self.groups = {name: IdGroups() for name in (*LATENCIES, "met")}
        self.distributions = {name: Distributions() for name in LATENCIES}
        self.rates = Bins(start_s)
        self.late: list[tuple[pd.DataFrame, NDArray[np.int64]]] = []
        """Iterations that ended after the last request so far, and the pools of the replicas."""
        self.late_events: list[tuple[pd.DataFrame, NDArray[np.int64]]] = []
        """Events after the last request so far, such as stores of KV, and the pools of the replicas."""

    def ended(self, end_s: float, setting: FoldSetting) -> MeasuredFold:
        """Returns a copy that has also late events and iterations up to end_s, the end of the run."""
        found = deepcopy(self)
        window = Window(self.rates.start_s, end_s)
        found._add_timed(window, np.inf, setting)
        return found

    def add(self, chunk: RecordChunk, table: pd.DataFrame, setting: FoldSetting) -> None:
        """Adds a part of the records. table: `request_metrics` of its requests."""
        window = self.window
        self._add_requests(table, window, setting)
        if chunk.unfilled is not None:
            self.unfilled = self.unfilled or UnfilledFold()
            self.unfilled.add_rows(chunk.unfilled)
        self.late.append((chunk.iterations, chunk.pool_by_replica))
        self.late_events.append((chunk.events, chunk.pool_by_replica))
        self._add_timed(window, chunk.until_s, setting)
        if self.unfilled is not None and chunk.unfilled_since is not None:
            late = pd.concat([chunk.iterations[:0], *(iterations for iterations, _ in self.late)])
            self.unfilled.drop(chunk.unfilled_since, late)
        gaps_inside = chunk.gap_count * window.holds(chunk.gap_end_s)
        self.totals.add("gap_tokens", gaps_inside)
        self.sketches["itl"].add(chunk.gap_s, gaps_inside)
        self.rates.count("tokens", chunk.gap_end_s, chunk.gap_count)
        if "kept_tokens" in chunk.iterations:
            kept = chunk.iterations["kept_tokens"].to_numpy()
            self.rates.count("tokens", ends_s(chunk.iterations), kept)

    @property
    def window(self) -> Window:
        """The window as far as it is known: its end is that of the run."""
        return Window(self.rates.start_s, np.inf)

    def _add_timed(self, window: Window, until_s: float, setting: FoldSetting) -> None:
        """Adds the iterations and events up to a time, and leaves the later ones."""
        late, self.late = self.late, []
        for iterations, pool_by_replica in _pieces(late):
            # A last iteration may end after the run, which has then ended with its last request.
            is_late = ends_s(iterations) > until_s
            if is_late.any():
                self.late.append((iterations[is_late], pool_by_replica))
                iterations = iterations[~is_late]
            add_iteration_sums(
                self.totals, self.pools, iterations, pool_by_replica, window, setting, self.times
            )
            if self.unfilled is not None:
                self.unfilled.add_iterations(iterations, seconds_inside(iterations, window))
        late_events, self.late_events = self.late_events, []
        for events, pool_by_replica in late_events:
            is_late = _times(events, "time_s") > until_s
            if is_late.any():
                self.late_events.append((events[is_late], pool_by_replica))
                events = events[~is_late]
            self._add_events(events, pool_by_replica, window, setting)

    def _add_events(
        self,
        events: pd.DataFrame,
        pool_by_replica: NDArray[np.int64],
        window: Window,
        setting: FoldSetting,
    ) -> None:
        bytes_per_token = of_pools(setting.pool_records, "kv_bytes_per_token", pool_by_replica)
        for add in (add_cache_use, add_preemption_use):
            add(self.totals, events, window, bytes_per_token)

    def _add_requests(self, table: pd.DataFrame, window: Window, setting: FoldSetting) -> None:
        measured = table[window.holds(_times(table, "arrival_s"))]
        add_measured_requests(self.totals, table, measured, window, setting.slo)
        self.totals.add("measured", np.ones(len(measured), np.bool_))
        ids = measured["request_id"].to_numpy(np.int64)
        assert (np.diff(ids) > 0).all(), "the requests are not in order of their ids"
        for name in (*LATENCIES, "queue"):
            values = _times(measured, f"{name}_s")
            self.sketches[name].add(values)
            if name in LATENCIES:
                self.groups[name].add(ids, values)
                self.distributions[name].add(ids, values)
        tpot_s = _times(measured, "tpot_s")
        self.sketches["speed"].add(1 / tpot_s[tpot_s > 0])
        moved = transferred(measured)
        if len(moved):
            self.sketches["transfer"].add(_times(moved, "kv_transfer_s"))
        samples = table["samples"].to_numpy(np.int64) if "samples" in table else None
        self.rates.count("tokens", _times(table, "first_token_s"), samples)
        finished_s = _times(table, "finished_s")
        is_finished = (table["status"] == "finished").to_numpy(np.bool_)
        self.rates.count("finished", finished_s[is_finished])
        if setting.slo is not None:
            self.groups["met"].add(ids, measured["slo_met"].to_numpy(np.float64))
            self.rates.count("met", finished_s[table["slo_met"].to_numpy(np.bool_)])

    def merge(self, other: MeasuredFold) -> None:
        """Adds the records of other, which is not changed."""
        self.totals.merge(other.totals)
        self.pools.merge(other.pools)
        self.rates.merge(other.rates)
        if self.times is not None and other.times is not None:
            self.times.merge(other.times)
        if other.unfilled is not None:
            self.unfilled = self.unfilled or UnfilledFold()
            self.unfilled.merge(other.unfilled)
        self.late += other.late
        self.late_events += other.late_events
        for name, sketch in self.sketches.items():
            sketch.merge(other.sketches[name])
        for name, groups in self.groups.items():
            groups.merge(other.groups[name])
        for name, distributions in self.distributions.items():
            distributions.merge(other.distributions[name])

    @property
    def unfilled_s(self) -> float:
        """Slot-seconds of KV slots that were held and never filled."""
        return 0.0 if self.unfilled is None else self.unfilled.slot_seconds()

    def latencies(self) -> dict[str, Any]:
        """Returns the statistics of the latencies of all requests, and of the gaps between tokens."""
        return {name: self.sketches[name].describe() for name in (*LATENCIES, "queue", "itl")}

    def per_user(self) -> dict[str, Any]:
        """Returns the section `per_user`."""
        speed = self.sketches["speed"]
        return speed_description(speed.count, speed.mean, speed.percentiles(SPEED_PERCENTILES))

    def intervals(self, window: Window, setting: FoldSetting) -> dict[str, Any]:
        """Returns the section `intervals`, from groups of consecutive request ids and bins of time."""
        latencies = {
            name: GroupedSeries(self.groups[name], self.distributions[name], self.sketches[name])
            for name in LATENCIES
        }
        throughput = {
            "requests_per_s": self._rate("finished", window),
            "output_tokens_per_s": self._rate("tokens", window),
        }
        if setting.slo is None:
            return sections(latencies, throughput)
        share = share_interval(MetSeries(self.groups["met"]), int(self.totals["slo_met"]))
        return sections(latencies, throughput, {"share": share, "requests_per_s": self._rate("met", window)})

    def _rate(self, name: str, window: Window) -> RunInterval:
        """Computes the interval of a rate from the bins that are wholly inside the window."""
        rates = self.rates
        num_bins = int(window.duration_s / rates.width_s)
        found = Series(rates.of(name, num_bins) / rates.width_s).interval()
        if not num_bins:
            return found
        # The interval is put around the rate of the whole window, with the rest of it after the last bin.
        rate = int(rates.sums[name].sum()) / window.duration_s if name in rates.sums else 0.0
        moved = rate - found.value
        return found._replace(value=rate, low=found.low + moved, high=found.high + moved)


def _pieces(
    tables: Sequence[tuple[pd.DataFrame, NDArray[np.int64]]],
) -> Iterator[tuple[pd.DataFrame, NDArray[np.int64]]]:
    """Yields the tables in pieces of `ROWS_AT_ONCE`; one without rows is a piece."""
    for table, pool_by_replica in tables:
        for begin in range(0, max(len(table), 1), ROWS_AT_ONCE):
            yield table.iloc[begin : begin + ROWS_AT_ONCE], pool_by_replica


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)
