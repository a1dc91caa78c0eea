"""How many spare replicas are enough: the probability that at least k of n are up, in theory and simulated.

Replicas that fail by themselves are up for the share a = MTBF / (MTBF + MTTR) of the time, whatever the
distributions (renewal theory), so the number that is up has a binomial distribution. MTBF 30 days, MTTR 2 h:
a = 0.99723; all of 8 are up 97.81 % of the time, 8 of 9 for 99.973 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from scipy import stats

from sim.cluster.failures import Failures, Pools
from sim.records.failure import FailureKind

FATAL = (FailureKind.crash, FailureKind.host_out_of_memory, FailureKind.link_down)
"""Failures in which a replica is not up."""


def availability(mtbf_s: float, mttr_s: float) -> float:
    """Share of the time in which one replica is up, in the long run."""
    for name, value in (("mtbf_s", mtbf_s), ("mttr_s", mttr_s)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be > 0 s")
    return mtbf_s / (mtbf_s + mttr_s)


def at_least_up(k: int, n: int, up_share: float) -> float:
    """Probability that k or more of n independent replicas are up."""
    _check_k_of_n(k, n)
    return float(stats.binom.sf(k - 1, n, up_share))


def replicas_for(k: int, up_share: float, wanted_share: float, *, most: int = 1000) -> int:
    """The smallest n with which k or more are up for wanted_share of the time. N+1 is enough if it is k + 1.

    Raises ValueError if not even `most` are enough.
    """
    if not 0 < wanted_share < 1:
        raise ValueError(f"wanted_share={wanted_share}: must be > 0 and < 1")
    for n in range(k, most + 1):
        if at_least_up(k, n, up_share) >= wanted_share:
            return n
    raise ValueError(
        f"wanted_share={wanted_share}: {most} replicas that are up {up_share:.3g} of the time are not enough "
        f"for {k}; ask for less"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A probability from replications, with its exact (Clopper-Pearson) interval."""

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
    """The same at one moment of a run, over runs of different seeds: for failures that no formula covers.

    Crashes, lost links and hosts out of memory count as down. Runs begin with everybody up: with exponential
    times a replica is down at time t with (1 - a) (1 - exp(-t / MTBF - t / MTTR)), within 1 % after 5 MTTR.
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
    """Of the crashes of n replicas by until_s, at how many the replica that had a copy of the KV was up.

    A copy is with the next replica that was up (`sim.transfer.kv_replication`), and made anew at once when
    that goes down: so only those that go down together lose it. None: there was no crash.
    """
    num_crashes = num_left = 0
    for i in range(num_replications):
        up_again_s = [0.0] * n
        for at_s, together in groupby(failures.schedule(seed + i, n, until_s), attrgetter("at_s")):
            fatal = [failure for failure in together if failure.kind in FATAL]
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
