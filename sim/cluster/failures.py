"""Failures of replicas and their schedule: scripted, drawn at random, or caused by a bad release.

The settings define the schedule; `FailureInjector` applies its failures to the replicas of a fleet, and ends
them. Every replica draws from its own random streams, so its failures do not depend on the number of
replicas. The schedule is generated lazily. Failures of different events may overlap; those of one event on
one replica do not.

Failures of one replica may overlap: it is down while any crash lasts, and slow by all factors together. A
crash of a replica that has not started yet, or is gone, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from math import ceil, gamma, inf, isinf, prod
from typing import Annotated, Protocol

import numpy as np
from simpy.events import ProcessGenerator

from fieldlimits import FINITE, Checked, Ge, NonNegative, NonNegativeInt, Positive, PositiveShare, Unit, check
from sim.cluster.fleet import Fleet, Member, State
from sim.engine.clock import Clock, Phase
from sim.records.failure import Failure, FailureKind
from sim.workload.distributions import stream

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


_FATAL = (FailureKind.crash, FailureKind.host_out_of_memory)


class FailureInjector:
    """Injects the failures of a run.

    on_lost is called with the id of every request that a crash has lost. requests_remain: returns whether
    requests are in progress or still to arrive.
    """

    def __init__(
        self,
        failures: Failures,
        *,
        clock: Clock,
        fleet: Fleet,
        seed: int,
        on_lost: Callable[[int], None],
        requests_remain: Callable[[], bool],
    ) -> None:
        self._failures = failures
        self._clock = clock
        self._fleet = fleet
        self._seed = seed
        self._on_lost = on_lost
        self._requests_remain = requests_remain
        self.happened: list[Failure] = []
        self._active: dict[int, list[Failure]] = {}  # by replica index
        self._pools: dict[str, list[int]] = {pool.name: [] for pool in fleet.pools}
        if failures.events:
            for member in fleet.members:
                self.add(member)

    def add(self, member: Member) -> None:
        """Adds a replica of the fleet, to which failures may happen from now on."""
        if self._failures.events:
            index = member.replica.index
            self._pools[member.replica.pool.name].append(index)
            self._active[index] = []
            own = self._failures.of_replica(self._seed, index, inf, self._pools)
            ahead = (failure for failure in own if failure.at_s >= self._clock.now)
            self._clock.begin(self._fail_in_turn(member, ahead))

    def _fail_in_turn(self, member: Member, failures: Iterator[Failure]) -> ProcessGenerator:
        """Lets the failures of a replica happen; each is drawn when the one before it begins."""
        for failure in failures:
            yield self._clock.at(failure.at_s, Phase.control)
            if not self._requests_remain() or member.state is State.gone:
                return
            if failure.kind not in _FATAL or member.state is not State.starting:
                self._clock.begin(self._fail(member, failure))

    def _fail(self, member: Member, failure: Failure) -> ProcessGenerator:
        """Lets one failure happen: it is in force for its duration."""
        self.begin(member, failure)
        yield self._clock.at(self._clock.now + failure.duration_s, Phase.control)
        self.end(member, failure)

    def begin(self, member: Member, failure: Failure) -> None:
        """Begins a failure, which is in force until `end`."""
        self.happened.append(failure)
        self._active.setdefault(failure.replica, []).append(failure)
        self._apply(member)

    def end(self, member: Member, failure: Failure) -> None:
        """Ends a failure that has begun; one without a known duration has one now."""
        self._active[failure.replica].remove(failure)
        if isinf(failure.duration_s):
            lasted_s = self._clock.now - failure.at_s
            self.happened[self.happened.index(failure)] = failure._replace(duration_s=lasted_s)
        self._apply(member)

    def _apply(self, member: Member) -> None:
        """Applies the active failures to a replica."""
        failures = self._active[member.replica.index]
        kinds = [failure.kind for failure in failures]
        now = self._clock.now
        if any(kind in kinds for kind in _FATAL):
            for request_id in self._fleet.crash(member, now):
                self._on_lost(request_id)
        else:
            self._fleet.restore(member, now)
        self._fleet.set_reached(member, is_reached=FailureKind.link_down not in kinds)
        member.replica.slow_down(prod(f.factor for f in failures if f.kind is FailureKind.straggler))
        self._fleet.slow_links(member, prod(f.factor for f in failures if f.kind is FailureKind.link_slow))
