"""Figures that a workload adds to the summary of a run: it has a method `figures` that computes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from sim.metrics.measured import Measured
from sim.records.run import RunRecords


@runtime_checkable
class HasFigures(Protocol):
    """A workload that adds sections to the summary."""

    def figures(self, records: RunRecords, part: Measured, *, seed: int) -> Mapping[str, Any]:
        """Returns the sections by name."""
        ...


def own_figures(workload: object, records: RunRecords, part: Measured, *, seed: int) -> dict[str, Any]:
    """Returns the sections of a workload and of those inside it (`of`); the outer ones take precedence."""
    if workload is None:
        return {}
    found = own_figures(getattr(workload, "of", None), records, part, seed=seed)
    if isinstance(workload, HasFigures):
        found |= workload.figures(records, part, seed=seed)
    return found
