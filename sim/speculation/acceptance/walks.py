"""From rates to verdicts: a draft token is tested with the random number of its output position.

A pass that begins to draft at output position p asks at place j = 1, 2, ... the number u[p + j - 1]:

    chain   the token at place j is accepted if u < rate_j and all tokens before it are
    tree    the children of a node are disjoint events: rank 1 is accepted if u < rate_j1, rank 2 if
            rate_j1 <= u < rate_j1 + rate_j2, and so on; the pass goes on from the accepted child

A pass asks no number that an earlier pass of the request has asked: that one accepts a tokens, the target
model itself adds the one at p + a, and the next pass drafts from p + a + 1. Passes are therefore independent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from policies.speculation import TokenTree


def accepted_of_chain(u: NDArray[np.float64], rates_K: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Counts the accepted tokens of drafts of K tokens, for each position of u but the last K - 1."""
    *rates, last_rate = rates_K.tolist()
    num_positions = len(u) - len(rates)
    accepted: NDArray[np.uint8] = (u[len(rates) :] < last_rate).view(np.uint8)
    for place in range(len(rates) - 1, -1, -1):  # those from this place on
        accepted += 1
        accepted *= u[place : place + num_positions] < rates[place]
    return accepted


def accepted_of_tree(
    u: NDArray[np.float64], rates_KR: NDArray[np.float64], tree: TokenTree
) -> NDArray[np.uint8]:
    """Counts the accepted tokens of trees, for each position of u but the last tree.depth - 1.

    rates_KR: probability by place and rank that a child is the target's token if its parent is.
    """
    children_NR = _children(tree)
    upper_KR = rates_KR[:, : max(tree.ranks) + 1].cumsum(axis=1)
    num_positions = len(u) - tree.depth + 1
    nodes = np.full(num_positions, tree.num_nodes)  # the row of the newest token
    accepted = np.zeros(num_positions, np.uint8)
    for place, upper_R in enumerate(upper_KR[: tree.depth]):
        ranks = upper_R.searchsorted(u[place : place + num_positions], side="right")
        nodes = children_NR[nodes, ranks]
        accepted += nodes != _NONE
    return accepted


_NONE = -1  # the row of a rejected draft: the last, all of whose children are this row again


@lru_cache(maxsize=64)
def _children(tree: TokenTree) -> NDArray[np.int64]:
    """Returns the child of each node (row) by rank (column).

    The row after those of the nodes is the newest token of the sequence, the last row the end of the draft.
    """
    children_NR = np.full((tree.num_nodes + 2, max(tree.ranks) + 2), _NONE)
    for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        children_NR[tree.num_nodes if parent < 0 else parent, rank] = node
    return children_NR
