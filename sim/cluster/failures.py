"""Failures of replicas and their schedule: scripted, drawn at random, or caused by a bad release.

This module has the settings and the schedule that they define; `FailureInjector` applies failures to
replicas. Every replica draws from its own random streams, so its failures do not depend on the number of
replicas. The schedule is generated lazily. Failures of different events may overlap; those of one event on
one replica do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from math import ceil, gamma, inf
from typing import Annotated, Protocol

import numpy as np

from fieldlimits import FINITE, Checked, Ge, NonNegative, NonNegativeInt, Positive, PositiveShare, Unit, check
from sim.records.failure import Failure, FailureKind
from sim.workload.streams import stream

Pools = Mapping[str, Sequence[int]]
"""Indices in the fleet of the replicas of each pool, by the name of the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AffectedReplicas(Checked):
    """The replicas that an event affects: those listed, those of a pool, or all."""

    replicas: tuple[Annotated[NonNegativeInt, "the first replica is 0"], ...] = ()
    """Indices in the fleet; empty: all replicas, or those of `pool`."""
    pool: str | None = None
    """Name of a pool: all its replicas are affected."""

    def __post_init__(self) -> None:
        check(self)
        object.__setattr__(self, "replicas", tuple(self.replicas))
        if self.replicas and self.pool is not None:
            raise ValueError(f"replicas={list(self.replicas)}, pool={self.pool}: must not both be set")
        for i, replica in enumerate(self.replicas):
            if replica in self.replicas[:i]:
                raise ValueError(f"replicas[{i}]={replica}: must be listed once")

    def check(self, num_replicas: int, pools: Pools) -> None:
        """Raises ValueError for a replica or a pool that is not in the fleet."""
        for i, replica in enumerate(self.replicas):
            if replica >= num_replicas:
                raise ValueError(f"replicas[{i}]={replica}: must be < {num_replicas}, the number of replicas")
        if self.pool is not None and self.pool not in pools:
            known = ", ".join(pools) or "the fleet has no named pools"
            raise ValueError(f"pool={self.pool}: no such pool; known: {known}")

    def place(self, replica: int, pools: Pools) -> int | None:
        """Returns the index of a replica among the affected ones; None if it is not affected."""
        affected = pools[self.pool] if self.pool is not None else self.replicas
        if not affected and self.pool is None:
            return replica
        return list(affected).index(replica) if replica in affected else None


class Event(Protocol):
    """Settings of one source of failures, which may occur once or repeatedly."""

    def check(self, num_replicas: int, pools: Pools) -> None:
        """Raises ValueError for a replica or a pool that is not in the fleet."""
        ...

    def place(self, replica: int, pools: Pools) -> int | None:
        """Returns the index of a replica among the affected ones; None if it is not affected."""
        ...

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        """Yields the failures of one replica, in order of time; the sequence may be infinite."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Scripted(AffectedReplicas):
    """One failure at a given time, at every affected replica."""

    kind: FailureKind
    at_s: Annotated[NonNegative, Unit("s"), "a run begins at 0"]
    duration_s: Annotated[Positive, Unit("s")]
    factor: float | None = None
    """Factor on durations; for a straggler and a slow link."""

    def __post_init__(self) -> None:
        AffectedReplicas.__post_init__(self)
        _check_factor(self.kind, self.factor)

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        yield Failure(self.at_s, replica, event, self.kind, self.duration_s, self.factor or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Random(AffectedReplicas):
    """Independent random failures of each replica: a renewal process of times with and without a failure.

    Times have a Weibull distribution with these means; shape 1 is exponential, shapes below 1 model early
    failures (or a few long repairs), shapes above 1 wear. Availability, the share of time without a failure:
    mtbf_s / (mtbf_s + mttr_s).
    """

    kind: FailureKind
    mtbf_s: Annotated[Positive, Unit("s")]
    """Mean time from one repair (or the beginning of the run) to the next failure."""
    mttr_s: Annotated[Positive, Unit("s")]
    """Mean time to repair."""
    failure_shape: Annotated[float, Ge(0.1), FINITE] = 1.0
    repair_shape: Annotated[float, Ge(0.1), FINITE] = 1.0
    factor: float | None = None
    """Factor on durations; for a straggler and a slow link."""
    together: bool = False
    """Whether all affected replicas fail at the same time, as with the power of a rack."""

    def __post_init__(self) -> None:
        AffectedReplicas.__post_init__(self)
        _check_factor(self.kind, self.factor)

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        keys = () if self.together else (replica,)
        rng = stream(seed, f"troubles.{event}", *keys)  # an earlier name: it keeps the draws of a seed
        now = 0.0
        while True:
            now += _weibull(rng, self.mtbf_s, self.failure_shape)
            duration_s = _weibull(rng, self.mttr_s, self.repair_shape)
            yield Failure(now, replica, event, self.kind, duration_s, self.factor or 1.0)
            now += duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRelease(AffectedReplicas):
    """A release that makes some replicas slow, or has them crash again and again, until it is rolled back."""

    at_s: Annotated[NonNegative, Unit("s"), "a run begins at 0"]
    rolled_back_after_s: Annotated[Positive, Unit("s")]
    share: PositiveShare = 1.0
    """Share of the affected replicas that get the release: evenly spread, the first among them."""
    factor: float | None = None
    """Factor on the durations of their iterations; None: they crash."""
    crash_after_s: Annotated[Positive, Unit("s")] = 60.0
    """Mean time from a start to the next crash; exponential."""
    restart_s: Annotated[Positive, Unit("s")] = 60.0
    """Seconds from a crash until the replica serves again."""

    def __post_init__(self) -> None:
        AffectedReplicas.__post_init__(self)
        if self.factor is not None:
            _check_factor(FailureKind.straggler, self.factor)

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        if not self._gets_it(place):
            return
        if self.factor is not None:
            yield Failure(
                self.at_s, replica, event, FailureKind.straggler, self.rolled_back_after_s, self.factor
            )
            return
        rng = stream(seed, f"troubles.{event}", replica)
        now = self.at_s + rng.exponential(self.crash_after_s)
        while now < self.at_s + self.rolled_back_after_s:
            yield Failure(now, replica, event, FailureKind.crash, self.restart_s)
            now += self.restart_s + rng.exponential(self.crash_after_s)

    def _gets_it(self, place: int) -> bool:
        """Returns whether the replica at `place` gets the release: ceil(share * n) of the first n do."""
        before, after = (ceil(self.share * n - 1e-9) for n in (place, place + 1))
        return after > before


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """All failures of a run."""

    events: tuple[Event, ...] = ()

    def check(self, num_replicas: int, pools: Pools | None = None) -> None:
        """Raises ValueError for events of replicas or pools that are not in the fleet."""
        for i, event in enumerate(self.events):
            try:
                event.check(num_replicas, pools or {})
            except ValueError as error:
                raise ValueError(f"events[{i}].{error}") from None

    def schedule(
        self, seed: int, num_replicas: int, until_s: float, pools: Pools | None = None
    ) -> Iterator[Failure]:
        """Yields the failures that begin before until_s, in order of time, generated lazily."""
        self.check(num_replicas, pools)
        return merge(*(self.of_replica(seed, replica, until_s, pools) for replica in range(num_replicas)))

    def of_replica(
        self, seed: int, replica: int, until_s: float, pools: Pools | None = None
    ) -> Iterator[Failure]:
        """Yields the failures of one replica as in `schedule`, also for a replica that is added later."""
        pools = pools or {}
        placed = [(i, event, event.place(replica, pools)) for i, event in enumerate(self.events)]
        own = [event.of_replica(seed, i, replica, place) for i, event, place in placed if place is not None]
        for failure in merge(*own):
            if failure.at_s >= until_s:
                return
            yield failure


def _weibull(rng: np.random.Generator, mean: float, shape: float) -> float:
    return float(rng.weibull(shape)) * mean / gamma(1 + 1 / shape)


def _check_factor(kind: FailureKind, factor: float | None) -> None:
    """Raises ValueError for a missing or unused factor, or one that is not greater than 1."""
    if not kind.has_factor:
        if factor is not None:
            raise ValueError(f"factor={factor}: must be null, as {kind.name} slows nothing down")
    elif factor is None or not 1 < factor < inf:
        raise ValueError(f"factor={factor}: must be a finite number > 1, by which durations are multiplied")
