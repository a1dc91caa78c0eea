"""Counter-based random numbers: each is a function of its name, so that no draw shifts another."""

from __future__ import annotations

from hashlib import blake2b

_BITS = 52  # one less than a float's mantissa has, so that the half below is kept


def uniform(seed: int, stream: str, request_id: int) -> float:
    """A number > 0 and < 1, always the same for the same arguments, on every machine."""
    digest = blake2b(f"{seed}/{stream}/{request_id}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - _BITS)) + 0.5) / (1 << _BITS)
