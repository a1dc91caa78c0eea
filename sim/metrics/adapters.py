"""Computes the use of LoRA adapters in a run: hits, loads, evictions, and adapters per batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from policies.adapters.residents import AdapterCounts
from sim.metrics.sums import Totals


def add_adapter_use(totals: Totals, iterations: pd.DataFrame) -> None:
    """Adds the terms of `adapter_figures`, if adapters are served."""
    if "adapters" in iterations:
        different = iterations["adapters"].to_numpy(dtype=np.float64)
        totals.add("different_adapters", different[different > 0])
        totals.add("with_adapters", different > 0)


def adapter_figures(totals: Totals, adapters: Iterable[AdapterCounts]) -> dict[str, Any] | None:
    """Computes the figures over all replicas and the whole run; returns None if no adapters are served.

    hit_share: share of the started sequences for which the adapter was already loaded. batch_adapters: number
    of different adapters in an iteration, mean over the iterations with at least one. adapters: see
    `RunRecords`.
    """
    by_replica = list(adapters)
    if not by_replica:
        return None
    counts = {name: sum(getattr(one, name) for one in by_replica) for name in AdapterCounts.__slots__}
    num_starts, num_some = counts["num_starts"], totals["with_adapters"]
    return {
        "hit_share": counts["num_hits"] / num_starts if num_starts else float("nan"),
        "loads": counts["num_loads"],
        "loads_from_disk": counts["num_loads_from_disk"],
        "loaded_bytes": counts["loaded_bytes"],
        "evictions": counts["num_evicted"],
        "batch_adapters": totals["different_adapters"] / num_some if num_some else 0.0,
    }
