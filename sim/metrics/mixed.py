"""Summary sections and latencies added by the parts of a mix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.workload import SectionFigure, WorkloadRecords

if TYPE_CHECKING:
    from sim.metrics.workload import OwnLatency


class PartFigures(NamedTuple):
    """The accumulators of a part of a mix. place: its number among the parts."""

    place: int
    own: list[SectionFigure]


class MixFigure:
    """The section `by_part`. rows_of: returns which requests belong to a part."""

    def __init__(
        self,
        parts: Mapping[str, PartFigures],
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
        return any(one.needs_tokens for part in self._parts.values() for one in part.own)

    @property
    def lack(self) -> str | None:
        """Returns why the sections of a part cannot be computed; None: they can."""
        lacks = (one.lack for part in self._parts.values() for one in part.own)
        return next((lack for lack in lacks if lack is not None), None)

    def add(self, records: WorkloadRecords) -> None:
        """Adds the requests of all parts, in the order of their ids."""
        for name, (place, every) in self._parts.items():
            first = self._num_added[name]
            own = records.part(self._rows_of(name, records), name, place, self._num_parts, first)
            self._num_added[name] += len(own.requests)
            for one in every:
                one.add(own)

    def merge(self, other: MixFigure) -> None:
        """Adds the requests of other, which is not changed."""
        for name, part in self._parts.items():
            for mine, theirs in zip(part.own, other._parts[name].own, strict=True):
                mine.merge(theirs)

    def value(self, window: Window) -> Mapping[str, Any]:
        """Returns the section; empty if no part has any."""
        found: dict[str, dict[str, Any]] = {}
        for name, part in self._parts.items():
            sections: dict[str, Any] = {}
            for one in part.own:
                sections |= one.value(window)
            if sections:
                found[name] = sections
        return {"by_part": found} if found else {}

    def __getstate__(self) -> dict[str, Any]:
        """Drops the function that divides requests: the copy can only be merged."""
        return {name: value for name, value in vars(self).items() if name != "_rows_of"}


class PartLatencies(NamedTuple):
    """The latencies of a part of a mix. place: its number among the parts."""

    place: int
    own: list[OwnLatency]


class MixLatencies:
    """The latencies of the parts: see `sim.metrics.workload.OwnLatency`.

    Requests of parts that do not compute a latency use `WorkloadRecords.plain_latencies`. terms: names of the
    latencies. rows_of: returns which requests belong to a part.
    """

    def __init__(
        self,
        parts: Mapping[str, PartLatencies],
        num_parts: int,
        rows_of: Callable[[str, WorkloadRecords], NDArray[np.bool_]],
        terms: Sequence[str],
    ) -> None:
        self._parts = dict(parts)
        self._num_parts = num_parts
        self._rows_of = rows_of
        self._terms = terms
        self._num_added = dict.fromkeys(parts, 0)

    @property
    def needs_tokens(self) -> bool:
        """Returns whether a part reads iterations and gaps."""
        return any(one.needs_tokens for part in self._parts.values() for one in part.own)

    @property
    def numbers_matter(self) -> bool:
        """Returns whether a part needs the numbers of its requests."""
        return any(one.numbers_matter for part in self._parts.values() for one in part.own)

    def see(self, records: WorkloadRecords) -> None:
        """Notes requests of all parts."""
        for name, (_, every) in self._parts.items():
            own = self._of_part(name, records, self._rows_of(name, records))
            for one in every:
                one.see(own)

    def known(self, records: WorkloadRecords, open_sessions: Collection[int]) -> NDArray[np.bool_]:
        """Returns the requests whose latencies are known to the part, or not computed by it."""
        known = np.ones(len(records.requests), np.bool_)
        for name, (place, every) in self._parts.items():
            rows = self._rows_of(name, records)
            own = self._of_part(name, records, rows)
            opened = {
                session // self._num_parts for session in open_sessions if session % self._num_parts == place
            }
            for one in every:
                known[rows] &= one.known(own, opened)
        return known

    def latencies(self, records: WorkloadRecords) -> Mapping[str, NDArray[np.float64]]:
        """Returns, by name, the latency of each request in seconds; NaN: it has none."""
        plain = records.plain_latencies()
        found = {term: plain[term].copy() for term in self._terms}
        for name, (_, every) in self._parts.items():
            rows = self._rows_of(name, records)
            own = self._of_part(name, records, rows)
            self._num_added[name] += len(own.requests)
            for one in every:
                for term, seconds in one.latencies(own).items():
                    found[term][rows] = seconds
        return found

    def _of_part(self, name: str, records: WorkloadRecords, rows: NDArray[np.bool_]) -> WorkloadRecords:
        """Returns the records of the requests of a part that have not been passed on yet."""
        place = self._parts[name].place
        return records.part(rows, name, place, self._num_parts, self._num_added[name])
