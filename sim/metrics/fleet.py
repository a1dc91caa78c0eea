"""Computes the metrics of a fleet: failures, retries, scaling, and the use of each pool.

Except for the metrics of pools they cover the whole run, even if the measured window is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import per
from sim.metrics.figure import EndedRun, Figure, Part
from sim.metrics.hardware_use import HardwareUse, use_of
from sim.metrics.sums import weighted_sum
from sim.records.run import ReplicaRecord, RunRecords
from sim.records.table import column

STATES = ("wanted", "starting", "serving", "draining", "down")
"""States of replicas; wanted: all except draining ones."""


def down_s_by_replica(records: RunRecords) -> list[float]:
    """Computes, per replica, the seconds after crashes in which it was paid for but did not serve."""
    return [sum(up_s - down_s for down_s, up_s in replica.down) for replica in records.replicas]


def failure_use(records: RunRecords) -> dict[str, Any]:
    """Computes the failures and their cost: replica-seconds, lost tokens, resent requests.

    by_kind: number and replica-seconds of each kind of failure. lost_tokens: output tokens of restarted
    requests; resumed: continued requests. recomputed, restored, mirrored: KV, see `RecoveryRecord`.
    """
    recovery = records.recovery
    down_s, paid_s = sum(down_s_by_replica(records)), sum(r.end_s - r.start_s for r in records.replicas)
    by_kind: dict[str, dict[str, float]] = {}
    for failure in records.failures:
        kind = by_kind.setdefault(failure.kind.name, {"count": 0, "replica_s": 0.0})
        kind["count"] += 1
        kind["replica_s"] += max(0.0, min(failure.duration_s, records.end_s - failure.at_s))
    return {
        "by_kind": by_kind,
        "crashes": sum(len(replica.down) for replica in records.replicas),
        "replica_down_s": float(down_s),
        "down_share": down_s / paid_s if paid_s > 0 else float("nan"),
        "lost_tokens": records.num_crash_tokens,
        "resends": records.num_resends,
        "resumed": recovery.num_resumed,
        "recomputed_tokens": recovery.num_recomputed_tokens,
        "restored_tokens": recovery.num_restored_tokens,
        "restored_bytes": recovery.restored_bytes,
        "mirrored_bytes": recovery.replicated_bytes,
    }


class RetryUse(Figure):
    """Attempts of clients, and the failed ones by reason.

    An attempt fails if it is refused, times out or loses its replica; the client may resend it. lost_tokens:
    output tokens produced after their client had timed out.
    """

    name = "retries"

    def add(self, part: Part) -> None:
        ones = np.ones(len(part.requests), np.int64)
        self.whole.add("requests", ones)
        self.whole.add("attempts", column(part.requests, "tries") if "tries" in part.requests else ones)
        if "lost_tokens" in part.requests:
            self.whole.add("lost_tokens", column(part.requests, "lost_tokens"))

    def value(self, run: EndedRun) -> dict[str, Any]:
        arrived, attempts = self.whole["requests"], self.whole["attempts"]
        lost = int(self.whole["lost_tokens"]) - run.records.num_crash_tokens
        return {
            "attempts": attempts,
            "retries": max(0, attempts - arrived),
            "attempts_per_request": per(attempts, arrived),
            "failed_attempts": dict(sorted(run.records.failed_attempts.items())),
            "lost_tokens": lost if "lost_tokens" in run.records.requests else 0,
        }


def scaling_use(records: RunRecords, num_devices: Sequence[int]) -> dict[str, Any]:
    """Computes mean and maximum replicas, starts, drains and device-hours.

    num_devices: per replica, by pool.
    """
    replicas, end_s = records.replicas, records.end_s
    paid_s = [replica.end_s - replica.start_s for replica in replicas]
    device_s = sum(num_devices[r.pool] * seconds for r, seconds in zip(replicas, paid_s, strict=True))
    times, counts = replicas_over_time(records)
    serving_s = weighted_sum(counts["serving"][:-1], np.diff(times))
    return {
        "mean_replicas": sum(paid_s) / end_s if end_s > 0 else float("nan"),
        "mean_serving": serving_s / end_s if end_s > 0 else float("nan"),
        "max_replicas": int((counts["wanted"] + counts["draining"]).max()),
        "starts": sum(replica.start_s > 0 for replica in replicas),
        "drains": sum(replica.drain_s is not None for replica in replicas),
        "device_hours": device_s / 3600,
    }


def replicas_over_time(records: RunRecords) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
    """Returns the times of state changes, from 0 s, and the replicas per state from each time on."""
    spans = [(name, span) for replica in records.replicas for name, span in _spans(replica)]
    times = np.unique([0.0, *(time_s for _, span in spans for time_s in span)])
    changes = {name: np.zeros(len(times), np.int64) for name in STATES}
    for name, span in spans:
        begin, end = np.searchsorted(times, span)
        changes[name][begin] += 1
        changes[name][end] -= 1
    return times, {name: np.cumsum(change) for name, change in changes.items()}


def _spans(replica: ReplicaRecord) -> list[tuple[str, tuple[float, float]]]:
    """Returns the states of a replica, each with its start and end in seconds."""
    until_s = replica.end_s if replica.drain_s is None else replica.drain_s
    spans = [("wanted", (replica.start_s, until_s)), ("draining", (until_s, replica.end_s))]
    if replica.ready_s is None:
        return [*spans, ("starting", (replica.start_s, until_s))]
    spans.append(("starting", (replica.start_s, replica.ready_s)))
    up_s = replica.ready_s
    for down_s, again_s in replica.down:
        spans += [("serving", (up_s, min(down_s, until_s))), ("down", (down_s, again_s))]
        up_s = again_s
    spans.append(("serving", (up_s, until_s)))
    return [(name, (begin, end)) for name, (begin, end) in spans if end > begin]


class PoolUse(Figure):
    """Metrics of each pool by name, if there are several: requests, utilisation, cost, pipeline.

    A request counts for the pool that served it last and also for the pool that computed its prompt. Example:
    two pools, all 9 requests sent to the second: {"large": {"requests": 0, ...}, "small": ...}.
    """

    name = "by_pool"

    def add(self, part: Part) -> None:
        requests = part.requests
        places = [column(requests, name) for name in ("replica", "prefill_replica") if name in requests]
        pools_of = [np.where(place >= 0, part.pool_by_replica[place], -1) for place in places]
        for index in range(len(part.setting.pools)) if places else ():
            self.whole.add(f"{index}", np.logical_or.reduce([of == index for of in pools_of]))

    def value(self, run: EndedRun) -> dict[str, Any]:
        pools, seconds = run.setting.pools, run.replica_s.tolist()
        if len(run.records.pools) < 2:
            return {}
        work: HardwareUse = run.figures[HardwareUse.name]
        works, pipelines = work.works(run), work.pipelines(run)
        return {
            pool.name: {
                "requests": self.whole[f"{index}"],
                **use_of(works[index : index + 1]),
                "device_hours": pools[index].num_devices * seconds[index] / 3600,
                "usd": pools[index].price_usd_per_hour * seconds[index] / 3600,
                "pipeline": pipelines[index],
            }
            for index, pool in enumerate(run.records.pools)
        }
