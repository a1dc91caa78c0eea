"""Independent random streams by name: drawing more numbers from one does not change another."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str, *keys: int) -> np.random.Generator:
    """Returns the generator of the stream `name` (sub-stream `keys`) of the run `seed`; seed, keys >= 0."""
    entropy = [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=keys))
