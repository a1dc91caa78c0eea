"""Placement of experts on expert-parallel ranks: the chances that a token visits the busiest rank's experts.

    dealt      one by one over the ranks, the most popular first; what a load balancer without copies reaches
    in_order   by number, as engines load them: rank 0 has the first experts
    scattered  at random with respect to popularity: no load balancing. The busiest rank is that of the
               median of `NUM_DRAWS` placements, drawn with a fixed seed
    eplb       redundant experts: DeepSeek-V3 (2024), section 3.4, and its balancer EPLB (2025). Each copy
               goes to the expert with the most tokens per replica; then the replicas, the fullest first, go
               to the rank with the fewest tokens that has space

All ranks wait for the busiest one, so only its experts are priced. Replicas of an expert share its tokens
evenly.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

PLACEMENTS = ("dealt", "in_order", "scattered", "eplb")

NUM_DRAWS = 31
"""Random placements of `scattered`; their median is that of any one of them, more or less."""


def busiest_rank(chances: Floats, ep_size: int, placement: str, num_redundant: int = 0) -> Floats:
    """Returns the chance that a token visits each expert of the busiest rank, in descending order.

    chances: of each expert, by its number [E]; num_redundant: copies on all ranks together, with eplb. The
    number of replicas must be a multiple of ep_size.
    """
    if placement == "dealt":
        return descending(chances)[::ep_size]
    if placement == "eplb":
        ranks = packed(replicated(chances, num_redundant), ep_size)
    elif placement == "in_order":
        ranks = chances.reshape(ep_size, -1)
    else:
        ranks = _scattered(chances, ep_size)
    return descending(ranks[np.argmax(ranks.sum(axis=1))])


def descending(chances: Floats) -> Floats:
    """Returns the chances, the largest first."""
    return np.asarray(-np.sort(-chances, kind="stable"))


def replicated(chances: Floats, num_redundant: int) -> Floats:
    """Returns the chance of each replica, in descending order; every copy goes where it relieves the most.

    Chances 0.6, 0.3, 0.1 and two copies: 0.3, 0.3, 0.3, 0.1, then 0.2, 0.2, 0.2, 0.3, 0.1 in descending
    order.
    """
    counts = [(-chance, expert, 1) for expert, chance in enumerate(chances.tolist())]
    heapq.heapify(counts)
    for _ in range(num_redundant):
        _, expert, count = counts[0]
        heapq.heapreplace(counts, (-chances[expert] / (count + 1), expert, count + 1))
    return descending(np.array([-negative for negative, _, count in counts for _ in range(count)]))


def packed(replicas: Floats, ep_size: int) -> Floats:
    """Returns the chances of the replicas on each rank [ep_size, replicas per rank]; the fullest go first.

    Chances 0.5, 0.3, 0.3, 0.1 on two ranks: 0.5 and 0.1; 0.3 and 0.3.
    """
    size = len(replicas) // ep_size
    ranks: list[list[float]] = [[] for _ in range(ep_size)]
    with_space = [(0.0, rank) for rank in range(ep_size)]
    for chance in descending(replicas).tolist():
        load, rank = heapq.heappop(with_space)
        ranks[rank].append(chance)
        if len(ranks[rank]) < size:
            heapq.heappush(with_space, (load + chance, rank))
    return np.array(ranks)


def _scattered(chances: Floats, ep_size: int) -> Floats:
    """Returns the random placement whose busiest rank is the median of all draws."""
    rng = np.random.default_rng(0)
    draws = [rng.permutation(chances).reshape(ep_size, -1) for _ in range(NUM_DRAWS)]
    return sorted(draws, key=lambda ranks: float(ranks.sum(axis=1).max()))[NUM_DRAWS // 2]
