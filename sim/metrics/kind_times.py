"""Seconds of the replicas by kind of iteration and component of the hardware model.

To compute the components of an iteration takes several times as long as to add up all its other figures, so
in runs that stream those of a sample stand for all. Half of the iterations have level 0, a quarter level 1,
and so on, by their numbers; the sample is all iterations from the lowest level on with which it is small
enough. Each part of a run takes at least the sample of the whole run, as this level rises with the number of
iterations.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.iteration import IterationModel
from sim.metrics.bins import Ints
from sim.metrics.points import place_of
from sim.metrics.utilisation import KINDS, component_seconds, iteration_kind, pieces
from sim.records.table import AnyTable, column

MAX_SAMPLE: Final = 8192
"""Size of the sample in runs that stream."""
_LOG_PLACES: Final = 20
_NUM_LEVELS: Final = _LOG_PLACES + 1
"""Enough for 10^10 iterations of a kind; then the sample grows."""
_PER_S: Final = 2.0**30
"""Seconds are added as integers in units of 2^-30 s, so that every order of adding gives the same."""


class _PoolTimes:
    """Iterations and seconds of a pool; all arrays are [kinds, levels]."""

    def __init__(self, max_sample: float) -> None:
        self._max_sample = max_sample
        self.counts = _zeros()
        self.busy = _zeros()
        self.components: dict[str, Ints] = {}
        """By component, the seconds of iterations in the sample, and of some at lower levels."""

    @property
    def in_sample(self) -> NDArray[np.bool_]:
        """Returns, for each kind, which levels are in the sample, [kinds, levels]."""
        upwards = np.cumsum(self.counts[:, ::-1], axis=1)[:, ::-1]
        found: NDArray[np.bool_] = upwards <= self._max_sample
        found[:, -1] = True
        return found


class KindTimes:
    """Adds up the busy seconds by kind of iteration (`KINDS`), and within it by component.

    The components are scaled to the recorded duration, so that the seconds of a kind sum to its recorded
    time. max_sample: iterations of a kind of which the components are computed, at most, for each pool. With
    more, the seconds of a kind are exact, and those of its components are divided as in the sample.
    """

    def __init__(self, num_pools: int, max_sample: float) -> None:
        self._pools = [_PoolTimes(max_sample) for _ in range(num_pools)]

    def add(
        self, index: int, iterations: AnyTable, inside_s: NDArray[np.float64], model: IterationModel
    ) -> None:
        """Adds iterations of a pool. inside_s: seconds of each inside the window."""
        pool, rows = self._pools[index], np.flatnonzero(inside_s > 0)
        if not len(rows):
            return
        number, replica = (column(iterations, name, np.int64)[rows] for name in ("iteration", "replica"))
        kind = iteration_kind(iterations)[rows]
        place = kind * _NUM_LEVELS + _levels((replica << 40) + number)
        pool.counts += _sums(place)
        pool.busy += _sums(place, inside_s[rows])
        chosen = np.flatnonzero(pool.in_sample.reshape(-1)[place])
        for piece in pieces(len(chosen)):
            own = rows[chosen[piece]]
            for component, part_s in component_seconds(iterations.take(own), inside_s[own], model):
                sums = pool.components.setdefault(component, _zeros())
                sums += _sums(place[chosen[piece]], part_s)

    def merge(self, other: KindTimes) -> None:
        """Adds the iterations of other, which is not changed."""
        for mine, theirs in zip(self._pools, other._pools, strict=True):
            mine.counts += theirs.counts
            mine.busy += theirs.busy
            for component, sums in theirs.components.items():
                mine.components.setdefault(component, _zeros())[:] += sums

    @property
    def busy_s(self) -> float:
        """Returns the busy seconds of all replicas."""
        return sum(int(pool.busy.sum()) for pool in self._pools) / _PER_S

    @property
    def is_sample(self) -> bool:
        """Returns whether the seconds of components are those of a sample."""
        return any(not pool.in_sample[:, 0].all() for pool in self._pools)

    def seconds(self) -> dict[str, dict[str, float]]:
        """Returns the seconds by kind of iteration, and within it by component."""
        found: dict[str, dict[str, float]] = {name: {} for name in KINDS}
        for pool in self._pools:
            chosen = pool.in_sample
            of_sample = {name: (sums * chosen).sum(axis=1) for name, sums in pool.components.items()}
            busy = pool.busy.sum(axis=1)
            for kind, name in enumerate(KINDS):
                whole = int(sum(int(sums[kind]) for sums in of_sample.values()))
                for component, sums in of_sample.items():
                    share = int(sums[kind]) / whole if whole else 0.0
                    own_s = share * int(busy[kind]) / _PER_S
                    found[name][component] = found[name].get(component, 0.0) + own_s
        return found


def _zeros() -> Ints:
    return np.zeros((len(KINDS), _NUM_LEVELS), np.int64)


def _levels(number: NDArray[np.int64]) -> NDArray[np.int8]:
    """Returns the level of each iteration: the number of zeros with which its place begins in binary."""
    return _LEVELS[(place_of(number) >> np.uint64(64 - _LOG_PLACES)).astype(np.int64)]


def _levels_of_places() -> NDArray[np.int8]:
    """Returns the level by the first bits of the place."""
    found = np.zeros(1 << _LOG_PLACES, np.int8)
    for level in range(1, _NUM_LEVELS):
        found[: 1 << (_LOG_PLACES - level)] = level
    return found


_LEVELS: Final = _levels_of_places()


def _sums(place: NDArray[np.int64], seconds: NDArray[np.float64] | None = None) -> Ints:
    """Returns the counts of iterations, or the units of seconds, [kinds, levels]. place: in this array."""
    weights = None if seconds is None else np.rint(seconds * _PER_S)
    sums = np.bincount(place, weights, minlength=len(KINDS) * _NUM_LEVELS)
    return sums.astype(np.int64).reshape(len(KINDS), _NUM_LEVELS)
