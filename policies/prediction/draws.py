"""Counter-based random numbers: each is a function of its name, so that no draw changes another."""

from __future__ import annotations

from hashlib import blake2b

_BITS = 52  # one less than the 53 of a float, so that adding 0.5 is exact


def uniform(seed: int, stream: str, request_id: int) -> float:
    """Returns a number > 0 and < 1 that depends only on the arguments, equal on every machine."""
    digest = blake2b(f"{seed}/{stream}/{request_id}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - _BITS)) + 0.5) / (1 << _BITS)
