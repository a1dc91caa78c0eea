"""Sections that the parts of a mix add, from parts of the records of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.folds.sections import SectionFold
from sim.metrics.window import Window
from sim.metrics.workload_records import WorkloadRecords


class PartFolds(NamedTuple):
    """The accumulators of a part of a mix. place: its number among the parts."""

    place: int
    folds: list[SectionFold]


class MixFold:
    """The section `by_part`. rows_of: returns which requests belong to a part."""

    def __init__(
        self,
        parts: Mapping[str, PartFolds],
        num_parts: int,
        rows_of: Callable[[str, WorkloadRecords], NDArray[np.bool_]],
    ) -> None:
        self._parts = dict(parts)
        self._num_parts = num_parts
        self._rows_of = rows_of
        self._num_added = dict.fromkeys(parts, 0)

    @property
    def needs_tokens(self) -> bool:
        """Returns whether a part reads iterations and gaps."""
        return any(fold.needs_tokens for part in self._parts.values() for fold in part.folds)

    @property
    def lack(self) -> str | None:
        """Returns why the sections of a part cannot be computed; None: they can."""
        lacks = (fold.lack for part in self._parts.values() for fold in part.folds)
        return next((lack for lack in lacks if lack is not None), None)

    def add(self, records: WorkloadRecords) -> None:
        """Adds the requests of all parts, in the order of their ids."""
        for name, (place, folds) in self._parts.items():
            first = self._num_added[name]
            own = records.part(self._rows_of(name, records), name, place, self._num_parts, first)
            self._num_added[name] += len(own.requests)
            for fold in folds:
                fold.add(own)

    def merge(self, other: MixFold) -> None:
        """Adds the requests of other, which is not changed."""
        for name, part in self._parts.items():
            for mine, theirs in zip(part.folds, other._parts[name].folds, strict=True):
                mine.merge(theirs)

    def figures(self, window: Window) -> Mapping[str, Any]:
        """Returns the section; none if no part has any."""
        found: dict[str, dict[str, Any]] = {}
        for name, part in self._parts.items():
            sections: dict[str, Any] = {}
            for fold in part.folds:
                sections |= fold.figures(window)
            if sections:
                found[name] = sections
        return {"by_part": found} if found else {}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out how requests are divided: the copy can be merged only."""
        return {name: value for name, value in vars(self).items() if name != "_rows_of"}
