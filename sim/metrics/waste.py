"""Computes the use and the waste of the KV memory: shares of all KV token slots over time, which sum to 1.

    filled     slots that hold the KV of a token
    reserved   empty slots of a sequence that it fills later
    internal   empty slots of a sequence that it frees without filling them; with block-wise allocation,
               all empty slots in the last block of each sequence
    external   free slots while the first waiting request does not fit: too fragmented, or too few
    free       free slots while no request waits for memory

Follows Kwon et al., SOSP 2023, section 3.1, where "external" is measured in the same way. A slot with a token
that several sequences share counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.sums import Totals, weighted_sum
from sim.metrics.utilisation import of_pools
from sim.records.run import PoolRecord, RunRecords


def add_kv_waste(
    totals: Totals,
    iterations: pd.DataFrame,
    inside_s: NDArray[np.float64],
    pools: Sequence[PoolRecord],
    pool: NDArray[np.int64],
) -> None:
    """Adds the slot-seconds of `kv_waste_figures`. pool: index of the pool of each iteration."""
    num_blocks, block_size = _column(iterations, "kv_blocks_used"), of_pools(pools, "block_size", pool)
    held = num_blocks * block_size
    filled = np.minimum(_column(iterations, "kv_tokens_used"), held)
    unused = (of_pools(pools, "num_kv_blocks", pool) - num_blocks) * block_size
    totals.add("kv_empty_s", (held - filled) * inside_s)
    totals.add("kv_external_s", unused * _column(iterations, "waits_for_memory") * inside_s)
    totals.add("kv_filled_s", filled * inside_s)


def kv_waste_figures(
    totals: Totals, internal_s: float, pools: Sequence[PoolRecord], replica_s: NDArray[np.float64]
) -> dict[str, float]:
    """Computes the mean shares over the window and all replicas; NaN if the window is empty.

    internal_s: slot-seconds of slots that were never filled; NaN: unknown. replica_s: `rented_s`. Between
    iterations all slots are free. Empty slots of sequences that still run at the end count as reserved.
    wasted_share = (reserved + internal + external) / (1 - free): share of the memory in demand without KV.

    Example: 100 slots for 10 s; a sequence holds 60 for 5 s, fills 20 evenly and no more; no request waits.
    Filled 10 x 5 = 50, reserved 50, internal 40 x 5 = 200 of 1000 slot-seconds; wasted 250 / 300.
    """
    empty_s, external_s, filled_s = (totals[f"kv_{name}_s"] for name in ("empty", "external", "filled"))
    all_s = weighted_sum([pool.num_kv_blocks * pool.block_size for pool in pools], replica_s)
    free_s = all_s - filled_s - empty_s - external_s
    return {
        "filled_share": _share(filled_s, all_s),
        "reserved_share": _share(empty_s - internal_s, all_s),
        "internal_share": _share(internal_s, all_s),
        "external_share": _share(external_s, all_s),
        "free_share": _share(free_s, all_s),
        "wasted_share": _share(empty_s + external_s, all_s - free_s),
    }


def never_filled_s(records: RunRecords, inside_s: NDArray[np.float64]) -> float | None:
    """Computes the slot-seconds of slots that were held and never filled; None: of all empty slots."""
    unfilled = records.unfilled
    if unfilled is None:
        return None
    replica = records.iterations["replica"].to_numpy()
    place_s = 0.0
    for index in np.unique(unfilled[:, 0]):
        # Seconds inside the window before each iteration of the replica.
        before_s = np.concatenate([[0.0], np.cumsum(inside_s[replica == index])])
        _, first, end, num_places = unfilled[unfilled[:, 0] == index].T
        place_s += weighted_sum(num_places, before_s[end] - before_s[first])
    return place_s


def _column(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")
