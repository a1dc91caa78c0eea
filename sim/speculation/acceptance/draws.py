"""Uniform random numbers by output position: a function of (seed, stream, request, position) only.

The numbers of a request are the outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The n-th is a
hash of state + n * gamma, so that the numbers of all positions are computed at once.
The state at the start is a hash of (seed, stream, request id). The numbers therefore do not depend on the
number of draft tokens, on preemptions, on retries, nor on the replica that computes a token.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)  # a float has 53 bits


def start_state(seed: int, stream: str, request_id: int) -> int:
    """Returns the state from which the numbers of a request are counted."""
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
