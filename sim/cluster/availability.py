"""Spare replicas: the probability that at least k of n replicas are up, in theory and by simulation.

Replicas that fail independently are up for the share a = MTBF / (MTBF + MTTR) of the time for any
distributions (renewal theory), so the number of replicas that are up has a binomial distribution. MTBF 30
days, MTTR 2 h: a = 0.99723; all of 8 are up for 97.81 % of the time, at least 8 of 9 for 99.973 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from scipy import stats

from sim.cluster.failures import Failures, Pools
from sim.records.run import FailureKind

FATAL = (FailureKind.crash, FailureKind.host_out_of_memory, FailureKind.link_down)
"""Failures during which a replica is down."""


def availability(mtbf_s: float, mttr_s: float) -> float:
    """Returns the long-run share of the time in which one replica is up; both times in seconds, > 0."""
    for name, value in (("mtbf_s", mtbf_s), ("mttr_s", mttr_s)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be > 0 s")
    return mtbf_s / (mtbf_s + mttr_s)


def at_least_up(k: int, n: int, up_share: float) -> float:
    """Returns the probability that at least k of n independent replicas are up."""
    _check_k_of_n(k, n)
    return float(stats.binom.sf(k - 1, n, up_share))


def replicas_for(k: int, up_share: float, wanted_share: float, *, most: int = 1000) -> int:
    """Returns the smallest n with which at least k replicas are up for wanted_share of the time.

    N+1 redundancy is enough if the result is k + 1. Raises ValueError if the result would exceed `most`.
    """
    if not 0 < wanted_share < 1:
        raise ValueError(f"wanted_share={wanted_share}: must be > 0 and < 1")
    for n in range(k, most + 1):
        if at_least_up(k, n, up_share) >= wanted_share:
            return n
    raise ValueError(
        f"wanted_share={wanted_share}: {most} replicas, each up for {up_share:.3g} of the time, are too few "
        f"to keep {k} up; choose a smaller share"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A probability estimated from replications, with its exact (Clopper-Pearson) confidence interval."""

    num_true: int
    num_replications: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.num_true / self.num_replications


def simulated_at_least_up(
    failures: Failures,
    k: int,
    n: int,
    *,
    at_s: float,
    num_replications: int,
    seed: int = 0,
    confidence: float = 0.95,
    pools: Pools | None = None,
) -> Estimate:
    """Estimates the probability that at least k of n replicas are up at time at_s, over several seeds.

    It also works for failures that no formula covers. Crashes, lost links and hosts out of memory count as
    down. All replicas are up when a run begins: with exponential times a replica is down at time t with
    probability (1 - a) (1 - exp(-t / MTBF - t / MTTR)), within 1 % of the long-run value after 5 MTTR.
    """
    _check_k_of_n(k, n)
    if num_replications < 1:
        raise ValueError(f"num_replications={num_replications}: must be >= 1")
    num_true = sum(n - _num_down(failures, seed + i, n, at_s, pools) >= k for i in range(num_replications))
    interval = stats.binomtest(num_true, num_replications).proportion_ci(confidence, method="exact")
    return Estimate(
        num_true=num_true,
        num_replications=num_replications,
        low=float(interval.low),
        high=float(interval.high),
    )


def simulated_kv_copies_left(
    failures: Failures,
    n: int,
    *,
    until_s: float,
    num_replications: int,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate | None:
    """Estimates the share of crashes until until_s for which another replica has a copy of the lost KV.

    The copy is in the next replica that is up (`sim.transfer.kv_replication`) and is recreated at once when
    that replica fails, so it is lost only if both fail together. None: there was no crash.
    """
    num_crashes = num_left = 0
    for i in range(num_replications):
        up_again_s = [0.0] * n
        for at_s, simultaneous in groupby(failures.schedule(seed + i, n, until_s), attrgetter("at_s")):
            fatal = [failure for failure in simultaneous if failure.kind in FATAL]
            was_up = [replica for replica in range(n) if up_again_s[replica] <= at_s]
            hit = {failure.replica for failure in fatal}
            crashed = {failure.replica for failure in fatal if failure.kind is not FailureKind.link_down}
            for replica in crashed.intersection(was_up):
                ring = sorted(was_up, key=lambda other: (other - replica) % n)
                num_crashes += 1
                num_left += len(ring) > 1 and ring[1] not in hit
            for failure in fatal:
                up_again_s[failure.replica] = max(up_again_s[failure.replica], at_s + failure.duration_s)
    if not num_crashes:
        return None
    interval = stats.binomtest(num_left, num_crashes).proportion_ci(confidence, method="exact")
    return Estimate(
        num_true=num_left, num_replications=num_crashes, low=float(interval.low), high=float(interval.high)
    )


def _num_down(failures: Failures, seed: int, n: int, at_s: float, pools: Pools | None) -> int:
    down = {
        failure.replica
        for failure in failures.schedule(seed, n, at_s, pools)
        if failure.kind in FATAL and failure.at_s + failure.duration_s > at_s
    }
    return len(down)


def _check_k_of_n(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: must be from 1 to n={n}")
