"""Figures by class of requests, from parts of the table of requests."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from sim.metrics.by_class import LATENCIES, add_class, add_status_counts, class_figures, largest_classes
from sim.metrics.folds.exact import ExactTotals
from sim.metrics.folds.sketch import Sketch
from sim.metrics.slo import Slo
from sim.metrics.window import Window

MAX_FOLDED: Final = 256
"""Classes of a kind that are kept; with more, the figures of this kind are left out."""


class ClassFold:
    """Sums and sketches of one class."""

    def __init__(self) -> None:
        self.whole, self.inside = ExactTotals(), ExactTotals()
        self.sketches = {name: Sketch() for name in LATENCIES}

    def add(self, table: pd.DataFrame, window: Window, slo: Slo | None) -> None:
        """Adds requests of this class. table: `request_metrics`."""
        measured = table[window.holds(table["arrival_s"].to_numpy(np.float64))]
        add_status_counts(self.whole, table)
        add_class(self.inside, table, measured, window, slo)
        for name, sketch in self.sketches.items():
            sketch.add(measured[f"{name}_s"].to_numpy(np.float64))

    def merge(self, other: ClassFold) -> None:
        """Adds the requests of other, which is not changed."""
        self.whole.merge(other.whole)
        self.inside.merge(other.inside)
        for name, sketch in self.sketches.items():
            sketch.merge(other.sketches[name])

    def figures(self, window: Window, slo: Slo | None) -> dict[str, Any]:
        """Returns the figures of the class."""
        if window.is_empty:
            nothing = ClassFold()
            nothing.whole = self.whole
            return nothing._figures(window, slo)
        return self._figures(window, slo)

    def _figures(self, window: Window, slo: Slo | None) -> dict[str, Any]:
        latencies = {name: sketch.describe() for name, sketch in self.sketches.items()}
        return class_figures(self.whole, self.inside, latencies, window, slo)


class ClassesFold:
    """The classes of one kind (`sim.metrics.by_class.KINDS`), none once there are more than `MAX_FOLDED`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.has_too_many = False
        self._classes: dict[Any, ClassFold] = {}

    def add(self, table: pd.DataFrame, window: Window, slo: Slo | None) -> None:
        """Adds requests. table: `request_metrics`."""
        if self.kind not in table or self.has_too_many or table.empty:
            return
        numbers, found = pd.factorize(table[self.kind].to_numpy())
        names = found.tolist()
        if len(self._classes.keys() | set(names)) > MAX_FOLDED:
            self._give_up()
            return
        for number, name in enumerate(names):
            part = table if len(names) == 1 else table[numbers == number]
            self._classes.setdefault(name, ClassFold()).add(part, window, slo)

    def merge(self, other: ClassesFold) -> None:
        """Adds the requests of other, which is not changed."""
        names = self._classes.keys() | other._classes.keys()
        if self.has_too_many or other.has_too_many or len(names) > MAX_FOLDED:
            self._give_up()
            return
        for name, fold in other._classes.items():
            self._classes.setdefault(name, ClassFold()).merge(fold)

    def _give_up(self) -> None:
        self.has_too_many = True
        self._classes.clear()

    def figures(self, window: Window, slo: Slo | None) -> dict[str, Any]:
        """Returns the section of the kind; empty if all requests are of one class, or of too many."""
        if len(self._classes) < 2:
            return {}
        size = {name: int(fold.whole["arrived"]) for name, fold in self._classes.items()}
        largest = largest_classes(self.kind, size)
        return {f"by_{self.kind}": {str(name): self._classes[name].figures(window, slo) for name in largest}}
