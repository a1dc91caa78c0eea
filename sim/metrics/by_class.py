"""Computes the metrics of a run for each class of requests: per priority and per tenant.

If all requests are of one class, the summary of the run already describes it. ITL and output tokens/s are
missing here because the records of gaps between tokens do not name the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window, times
from sim.metrics.distributions import Kept
from sim.metrics.figure import EndedRun, Figure, FigureSetting, Part
from sim.metrics.measured import add_goodput, goodput_figures
from sim.metrics.output import COUNTS, add_status_counts
from sim.metrics.slo import Slo
from sim.records.table import AnyTable, column, joined

MAX_CLASSES = 20
"""Number of reported classes per kind: the ones with the most requests. A service may have many tenants."""
MAX_KEPT = 256
"""Maximum number of classes per kind in a streaming run; with more, the metrics of this kind are omitted."""
LATENCIES = ("ttft", "tpot", "e2e", "queue")


class ClassFigures:
    """Sums and distributions of one class."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.whole = kept.totals()
        self.forget_measured()

    def forget_measured(self) -> None:
        """Drops everything inside the window."""
        self.inside = self._kept.totals()
        self.latencies = {name: self._kept.values() for name in LATENCIES}

    def add(self, table: AnyTable, window: Window, slo: Slo | None) -> None:
        """Adds requests of this class. table: `request_metrics`."""
        measured = table[window.holds(times(table, "arrival_s"))]
        add_status_counts(self.whole, table)
        finished = column(table, "status") == "finished"
        self.inside.add("finished", window.holds(times(table, "finished_s")) & finished)
        first_inside = window.holds(times(table, "first_token_s"))
        self.inside.add("input_tokens", column(table, "prompt_tokens")[first_inside])
        self.inside.add("preemptions", column(measured, "preemptions"))
        if slo is not None:
            add_goodput(self.inside, table, measured, window, slo)
        for name, values in self.latencies.items():
            values.add(times(measured, f"{name}_s"))

    def merge(self, other: ClassFigures) -> None:
        """Adds the requests of other, which is not changed."""
        self.whole.merge(other.whole)
        self.inside.merge(other.inside)
        for name, values in self.latencies.items():
            values.merge(other.latencies[name])

    def value(self, window: Window, slo: Slo | None) -> dict[str, Any]:
        """Returns the metrics of the class. Rates are per second of the window; NaN if it is empty."""
        seconds = window.duration_s if window.duration_s > 0 else float("nan")
        return {
            "requests": {name: self.whole[name] for name in COUNTS},
            **{name: values.describe() for name, values in self.latencies.items()},
            "throughput": {
                "requests_per_s": self.inside["finished"] / seconds,
                "input_tokens_per_s": self.inside["input_tokens"] / seconds,
            },
            "goodput": None if slo is None else goodput_figures(self.inside, window, slo),
            "preemptions": self.inside["preemptions"],
        }


class ByClass(Figure):
    """Metrics per priority or tenant: a dictionary from class to metrics, if there are several classes.

    Counts by status cover the whole run, as in the summary; latencies, shares and preemptions cover the
    requests that arrived in the window; rates cover the events in the window. Priorities are sorted ascending
    (the smallest is served first); tenants are sorted by their number of requests, largest first.

    Example: with 3 requests of priority 0 and one of priority 7, by_priority is {"0": ..., "7": ...}.
    """

    kind: ClassVar[str]

    def __init__(self, setting: FigureSetting) -> None:
        super().__init__(setting)
        self.has_too_many = False
        self._classes: dict[Any, ClassFigures] = {}
        self._tables: list[AnyTable] = []
        """Complete tables, whose rows are divided once the largest classes are known."""

    def add(self, part: Part) -> None:
        table = part.requests
        if self.kind not in table or self.has_too_many or not len(table):
            return
        if self.kept.is_exact:
            self._tables.append(table)
            return
        numbers, names = _numbered(table, self.kind)
        if len(self._classes.keys() | set(names)) > MAX_KEPT:
            self._give_up()
        else:
            self._divide(table, numbers, dict(enumerate(names)), part.window, part.setting.slo)

    def merge(self, other: ByClass) -> None:
        self._tables += other._tables
        names = self._classes.keys() | other._classes.keys()
        if self.has_too_many or other.has_too_many or len(names) > MAX_KEPT:
            self._give_up()
            return
        for name, figures in other._classes.items():
            self._classes.setdefault(name, ClassFigures(self.kept)).merge(figures)

    def forget_measured(self) -> None:
        for figures in self._classes.values():
            figures.forget_measured()

    def value(self, run: EndedRun) -> dict[str, Any]:
        """Returns the classes; none if there is only one class, or too many."""
        slo = run.setting.slo
        if self._tables:
            return self._of_tables(run.window, slo)
        if len(self._classes) < 2:
            return {}
        size = {name: int(figures.whole["arrived"]) for name, figures in self._classes.items()}
        return {
            str(name): self._classes[name].value(run.window, slo) for name in largest_classes(self.kind, size)
        }

    def _of_tables(self, window: Window, slo: Slo | None) -> dict[str, Any]:
        """Returns the largest classes of complete tables."""
        table = self._tables[0] if len(self._tables) == 1 else joined(self._tables)
        numbers, names = _numbered(table, self.kind)
        if len(names) < 2:
            return {}
        size = dict(zip(names, np.bincount(numbers).tolist(), strict=True))
        largest = largest_classes(self.kind, size)
        numbers_of = {names.index(name): name for name in largest}
        self._classes = {}
        self._divide(table, numbers, numbers_of, window, slo)
        return {str(name): self._classes[name].value(window, slo) for name in largest}

    def _divide(
        self,
        table: AnyTable,
        numbers: NDArray[np.int64],
        names: Mapping[int, Any],
        window: Window,
        slo: Slo | None,
    ) -> None:
        """Adds the rows of classes. names: by number."""
        for number, name in names.items():
            part = table if len(names) == 1 else table[numbers == number]
            self._classes.setdefault(name, ClassFigures(self.kept)).add(part, window, slo)

    def _give_up(self) -> None:
        self.has_too_many = True
        self._classes.clear()


class ByPriority(ByClass):
    """The metrics of each priority class."""

    name = "by_priority"
    kind = "priority"


class ByTenant(ByClass):
    """The figures of each tenant."""

    name = "by_tenant"
    kind = "tenant"


def _numbered(table: AnyTable, kind: str) -> tuple[NDArray[np.int64], list[Any]]:
    """Returns the number of the class of each request, and the classes by number."""
    number_of: dict[Any, int] = {}
    numbers = [number_of.setdefault(name, len(number_of)) for name in column(table, kind).tolist()]
    return np.array(numbers, np.int64), list(number_of)


def largest_classes(kind: str, size: Mapping[Any, int]) -> list[Any]:
    """Returns the classes that are reported, in their order. size: number of requests by class."""
    largest = sorted(size, key=lambda name: (-size[name], name))[:MAX_CLASSES]
    return sorted(largest) if kind == "priority" else largest
