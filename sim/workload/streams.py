"""Independent random streams: each is named, so that drawing more from one never shifts another."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, name: str, *keys: int) -> np.random.Generator:
    """The generator of the stream `name` (and its sub-stream `keys`) in the run `seed`; seed, keys >= 0."""
    entropy = [seed, zlib.crc32(name.encode())]
    return np.random.default_rng(np.random.SeedSequence(entropy, spawn_key=keys))
