"""Sections of the summary, and latencies for an SLO, that a workload adds to the figures of a run.

A workload that adds sections has a method `new_section`. One whose requests have latencies that the engine
does not know, such as that of a whole task, has `new_latencies`, and names them in `slo_terms`. All are found
in a workload and in those inside it: `of` of a workload around another one, and the parts of a mix.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from sim.metrics.distributions import Kept
from sim.metrics.own_latencies import OwnLatency
from sim.metrics.sections import SectionFigure


@runtime_checkable
class HasFigures(Protocol):
    """A workload that adds sections to the summary."""

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> SectionFigure | None:
        """Returns an accumulator of the sections; None: the workload has none after all.

        in_shards: whether several accumulators have the requests of a run. kept: what it is made of.
        """
        ...


@runtime_checkable
class HasLatencies(Protocol):
    """A workload whose requests have latencies that an SLO can limit."""

    @property
    def slo_terms(self) -> frozenset[str]:
        """Names of the latencies; see `sim.metrics.slo.WORKLOAD_TERMS`."""
        ...

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> OwnLatency:
        """Returns what computes the latencies.

        in_shards: as for `HasFigures.new_section`. terms: the latencies that are wanted.
        """
        ...


def own_sections(workload: object, *, seed: int, in_shards: bool, kept: Kept) -> list[SectionFigure]:
    """Returns accumulators of the sections that a workload and those inside it add, the innermost first."""
    if workload is None:
        return []
    found = own_sections(getattr(workload, "of", None), seed=seed, in_shards=in_shards, kept=kept)
    if isinstance(workload, HasFigures):
        section = workload.new_section(seed=seed, in_shards=in_shards, kept=kept)
        found += [] if section is None else [section]
    return found


def own_latencies(
    workload: object, *, seed: int, in_shards: bool, terms: Collection[str]
) -> list[OwnLatency]:
    """Returns what computes the latencies that a workload and those inside it know, the innermost first."""
    if workload is None:
        return []
    found = own_latencies(getattr(workload, "of", None), seed=seed, in_shards=in_shards, terms=terms)
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
