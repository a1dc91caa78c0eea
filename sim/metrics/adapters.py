"""Computes the use of LoRA adapters in a run: hits, loads, evictions, and adapters per batch."""

from __future__ import annotations

from typing import Any

from policies.adapters.serving import AdapterCounts
from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, Part


class AdapterUse(Figure):
    """Use of adapters over all replicas and the whole run; None if no adapters are served.

    hit_share: share of the started sequences for which the adapter was already loaded. batch_adapters: number
    of different adapters in an iteration, mean over the iterations with at least one.
    """

    name = "adapters"

    def add(self, part: Part) -> None:
        if "adapters" in part.iterations:
            different = times(part.iterations, "adapters")
            self.whole.add("different", different[different > 0])
            self.whole.add("with_adapters", different > 0)

    def value(self, run: EndedRun) -> dict[str, Any] | None:
        by_replica = list(run.records.adapters)
        if not by_replica:
            return None
        counts = {name: sum(getattr(one, name) for one in by_replica) for name in AdapterCounts.__slots__}
        num_some = self.whole["with_adapters"]
        return {
            "hit_share": per(counts["num_hits"], counts["num_starts"]),
            "loads": counts["num_loads"],
            "loads_from_disk": counts["num_loads_from_disk"],
            "loaded_bytes": counts["loaded_bytes"],
            "evictions": counts["num_evicted"],
            "batch_adapters": self.whole["different"] / num_some if num_some else 0.0,
        }
