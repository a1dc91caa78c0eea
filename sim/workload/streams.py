"""Independent random streams by name: drawing more numbers from one does not change another."""

from __future__ import annotations

import zlib

import numpy as np

from sim.workload.distributions import IntArray


def stream(seed: int, name: str, *keys: int) -> np.random.Generator:
    """Returns the generator of the stream `name` (sub-stream `keys`) of the run `seed`; seed, keys >= 0."""
    entropy = [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=keys))


def zipf_draws(rng: np.random.Generator, num: int, skew: float, count: int) -> IntArray:
    """Draws `count` numbers from 0 to num - 1; number k has a weight of (k + 1)^-skew; 0: all are equal."""
    weights = np.arange(1.0, num + 1) ** -skew
    upper = np.cumsum(weights / weights.sum())[:-1]
    return np.searchsorted(upper, rng.random(count), side="right").astype(np.int64)
