"""Slots of KV memory that were held and never filled, from parts of the records of a run."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.folds.batches import Ints
from sim.metrics.folds.exact import ExactTotals

Floats = NDArray[np.float64]


class _Seconds:
    """The last iterations of a replica: their seconds, and how many slots each of them held in vain.

    Arrays begin with iteration `first`. The slots are kept as differences between an iteration and the one
    before, because a row of `RunRecords.unfilled` is a range of iterations.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.inside_s: Floats = np.zeros(0)
        self.steps: Ints = np.zeros(0, np.int64)
        self.held = 0
        """Slots that the iteration before `first` held in vain."""

    def reach(self, end: int) -> None:
        """Makes room up to iteration end - 1, and for the step after it."""
        missing = end - self.first - len(self.inside_s)
        if missing > 0:
            self.inside_s = np.append(self.inside_s, np.zeros(missing))
        missing = end - self.first + 1 - len(self.steps)
        if missing > 0:
            self.steps = np.append(self.steps, np.zeros(missing, np.int64))

    def take(self, end: int, totals: ExactTotals) -> None:
        """Moves the slot-seconds of the iterations before `end` to the totals."""
        num_taken = min(end - self.first, len(self.inside_s))
        if num_taken <= 0:
            return
        self.reach(self.first + num_taken)
        held = self.held + np.cumsum(self.steps[:num_taken])
        totals.add("unfilled_s", self.inside_s[:num_taken] * held)
        self.held = int(held[-1])
        self.first += num_taken
        self.inside_s, self.steps = self.inside_s[num_taken:], self.steps[num_taken:]


class UnfilledFold:
    """Slot-seconds of slots that were never filled: `sim.metrics.waste.never_filled_s`.

    A row of `RunRecords.unfilled` comes when its slots are freed, so the seconds of iterations are kept until
    no row can begin before them (`RecordChunk.unfilled_since`), or to the end.
    """

    def __init__(self) -> None:
        self.totals = ExactTotals()
        self._replicas: dict[int, _Seconds] = {}

    def add_iterations(self, iterations: pd.DataFrame, inside_s: Floats) -> None:
        """Adds iterations with their seconds inside the window; those of a replica need not be in order."""
        if not len(iterations):
            return
        replica, number = (iterations[name].to_numpy(np.int64) for name in ("replica", "iteration"))
        order = np.argsort(replica, kind="stable")
        found, starts = np.unique(replica[order], return_index=True)
        for index, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            own = number[rows]
            seconds = self._of(index, int(own.min()))
            seconds.reach(int(own.max()) + 1)
            seconds.inside_s[own - seconds.first] = inside_s[rows]

    def add_rows(self, unfilled: Ints) -> None:
        """Adds rows of `RunRecords.unfilled`, [n, 4]."""
        for index in np.unique(unfilled[:, 0]).tolist():
            _, first, end, num_slots = unfilled[unfilled[:, 0] == index].T
            seconds = self._of(index, int(first.min()))
            seconds.reach(int(end.max()))
            np.add.at(seconds.steps, first - seconds.first, num_slots)
            np.subtract.at(seconds.steps, end - seconds.first, num_slots)

    def drop(self, since: Ints, late: pd.DataFrame) -> None:
        """Adds up the iterations before `since`, [R], and before those that are added later."""
        upto = since.copy()
        np.minimum.at(upto, late["replica"].to_numpy(np.int64), late["iteration"].to_numpy(np.int64))
        for index, seconds in self._replicas.items():
            seconds.take(int(upto[index]), self.totals)

    def merge(self, other: UnfilledFold) -> None:
        """Adds the records of other, which is not changed.

        Both may have iterations of one replica only if none of these has been dropped.
        """
        self.totals.merge(other.totals)
        for index, theirs in other._replicas.items():
            mine = self._of(index, theirs.first)
            mine.reach(theirs.first + len(theirs.inside_s))
            at = theirs.first - mine.first
            mine.inside_s[at : at + len(theirs.inside_s)] += theirs.inside_s
            mine.reach(theirs.first + len(theirs.steps) - 1)
            mine.steps[at : at + len(theirs.steps)] += theirs.steps
            mine.held += theirs.held

    def slot_seconds(self) -> float:
        """Returns the slot-seconds so far."""
        totals = ExactTotals()
        totals.merge(self.totals)
        for seconds in self._replicas.values():
            copied = _Seconds(seconds.first)
            copied.inside_s, copied.steps, copied.held = seconds.inside_s, seconds.steps, seconds.held
            copied.take(copied.first + len(copied.inside_s), totals)
        return totals["unfilled_s"]

    def _of(self, index: int, first: int) -> _Seconds:
        """Returns the seconds of a replica, with room for iterations from `first` on."""
        seconds = self._replicas.setdefault(index, _Seconds(first))
        if first < seconds.first:
            missing = seconds.first - first
            seconds.inside_s = np.append(np.zeros(missing), seconds.inside_s)
            seconds.steps = np.append(np.zeros(missing, np.int64), seconds.steps)
            seconds.first = first
        return seconds
