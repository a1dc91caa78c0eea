"""What the KV memory is used for, and lost to: shares of token places over time that add up to 1.

    filled     hold a token's KV
    reserved   empty, held by a sequence that fills them later
    internal   empty, held, and never filled before they are given back; where room is taken block by block,
               all that is empty in the last block of each sequence
    external   free although the first of the waiting finds no room: in pieces too small for it, or too few
    free       free, and nobody waits for memory

After Kwon et al., SOSP 2023, section 3.1, where "external" is measured in the same way. Tokens that sequences
share fill each place once.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.utilisation import rented_s
from sim.metrics.window import Window
from sim.records.run import RunRecords


def kv_waste(records: RunRecords, window: Window, inside_s: NDArray[np.float64]) -> dict[str, float]:
    """Mean shares over the window and all replicas, and the waste while memory is wanted; NaN if it is empty.

    inside_s: for each iteration, how much of it lies in the window. Between iterations all is free. What is
    still held when the run ends counts as reserved.
    wasted_share = (reserved + internal + external) / (1 - free): of the memory in demand, what holds no KV.

    100 places for 10 s. A region of 60 for 5 s that is filled evenly up to 20, never further; nobody waits.
    Filled 10 x 5 = 50, reserved 50, internal 40 x 5 = 200 of 1000 place-seconds; wasted 250 / 300.
    """
    iterations = records.iterations
    replica = iterations["replica"].to_numpy()
    num_blocks, block_size = _column(iterations, "kv_blocks_used"), records.by_replica("block_size")[replica]
    held = num_blocks * block_size
    filled = np.minimum(_column(iterations, "kv_tokens_used"), held)
    unused = (records.by_replica("num_kv_blocks")[replica] - num_blocks) * block_size
    empty_s = float(np.dot(held - filled, inside_s))
    internal_s = empty_s if records.unfilled is None else _unfilled_s(iterations, records.unfilled, inside_s)
    external_s = float(np.dot(unused * _column(iterations, "waits_for_memory"), inside_s))
    filled_s = float(np.dot(filled, inside_s))
    places = [pool.num_kv_blocks * pool.block_size for pool in records.pools]
    all_s = float(np.dot(places, rented_s(records, window)))
    free_s = all_s - filled_s - empty_s - external_s
    return {
        "filled_share": _share(filled_s, all_s),
        "reserved_share": _share(empty_s - internal_s, all_s),
        "internal_share": _share(internal_s, all_s),
        "external_share": _share(external_s, all_s),
        "free_share": _share(free_s, all_s),
        "wasted_share": _share(empty_s + external_s, all_s - free_s),
    }


def _unfilled_s(
    iterations: pd.DataFrame, unfilled: NDArray[np.int64], inside_s: NDArray[np.float64]
) -> float:
    """Place-seconds of what was held and never filled."""
    replica = iterations["replica"].to_numpy()
    place_s = 0.0
    for index in np.unique(unfilled[:, 0]):
        # Seconds inside the window before each iteration of the replica.
        before_s = np.concatenate([[0.0], np.cumsum(inside_s[replica == index])])
        _, first, end, num_places = unfilled[unfilled[:, 0] == index].T
        place_s += float(np.dot(num_places, before_s[end] - before_s[first]))
    return place_s


def _column(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")
