"""Acceptance rates by place and rank, and the verdicts that follow from them by random numbers.

A rate is conditional: the probability that a draft token is accepted if all tokens before it in its pass
are. Trees also need the rates of ranks 2, 3, ..., the children that the draft considers less likely than its
first choice. If these are not measured, every further rank, given that all earlier ranks missed, has the
target's token with the probability of rank 1 times a factor d (rank_decay):

    rate of rank r = (1 - a) (1 - d a)^(r - 2) d a        a: rate of rank 1; r = 2, 3, ...

Ranks are disjoint events, and this rule keeps their sum at most 1.

The random numbers are uniform and belong to output positions: each is a function only of (seed, stream,
request, position). The numbers of a request are the outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA
2014). The n-th is a hash of state + n * gamma, so the numbers of all positions are computed at once. The
state at the start is a hash of (seed, stream, request id). The numbers therefore do not depend on the number
of draft tokens, on preemptions, on retries, or on the replica that computes a token.

A draft token is tested with the random number of its output position. A pass that begins to draft at output
position p uses the number u[p + j - 1] at place j = 1, 2, ...:

    chain   the token at place j is accepted if u < rate_j and all tokens before it are
    tree    the children of a node are disjoint events: rank 1 is accepted if u < rate_j1, rank 2 if
            rate_j1 <= u < rate_j1 + rate_j2, and so on; the pass continues from the accepted child A pass
            never uses a number of an earlier pass of the request: if that pass accepts a tokens, the target
            model itself adds the token at p + a, and the next pass drafts from p + a + 1. Passes are
            therefore independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.speculation import Proposer, TokenTree
from sim.speculation import STREAM, Verdicts

_GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)  # a float has 53 bits


def start_state(seed: int, stream: str, request_id: int) -> int:
    """Returns the initial state of the numbers of a request."""
    digest = blake2b(f"{seed}/{stream}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def split_mix(state: int, count: int) -> NDArray[np.uint64]:
    """Returns the first `count` outputs of SplitMix64 from a state."""
    z = _multiples_of_gamma(_next_power_of_two(count))[:count] + np.uint64(state)
    z ^= z >> _SHIFT[0]
    z *= _MIX[0]
    z ^= z >> _SHIFT[1]
    z *= _MIX[1]
    z ^= z >> _SHIFT[2]
    return z


def uniforms(seed: int, stream: str, request_id: int, count: int) -> NDArray[np.float64]:
    """Returns the numbers of output positions 0 to count - 1, each >= 0 and < 1, equal on every machine."""
    bits = split_mix(start_state(seed, stream, request_id), count)
    bits >>= _UNUSED_BITS
    return bits.astype(np.float64) * 2.0**-53


def _next_power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@lru_cache(maxsize=64)
def _multiples_of_gamma(count: int) -> NDArray[np.uint64]:
    multiples = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)  # modulo 2^64
    multiples.flags.writeable = False
    return multiples


def accepted_of_chain(u: NDArray[np.float64], rates_K: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Counts the accepted tokens of drafts of K tokens, for each position of u except the last K - 1."""
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
    """Counts the accepted tokens of trees, for each position of u except the last tree.depth - 1.

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


def num_ranks(proposer: Proposer) -> int:
    """Returns the maximum number of children of a node in the drafts of a proposer."""
    return 1 if proposer.tree is None else max(proposer.tree.ranks) + 1


def with_ranks(rates_K: NDArray[np.float64], num_ranks: int, rank_decay: float) -> NDArray[np.float64]:
    """Returns the rates by place and rank that follow from those of rank 1 by the rule of this module."""
    if num_ranks == 1:
        return rates_K[:, None]
    further_K1 = rank_decay * rates_K[:, None]
    found_KR = (1 - further_K1) ** np.arange(num_ranks - 1) * further_K1
    return np.concatenate([rates_K[:, None], (1 - rates_K)[:, None] * found_KR], axis=1)


def verdicts_of(
    rates_KR: NDArray[np.float64], request: Request, seed: int, num_positions: int, proposer: Proposer
) -> Verdicts:
    """Draws the verdicts on a request whose drafts have the given rates by place and rank."""
    u = uniforms(seed, STREAM, request.request_id, num_positions + len(rates_KR) - 1)
    if proposer.tree is None:
        return Verdicts(accepted_of_chain(u, rates_KR[:, 0]))
    return Verdicts(accepted_of_tree(u, rates_KR, proposer.tree))


def mean_accepted_length(rate: float, num_draft_tokens: int) -> float:
    """Computes vLLM's mean acceptance length, the tokens per pass, with independent acceptance.

    1 + a + a^2 + ... + a^K = (1 - a^(K + 1)) / (1 - a); a = 0.8, K = 4: 3.3616.
    """
    return float(sum(rate**place for place in range(num_draft_tokens + 1)))


def require_rates(name: str, rates: Sequence[float]) -> None:
    """Raises ValueError for an empty list and for a rate that is not a probability."""
    if not rates:
        raise ValueError(f"{name}=[]: must have one rate per draft token")
    for place, rate in enumerate(rates, 1):
        if not 0 <= rate <= 1:
            raise ValueError(f"{name}: place {place} has {rate}; must be a probability, >= 0 and <= 1")
