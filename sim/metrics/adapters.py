"""Computes the use of LoRA adapters in a run: hits, loads, evictions, and adapters per batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.adapters.residents import AdapterCounts
from sim.records.run import RunRecords


def adapter_use(records: RunRecords) -> dict[str, Any] | None:
    """Computes the figures over all replicas and the whole run; returns None if no adapters are served.

    hit_share: share of the started sequences for which the adapter was already loaded. batch_adapters: number
    of different adapters in an iteration, mean over the iterations with at least one.
    """
    by_replica = list(records.adapters)
    if not by_replica:
        return None
    counts = {name: sum(getattr(one, name) for one in by_replica) for name in AdapterCounts.__slots__}
    different = records.iterations["adapters"].to_numpy(dtype=np.float64)
    some = different[different > 0]
    num_starts = counts["num_starts"]
    return {
        "hit_share": counts["num_hits"] / num_starts if num_starts else float("nan"),
        "loads": counts["num_loads"],
        "loads_from_disk": counts["num_loads_from_disk"],
        "loaded_bytes": counts["loaded_bytes"],
        "evictions": counts["num_evicted"],
        "batch_adapters": float(some.mean()) if len(some) else 0.0,
    }
