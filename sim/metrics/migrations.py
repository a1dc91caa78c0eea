"""Computes the figures of live migrations: their number, bytes and durations."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.metrics.definitions import describe
from sim.records.migrations import Outcome
from sim.records.run import RunRecords


def migration_figures(records: RunRecords) -> dict[str, Any]:
    """Computes the figures of all migrations of a run with a migration policy, over the whole run.

    count: requests moved, each as often as it moved. given_up: migrations without effect, by outcome. bytes:
    KV copied, also by those. stages: mean of the moved requests. downtime: seconds from the last token on the
    source to the start of the first iteration on the target. duration: seconds from the decision to the last
    byte. share_of_time: share of the replicas' paid time in which one is part of a migration.

    Example: a request stops at 7.0 s, its last KV arrives at 7.3 s, and the target begins its next iteration
    at 7.5 s: a downtime of 0.5 s.
    """
    found = records.migrations or ()
    moved = [one for one in found if one.outcome is Outcome.moved]
    ends_s, begins_s = (np.array([getattr(one, name) for one in found]) for name in ("ended_s", "began_s"))
    paid_s = sum(replica.end_s - replica.start_s for replica in records.replicas)
    return {
        "count": len(moved),
        "requests": len({one.request_id for one in moved}),
        "given_up": {
            outcome.name: sum(one.outcome is outcome for one in found)
            for outcome in Outcome
            if outcome is not Outcome.moved
        },
        "bytes": float(sum(one.num_bytes for one in found)),
        "stages": float(np.mean([one.num_stages for one in moved])) if moved else float("nan"),
        "downtime": describe(np.array([one.resumed_s - one.stopped_s for one in moved])),
        "duration": describe(np.array([one.ended_s - one.began_s for one in moved])),
        "share_of_time": 2 * float((ends_s - begins_s).sum()) / paid_s if paid_s > 0 else float("nan"),
    }
