"""The measured requests of a thinned fleet by replica, in memory that does not grow with the run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.sketch import Sketch
from sim.metrics.thinned import FINISHED, LATENCIES, MET, TOKENS, Floats
from sim.metrics.window import Window


class ThinnedFold:
    """`sim.metrics.thinned.ByReplica` of the requests that were added. num_replicas: of the thinned fleet."""

    def __init__(self, num_replicas: int) -> None:
        self.sketches = {name: [Sketch() for _ in range(num_replicas)] for name in LATENCIES}
        self.totals = [ExactTotals() for _ in range(num_replicas)]
        self.has_sessions = False

    def add(self, table: pd.DataFrame, window: Window) -> None:
        """Adds requests: rows of `request_metrics`. window: from the end of the warm-up on."""
        self.has_sessions = self.has_sessions or bool((table["session_id"] >= 0).any())
        replica = table["replica"].to_numpy(np.int64)
        order = np.argsort(replica, kind="stable")
        ends = np.searchsorted(replica[order], np.arange(len(self.totals) + 1))
        measured = window.holds(table["arrival_s"].to_numpy(np.float64))
        finished = window.holds(table["finished_s"].to_numpy(np.float64))
        finished &= (table["status"] == "finished").to_numpy(np.bool_)
        tokens = table["output_tokens"].to_numpy()
        met = table["slo_met"].to_numpy(np.bool_) if "slo_met" in table else np.zeros(len(table), np.bool_)
        latencies = {name: table[f"{name}_s"].to_numpy(np.float64) for name in LATENCIES}
        for index, totals in enumerate(self.totals):
            rows = order[ends[index] : ends[index + 1]]
            if not len(rows):
                continue
            own, ended = rows[measured[rows]], rows[finished[rows]]
            totals.add("measured", measured[rows])
            totals.add(MET, met[own])
            totals.add(FINISHED, finished[rows])
            totals.add(TOKENS, tokens[ended])
            for name, values in latencies.items():
                self.sketches[name][index].add(values[own])

    def merge(self, other: ThinnedFold) -> None:
        """Adds the requests of other, which is not changed."""
        self.has_sessions = self.has_sessions or other.has_sessions
        for mine, theirs in zip(self.totals, other.totals, strict=True):
            mine.merge(theirs)
        for name, sketches in self.sketches.items():
            for sketch, added in zip(sketches, other.sketches[name], strict=True):
                sketch.merge(added)

    def sums(self, name: str) -> tuple[Floats, Floats]:
        if name in LATENCIES:
            sketches = self.sketches[name]
            sums = np.array([sketch.totals["sum"] for sketch in sketches], np.float64)
            return sums, np.array([sketch.count for sketch in sketches], np.float64)
        counted = "measured" if name == MET else FINISHED
        found = ([float(totals[key]) for totals in self.totals] for key in (name, counted))
        amounts, counts = map(np.array, found)
        return amounts, counts

    def upto(self, name: str, value: float) -> Floats:
        return np.array(
            [
                sketch.share_upto(value) * sketch.count if sketch.count else 0.0
                for sketch in self.sketches[name]
            ]
        )

    def percentiles(self, name: str, q: Sequence[float]) -> Floats:
        whole = Sketch()
        for sketch in self.sketches[name]:
            whole.merge(sketch)
        return whole.percentiles(q)
