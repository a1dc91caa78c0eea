"""Failures of replicas, and the recovery of requests lost in a crash.

Failures are scripted, drawn at random, or caused by a bad release.

The settings define the schedule; `FailureInjector` applies its failures to the replicas of a fleet, and ends
them. Every replica draws from its own random streams, so its failures do not depend on the number of
replicas. The schedule is generated lazily. Failures of one event on one replica never overlap; failures of
different events may. A replica is down while any crash lasts, and slowed by the product of all active
factors. A crash of a replica that has not started yet, or is gone, has no effect.

Recovery keeps different parts of the computed work:

    scratch   Nothing is kept: the request restarts, and its client gets the output from the beginning.
    tokens    The gateway keeps the tokens that it has streamed. The request continues after them in another
              replica, which recomputes the KV of prompt and tokens that it does not have in its cache.
              This is NVIDIA Dynamo's request migration.
    kv In addition, KV is copied to the host memory of another replica while it is computed. That part is
    loaded from there; the rest is recomputed. This is replication as in DejaVu (Strati et al., ICML 2024),
    where a worker sends the KV of each token to the next worker. If that replica is also down, recovery is as
    with tokens.

Streamed tokens are never sampled, emitted or counted again. A request that cannot continue in the chosen
replica because its KV memory is too small restarts there.

`Recovery` has the settings; `Resends` continues lost requests with the kept work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from math import ceil, gamma, inf, isinf, isnan, prod
from typing import Annotated, Protocol

import numpy as np
from simpy.events import ProcessGenerator

from fieldlimits import (
    FINITE,
    Checked,
    Ge,
    NonNegative,
    NonNegativeInt,
    OneOf,
    Positive,
    PositiveShare,
    Unit,
    check,
)
from policies.core.limits import RejectedError
from policies.core.plan import Migrant
from policies.core.request import Request
from sim.cluster.clients import FirstTokens
from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.records.run import Failure, FailureKind
from sim.transfer.kv_replication import KvReplication
from sim.transfer.kv_transfers import KvTransfers
from sim.workload.distributions import stream

Pools = Mapping[str, Sequence[int]]
"""Indices in the fleet of the replicas of each pool, by the name of the pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AffectedReplicas(Checked):
    """The replicas that an event affects: a list, a pool, or all."""

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
    """Settings of one source of failures, which may fail once or repeatedly."""

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
    """One failure at a given time, on every affected replica."""

    kind: FailureKind
    at_s: Annotated[NonNegative, Unit("s"), "a run begins at 0"]
    duration_s: Annotated[Positive, Unit("s")]
    factor: float | None = None
    """Factor on durations, for a straggler or a slow link."""

    def __post_init__(self) -> None:
        AffectedReplicas.__post_init__(self)
        _check_factor(self.kind, self.factor)

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        yield Failure(self.at_s, replica, event, self.kind, self.duration_s, self.factor or 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Random(AffectedReplicas):
    """Independent random failures of each replica: a renewal process of times with and without a failure.

    Times have a Weibull distribution with these means; shape 1 is exponential, shapes below 1 model early
    failures (or a few long repairs), shapes above 1 model wear. Availability, the share of time without a
    failure: mtbf_s / (mtbf_s + mttr_s).
    """

    kind: FailureKind
    mtbf_s: Annotated[Positive, Unit("s")]
    """Mean time from one repair (or the beginning of the run) to the next failure."""
    mttr_s: Annotated[Positive, Unit("s")]
    """Mean time to repair."""
    failure_shape: Annotated[float, Ge(0.1), FINITE] = 1.0
    repair_shape: Annotated[float, Ge(0.1), FINITE] = 1.0
    factor: float | None = None
    """Factor on durations, for a straggler or a slow link."""
    together: bool = False
    """Whether all affected replicas fail at the same time, as with the power of a rack."""

    def __post_init__(self) -> None:
        AffectedReplicas.__post_init__(self)
        _check_factor(self.kind, self.factor)

    def of_replica(self, seed: int, event: int, replica: int, place: int) -> Iterator[Failure]:
        keys = () if self.together else (replica,)
        rng = stream(seed, f"troubles.{event}", *keys)  # an earlier name, which keeps a seed's draws
        now = 0.0
        while True:
            now += _weibull(rng, self.mtbf_s, self.failure_shape)
            duration_s = _weibull(rng, self.mttr_s, self.repair_shape)
            yield Failure(now, replica, event, self.kind, duration_s, self.factor or 1.0)
            now += duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRelease(AffectedReplicas):
    """A release that slows some replicas down, or makes them crash repeatedly, until it is rolled back."""

    at_s: Annotated[NonNegative, Unit("s"), "a run begins at 0"]
    rolled_back_after_s: Annotated[Positive, Unit("s")]
    share: PositiveShare = 1.0
    """Share of the affected replicas that get the release, evenly spread, including the first one."""
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
        """Yields the failures of one replica as in `schedule`, also for a replica added later."""
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

    on_lost is called with the id of every request lost in a crash. requests_remain: returns whether requests
    are in progress or still to arrive.
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
        """Adds a replica of the fleet, which may fail from now on."""
        if self._failures.events:
            index = member.replica.index
            self._pools[member.replica.pool.name].append(index)
            self._active[index] = []
            own = self._failures.of_replica(self._seed, index, inf, self._pools)
            ahead = (failure for failure in own if failure.at_s >= self._clock.now)
            self._clock.begin(self._fail_in_turn(member, ahead))

    def _fail_in_turn(self, member: Member, failures: Iterator[Failure]) -> ProcessGenerator:
        """Runs the failures of a replica; each one is drawn when the previous one begins."""
        for failure in failures:
            yield self._clock.at(failure.at_s, Phase.control)
            if not self._requests_remain() or member.state is State.gone:
                return
            if failure.kind not in _FATAL or member.state is not State.starting:
                self._clock.begin(self._fail(member, failure))

    def _fail(self, member: Member, failure: Failure) -> ProcessGenerator:
        """Runs one failure: it is active for its duration."""
        self.begin(member, failure)
        yield self._clock.at(self._clock.now + failure.duration_s, Phase.control)
        self.end(member, failure)

    def begin(self, member: Member, failure: Failure) -> None:
        """Begins a failure, which is active until `end`."""
        self.happened.append(failure)
        self._active.setdefault(failure.replica, []).append(failure)
        self._apply(member)

    def end(self, member: Member, failure: Failure) -> None:
        """Ends an active failure, and sets its duration if it was unknown."""
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


WAYS = ("scratch", "tokens", "kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery(Checked):
    """Settings of the recovery of requests after a crash of their replica."""

    way: Annotated[str, OneOf(WAYS)] = "scratch"
    """scratch, tokens or kv; see the module."""
    every_tokens: int | None = None
    """With kv: replication interval in iterations, which are output tokens of each decoding sequence."""

    def __post_init__(self) -> None:
        check(self)
        if self.way != "kv" and self.every_tokens is not None:
            raise ValueError(
                f"every_tokens={self.every_tokens}: must be null, as way={self.way} copies no KV; "
                "or choose way=kv"
            )
        if self.way == "kv" and (self.every_tokens is None or self.every_tokens < 1):
            raise ValueError(f"every_tokens={self.every_tokens}: must be >= 1 with way=kv")

    @property
    def keeps_tokens(self) -> bool:
        """True if a request continues after the tokens that its client already received."""
        return self.way != "scratch"


class Resends(GatewayAttachment):
    """Makes the gateway resend lost requests, which continue with their kept work.

    kv_transfers, kv_replication: None if the run has none.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        requests: RequestLog,
        first_tokens: FirstTokens,
    ) -> None:
        # Both are set by `GatewayAssembly`, because they call the gateway.
        self.kv_transfers: KvTransfers | None = None
        self.kv_replication: KvReplication | None = None
        self._gateway = gateway
        self._requests = requests
        self._first_tokens = first_tokens

    def lost(self, request_id: int) -> None:
        """Handles a request lost in a crash: resends it, or fails the attempt."""
        attempt = self._gateway.attempts[request_id]
        request, transfers = attempt.arrival.request, self.kv_transfers
        if attempt.has_left and attempt.replica is not None and attempt.replica.holds(request_id):
            return  # The crashed replica was transferring its KV; the target replica aborts the request.
        if attempt.has_left or transfers is None or not transfers.lost(request):
            self._gateway.lost(request_id)

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        migrant = self._migrant(attempt, replica, request) if attempt.is_resumed else None
        if migrant is None:
            return False
        if isnan(self._requests.first_token_s[request.request_id]):
            replica.count_queued(request.request_id, request.prompt.num_tokens)
        enter = partial(replica.core.adopt, stop_after=attempt.stop_after, tier="mirror")
        replica.expect(migrant.request, replica.known_s(request, attempt.stop_after), enter, migrant)
        self._requests.num_resumed += 1
        self._first_tokens.resumes(request.request_id, replica)
        if migrant.num_computed:
            assert self.kv_replication is not None
            self.kv_replication.expect(request.request_id, replica)
        return True

    def failing(self, attempt: RequestAttempt) -> None:
        if attempt.is_resumed:
            self._restart_from_scratch(attempt)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request_id = attempt.arrival.request.request_id
        if self.kv_replication is not None:
            self.kv_replication.ended(request_id)
        self._requests.lost_kv.pop(request_id, None)

    def _migrant(self, attempt: RequestAttempt, replica: Replica, request: Request) -> Migrant | None:
        """Returns the state from which a request continues in a replica; None: it restarts from scratch.

        That is the case if nothing was kept, or if the replica has too little KV memory. At least two tokens
        are left to compute, so that the next token comes from a prefill.
        """
        request_id, arrival = request.request_id, attempt.arrival
        num_known = request.prompt.num_tokens + self._requests.output_tokens[request_id]
        num_left = 0 if self.kv_replication is None else self.kv_replication.num_left(request_id)
        num_computed = max(0, min(num_left, num_known - 2))
        if num_known == request.prompt.num_tokens and not num_computed:
            return None
        try:
            replica.core.check_migrant(request, num_known, arrival.num_output_tokens)
            if self.kv_transfers is not None:
                self.kv_transfers.check(replica, request, num_known)
        except RejectedError:
            self._restart_from_scratch(attempt)
            return None
        return Migrant(request, num_known, num_computed)

    def _restart_from_scratch(self, attempt: RequestAttempt) -> None:
        """Drops the kept tokens and KV of a request, which then restarts from scratch."""
        request_id = attempt.arrival.request.request_id
        attempt.is_resumed = False
        self._requests.lose(request_id, in_crash=True)
        if self.kv_replication is not None:
            self.kv_replication.ended(request_id)
