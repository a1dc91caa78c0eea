"""Parts of the accumulators of runs that stream: exact sums, sketches, groups of requests, bins."""

from __future__ import annotations

from typing import Final

import numpy as np

from sim.metrics.batches import Distributions, GroupedSeries, IdGroups, MetSeries
from sim.metrics.bins import Bins, Ints
from sim.metrics.definitions import Times
from sim.metrics.distributions import Kept
from sim.metrics.sketch import PERCENTILE_ERROR, Sketch
from sim.metrics.sums import ExactTotals


class GroupedLatency(Sketch):
    """A latency of requests: its distribution, and groups of requests: see `sim.metrics.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.distributions = IdGroups(), Distributions()

    def add_requests(self, ids: Ints, arrival_s: Times, values: Times) -> None:
        """Adds values of requests, by id in ascending order; NaN values are left out."""
        assert (np.diff(ids) > 0).all(), "the requests are not in order of their ids"
        self.add(values)
        self.groups.add(ids, values)
        self.distributions.add(ids, values)

    def merge(self, other: Sketch) -> None:
        """Adds the requests of other, which is not changed."""
        super().merge(other)
        assert isinstance(other, GroupedLatency)
        self.groups.merge(other.groups)
        self.distributions.merge(other.distributions)

    def series(self) -> GroupedSeries:
        """Returns the latency in the order of the requests' ids."""
        return GroupedSeries(self.groups, self.distributions, self)


class GroupedShares(IdGroups):
    """Zeros and ones of requests, in groups of ids."""

    def add_requests(self, ids: Ints, arrival_s: Times, values: Times) -> None:
        """Adds values of requests, by id in ascending order."""
        self.add(ids, values)

    def series(self) -> MetSeries:
        """Returns the shares of ones in the order of the requests' ids."""
        return MetSeries(self)


SKETCHED: Final = Kept(ExactTotals, Sketch, GroupedLatency, GroupedShares, Bins, PERCENTILE_ERROR)
