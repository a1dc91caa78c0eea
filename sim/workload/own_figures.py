"""Sections of the summary, and latencies for an SLO, that a workload adds to the figures of a run.

A workload that adds sections has a method `figures`, and `new_fold` for runs without whole tables. One whose
requests have latencies that the engine does not know, such as that of a whole task, has `latencies`, and
`new_latencies` for runs without whole tables, and names them in `slo_terms`. All are found in a workload and
in those inside it: `of` of a workload around another one, and the parts of a mix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sim.metrics.workload_records import WorkloadRecords

if TYPE_CHECKING:
    from sim.metrics.folds.latencies import LatencyFold
    from sim.metrics.folds.sections import SectionFold  # of runs that stream


@runtime_checkable
class HasFigures(Protocol):
    """A workload that adds sections to the summary."""

    def figures(self, records: WorkloadRecords, *, seed: int) -> Mapping[str, Any]:
        """Returns the sections by name."""
        ...

    def new_fold(self, *, seed: int, in_shards: bool) -> SectionFold | None:
        """Returns an accumulator of the same sections; None: the workload has none after all.

        in_shards: whether several accumulators have the requests of a run.
        """
        ...


@runtime_checkable
class HasLatencies(Protocol):
    """A workload whose requests have latencies that an SLO can limit."""

    @property
    def slo_terms(self) -> frozenset[str]:
        """Names of the latencies; see `sim.metrics.slo.WORKLOAD_TERMS`."""
        ...

    def latencies(self, records: WorkloadRecords, *, seed: int) -> Mapping[str, NDArray[np.float64]]:
        """Returns, by name, the latency of each request in seconds; NaN: it has none."""
        ...

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> LatencyFold:
        """Returns what computes the same latencies from parts of the records.

        in_shards: as for `HasFigures.new_fold`. terms: the latencies that are wanted.
        """
        ...


def own_figures(workload: object, records: WorkloadRecords, *, seed: int) -> dict[str, Any]:
    """Returns the sections of a workload and of those inside it (`of`); the outer ones take precedence."""
    if workload is None:
        return {}
    found = own_figures(getattr(workload, "of", None), records, seed=seed)
    if isinstance(workload, HasFigures):
        found |= workload.figures(records, seed=seed)
    return found


def own_folds(workload: object, *, seed: int, in_shards: bool) -> list[SectionFold]:
    """Returns accumulators of the sections of `own_figures`, from the innermost to the outermost."""
    if workload is None:
        return []
    found = own_folds(getattr(workload, "of", None), seed=seed, in_shards=in_shards)
    if isinstance(workload, HasFigures):
        fold = workload.new_fold(seed=seed, in_shards=in_shards)
        found += [] if fold is None else [fold]
    return found


def own_latencies(workload: object, records: WorkloadRecords, *, seed: int) -> dict[str, NDArray[np.float64]]:
    """Returns the latencies of a workload and of those inside it (`of`); the outer ones take precedence."""
    if workload is None:
        return {}
    found = own_latencies(getattr(workload, "of", None), records, seed=seed)
    if isinstance(workload, HasLatencies):
        found |= workload.latencies(records, seed=seed)
    return found


def own_latency_folds(
    workload: object, *, seed: int, in_shards: bool, terms: Collection[str]
) -> list[LatencyFold]:
    """Returns what computes the latencies of `own_latencies`, from the innermost to the outermost."""
    if workload is None:
        return []
    found = own_latency_folds(getattr(workload, "of", None), seed=seed, in_shards=in_shards, terms=terms)
    if isinstance(workload, HasLatencies) and not workload.slo_terms.isdisjoint(terms):
        found.append(workload.new_latencies(seed=seed, in_shards=in_shards, terms=terms))
    return found


def own_slo_terms(workload: object) -> frozenset[str]:
    """Returns the names of the latencies that `own_latencies` returns."""
    if workload is None:
        return frozenset()
    terms = own_slo_terms(getattr(workload, "of", None))
    return terms | workload.slo_terms if isinstance(workload, HasLatencies) else terms


def adds_figures(workload: object) -> bool:
    """Returns whether a workload, or one inside it, adds sections to the summary."""
    inside = getattr(workload, "of", None)
    return isinstance(workload, HasFigures) or (inside is not None and adds_figures(inside))
