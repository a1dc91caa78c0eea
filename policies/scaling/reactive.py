"""Reactive scaling: by the load, the queue or the SLO attainment of the last interval."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Annotated

from fieldlimits import Gt, NonNegative, OneOf, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced, num_present

SIGNALS = ("busy", "kv", "running")


@dataclass(kw_only=True, slots=True)
class Utilisation(Paced):
    """Scales by the mean utilisation of the serving replicas.

    Utilisation: keeps the utilisation at a target with the formula of Kubernetes' HorizontalPodAutoscaler.

        wanted = ceil(replicas * utilisation / target),  unless the ratio is within the tolerance of 1

    4 replicas at 90 % with a target of 60 % become 6. Defaults match Kubernetes: a call every 15 s, a
    tolerance of 0.1, a window of 300 s before replicas are removed. As in Kubernetes, starting replicas count
    as idle while the others are overloaded, so a load increase does not add replicas twice.

    The signal `busy` is the utilisation reported by nvidia-smi. It is a poor signal for LLMs, because one
    sequence keeps a replica as busy as a hundred sequences. `kv` and `running` rise with the load until
    requests have to wait. If replicas have no known maximum of running sequences, `running` falls back to
    `kv`.
    """

    signal: Annotated[str, OneOf(SIGNALS)] = "running"
    """busy: share of time with an iteration running; kv: share of KV memory; running: share of slots."""
    target_share: PositiveShare = 0.6
    tolerance: NonNegative = 0.1
    """Maximum deviation of utilisation / target from 1 that causes no change."""
    stabilisation_s: float = 300.0

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the number of replicas that brings the utilisation to its target."""
        asked = self.asked(pool)
        num_up = max(pool.num_replicas, 1)
        ratio = self._utilisation(pool) / self.target_share
        wanted = asked
        if abs(ratio - 1) > self.tolerance:
            for_target = ceil(num_up * ratio - 1e-9)
            wanted = max(asked, for_target) if ratio > 1 else min(asked, for_target)
        return self.paced(wanted, pool, now)

    def _utilisation(self, pool: PoolView) -> float:
        if self.signal == "busy":
            return pool.busy_share
        if self.signal == "running" and pool.max_concurrency:
            return pool.num_running / (max(pool.num_replicas, 1) * pool.max_concurrency)
        return pool.kv_usage


@dataclass(kw_only=True, slots=True)
class Concurrency(Paced):
    """Scales by concurrency. Stores the requests in flight of one stable window. Does not scale to zero.

    Concurrency: keeps the requests in flight per replica at a target, as Knative's autoscaler (KServe) does.

        wanted = ceil(mean requests in flight / (target_concurrency * target_utilisation))

    The mean is computed over a stable window of 60 s and over a panic window of 6 s. If the panic window
    wants at least twice the serving replicas, it is used until there has been no panic for a stable window,
    and no replica is removed in this time. Queued requests count as in flight. With 100 requests in flight, a
    target of 10 and a utilisation of 70 %, 15 replicas are wanted. Defaults are Knative's.
    """

    interval_s: float = 2.0
    target_concurrency: Annotated[Positive, Unit("requests")] = 100.0
    """Number of requests in flight that one replica can serve."""
    target_utilisation: PositiveShare = 0.7
    """Share of target_concurrency that each replica should have."""
    stable_window_s: Annotated[Positive, Unit("s")] = 60.0
    panic_window_s: Annotated[Positive, Unit("s")] = 6.0
    panic_threshold: Annotated[float, Gt(1)] = 2.0
    """Ratio of replicas wanted by the panic window to serving replicas at which a panic begins."""
    max_scale_up_rate: Annotated[float, Gt(1)] = 1000.0
    """Maximum factor by which one decision multiplies the serving replicas."""
    max_scale_down_rate: Annotated[float, Gt(1)] = 2.0
    """Maximum factor by which one decision divides the serving replicas."""
    _samples: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _panic_s: float | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        if not self.panic_window_s <= self.stable_window_s:
            raise ValueError(
                f"panic_window_s={self.panic_window_s}: must be <= stable_window_s={self.stable_window_s} s"
            )

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the number for the stable window; in a panic the maximum of both windows so far."""
        self._samples.append((now, pool.num_outstanding))
        while self._samples[0][0] <= now - self.stable_window_s:
            self._samples.popleft()
        num_up = max(pool.num_replicas, 1)
        fewest, most = int(num_up / self.max_scale_down_rate), ceil(num_up * self.max_scale_up_rate)
        stable = max(fewest, min(most, self._wanted(self.stable_window_s, now)))
        panic = max(fewest, min(most, self._wanted(self.panic_window_s, now)))
        if panic / num_up >= self.panic_threshold:
            self._panic_s = now
        elif self._panic_s is not None and now - self._panic_s > self.stable_window_s:
            self._panic_s = None
        if self._panic_s is None:
            return self.paced(stable, pool, now)
        return self.paced(max(stable, panic, self.asked(pool)), pool, now)

    def _wanted(self, window_s: float, now: float) -> int:
        """Returns the number of replicas for the mean of a window."""
        counts = [count for time_s, count in self._samples if time_s > now - window_s]
        mean = sum(counts) / len(counts)
        return ceil(mean / (self.target_concurrency * self.target_utilisation) - 1e-9)


@dataclass(kw_only=True, slots=True)
class QueueLength(Paced):
    """Scales by queue length; starting replicas count as present.

    Queue length: adds replicas while requests wait, removes one when the others have enough capacity. vLLM's
    production stack scales on `vllm:num_requests_waiting` (KEDA). An empty queue does not show how much
    capacity is left, so scaling in on an empty queue alone oscillates under constant load. Here a replica is
    removed only if no request has waited for calm_s and the running requests would use at most max_fill_share
    of the slots and of the KV memory of the others.
    """

    max_waiting: Annotated[Positive, Unit("requests")] = 5.0
    """Waiting requests per replica above which replicas are added."""
    calm_s: Annotated[NonNegative, Unit("s")] = 300.0
    """Time in seconds without waiting requests before a replica is removed, and between two removals."""
    max_fill_share: PositiveShare = 0.7
    """Maximum share of the slots and the KV memory of the remaining replicas after a removal."""
    max_step_out: int | None = 4
    _waited_s: float | None = field(default=None, init=False, repr=False, compare=False)

    def target(self, pool: PoolView, now: float) -> int:
        """Returns more replicas while requests wait, one fewer after a calm period, else the same number."""
        asked = self.asked(pool)
        if pool.num_waiting or self._waited_s is None:
            self._waited_s = now
        num_for_queue = ceil(pool.num_waiting / self.max_waiting - 1e-9)
        wanted = asked + max(0, num_for_queue - num_present(pool))
        if now - self._waited_s >= self.calm_s and not pool.num_starting and self._fits_in_fewer(pool):
            wanted = asked - 1
            self._waited_s = now
        return self.paced(wanted, pool, now)

    def _fits_in_fewer(self, pool: PoolView) -> bool:
        num_left = pool.num_replicas - 1
        if num_left < 1:
            return not pool.num_outstanding
        fits = pool.kv_usage * pool.num_replicas <= self.max_fill_share * num_left
        if pool.max_concurrency is not None:
            fits = fits and pool.num_running <= self.max_fill_share * num_left * pool.max_concurrency
        return fits


@dataclass(kw_only=True, slots=True)
class SloAttainment(Paced):
    """Scales by the requests that ended since the last call; without such requests nothing changes.

    SLO attainment: adds replicas while too many requests miss the SLO, removes one after a calm period.

    The capacity of a replica need not be known; it is found by trial. Trials alone would oscillate under
    constant load, so the policy stores the arrival rate per replica at which requests began to miss the SLO,
    and removes a replica only if the others would stay below margin times that rate. The rate is discarded
    after forget_s, because requests and models change.
    """

    interval_s: float = 30.0
    target_share: PositiveShare = 0.95
    """Share of ended requests that must meet the SLO."""
    calm_s: Annotated[NonNegative, Unit("s")] = 600.0
    """Time in seconds with the target met before a replica is removed, and between two removals."""
    margin: PositiveShare = 0.9
    """Maximum arrival rate per replica after a removal, as a share of the rate found to be too high."""
    forget_s: Annotated[Positive, Unit("s")] = 86_400.0
    """Time in seconds after which a rate found to be too high is discarded."""
    _num_ended: int = field(default=0, init=False, repr=False, compare=False)
    _num_met: int = field(default=0, init=False, repr=False, compare=False)
    _num_arrivals: int = field(default=0, init=False, repr=False, compare=False)
    _asked_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _missed_s: float | None = field(default=None, init=False, repr=False, compare=False)
    _is_missing: bool = field(default=False, init=False, repr=False, compare=False)
    _too_much_per_s: float = field(default=inf, init=False, repr=False, compare=False)
    _learnt_s: float = field(default=-inf, init=False, repr=False, compare=False)

    def target(self, pool: PoolView, now: float) -> int:
        """Returns more replicas in proportion to missed requests, one fewer after calm_s, else the same."""
        asked = self.asked(pool)
        num_ended, num_met = pool.num_ended - self._num_ended, pool.num_met - self._num_met
        elapsed_s, num_arrived = now - self._asked_s, pool.num_arrivals - self._num_arrivals
        self._num_ended, self._num_met = pool.num_ended, pool.num_met
        self._asked_s, self._num_arrivals = now, pool.num_arrivals
        rate_per_s = num_arrived / elapsed_s if elapsed_s > 0 else 0.0
        if self._missed_s is None:
            self._missed_s = now
        if now - self._learnt_s > self.forget_s:
            self._too_much_per_s = inf
        wanted = asked
        attained = num_met / num_ended if num_ended else 1.0
        if attained < self.target_share:
            if not self._is_missing:  # later misses are due to the backlog, not to the rate
                self._learn(rate_per_s / max(pool.num_replicas, 1), now)
            self._is_missing, self._missed_s = True, now
            if not pool.num_starting:
                wanted = asked + max(1, ceil(asked * (self.target_share - attained) - 1e-9))
        elif num_ended:
            self._is_missing = False
            if now - self._missed_s >= self.calm_s and self._may_remove(rate_per_s, pool):
                wanted = asked - 1
                self._missed_s = now
        return self.paced(wanted, pool, now)

    def _learn(self, rate_per_s: float, now: float) -> None:
        if rate_per_s > 0:
            self._too_much_per_s, self._learnt_s = min(self._too_much_per_s, rate_per_s), now

    def _may_remove(self, rate_per_s: float, pool: PoolView) -> bool:
        num_left = pool.num_replicas - 1
        return (
            num_left >= 1
            and not pool.num_starting
            and rate_per_s <= self.margin * self._too_much_per_s * num_left
        )
