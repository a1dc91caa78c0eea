"""Queueing theory in closed form, and as Markov chains without one. Sizes have a mean of 1 s.

Sources: Kleinrock, Queueing Systems I (1975); Harchol-Balter, Performance Modeling and Design of Computer
Systems (2013); Mitzenmacher, IEEE TPDS 12 (2001).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import linalg, stats


def lindley_wait_s(arrival_s: ArrayLike, size_s: ArrayLike) -> NDArray[np.float64]:
    """Waits at one server, first come, first served: the next is max(0, this one + size - gap)."""
    walk_s = np.cumsum(np.concatenate([[0.0], np.asarray(size_s)[:-1] - np.diff(arrival_s)]))
    return walk_s - np.minimum.accumulate(walk_s)


def mg1_wait_s(load: float, second_moment: float) -> float:
    """Computes the mean wait at one server with sizes of mean 1 s, in seconds (Pollaczek and Khinchine)."""
    return load * second_moment / 2 / (1 - load)


def erlang_c(num_servers: int, load: float) -> float:
    """Computes the share of the requests that have to wait in M/M/k."""
    offered, blocked = load * num_servers, 1.0
    for servers in range(1, num_servers + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def mmk_wait_s(num_servers: int, load: float) -> float:
    """Computes the mean wait in M/M/k with sizes of mean 1 s, in seconds."""
    return erlang_c(num_servers, load) / num_servers / (1 - load)


def stationary(transitions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Computes the stationary probabilities of a chain from its transition probabilities or rates [N, N]."""
    balance = (transitions - np.diag(transitions.sum(axis=1))).T
    balance[0] = 1.0
    return linalg.solve(balance, np.eye(len(balance))[0])


def in_step_sojourn_s(
    rate_per_s: float,
    served: Callable[[int], int],
    iteration_s: Callable[[int], float],
    mean_tokens: int,
    max_present: int = 150,
) -> float:
    """Computes the mean sojourn if served(n) of n requests get a token each per iteration of iteration_s(n).

    Exact for Poisson arrivals and geometric sizes. Of those served, each ends with the iteration with
    probability 1 / mean_tokens. A request that arrives meanwhile waits for the next iteration; one that
    arrives at an idle engine begins at once. The Markov chain of the requests present when iterations begin
    gives their mean over time, and that, by Little's law, the sojourn.
    """
    present = np.arange(max_present)
    lasts_s = np.array([iteration_s(n) if n else 1 / rate_per_s for n in present])
    chain = np.zeros((max_present, max_present))
    chain[0, 1] = 1.0
    for n in present[1:]:
        ended = stats.binom.pmf(np.arange(served(n) + 1), served(n), 1 / mean_tokens)
        come = stats.poisson.pmf(present, rate_per_s * lasts_s[n])
        after = np.convolve(ended[::-1], come)[: max_present - n + served(n)]
        chain[n, n - served(n) : n - served(n) + len(after)] = after
    share = stationary(chain)
    request_s = present * lasts_s + np.where(present > 0, rate_per_s * lasts_s**2 / 2, 0.0)
    return float(share @ request_s / (share @ lasts_s) / rate_per_s)


def cyclic_sojourn_s(rate_per_s: float, turns: tuple[int, ...], max_present: int = 120) -> float:
    """Computes the mean sojourn at an exponential server that gets the Poisson arrivals whose turn is 1.

    turns repeat: (1, 0, 0) is every third arrival, E3/M/1. A Markov chain of (turn, requests present).
    """
    num_turns = len(turns)
    rates = np.zeros((num_turns, max_present, num_turns, max_present))
    for turn, is_mine in enumerate(turns):
        for present in range(max_present):
            after = min(present + is_mine, max_present - 1)
            rates[turn, present, (turn + 1) % num_turns, after] += rate_per_s
            if present:
                rates[turn, present, turn, present - 1] += 1.0
    share = stationary(rates.reshape(num_turns * max_present, -1)).reshape(num_turns, max_present)
    return float(share.sum(axis=0) @ np.arange(max_present)) / (rate_per_s * sum(turns) / num_turns)


def shorter_of_two_sojourn_s(rate_per_s: float, max_present: int = 30) -> float:
    """Computes the mean sojourn at two exponential servers if arrivals join the shorter queue.

    A Markov chain of the requests at both.
    """
    rates = np.zeros((max_present,) * 4)
    for a, b in np.ndindex(max_present, max_present):
        to_a = 0.5 if a == b else float(a < b)
        rates[a, b, min(a + 1, max_present - 1), b] += rate_per_s * to_a
        rates[a, b, a, min(b + 1, max_present - 1)] += rate_per_s * (1 - to_a)
        if a:
            rates[a, b, a - 1, b] += 1.0
        if b:
            rates[a, b, a, b - 1] += 1.0
    share = stationary(rates.reshape(max_present**2, -1)).reshape(max_present, max_present)
    return float(2 * share.sum(axis=1) @ np.arange(max_present)) / rate_per_s


def mean_field_sojourn_s(load: float, num_choices: int) -> float:
    """Computes the mean sojourn if each request joins the shortest of d of infinitely many queues.

    T = sum over i >= 1 of rho^((d^i - d) / (d - 1)).
    """
    d = num_choices
    return float(sum(load ** ((d**i - d) // (d - 1)) for i in range(1, 12)))
