"""Recovery of requests after a crash of their replica: how much of the computed work is kept, and where.

    scratch   Nothing is kept: the request restarts, and its client gets the output from the beginning.
    tokens    The gateway keeps the tokens that it has streamed. The request continues after them in another
              replica, which recomputes the KV of prompt and tokens that it does not have in its cache.
              This is NVIDIA Dynamo's request migration.
    kv        Also, KV is copied to the host memory of another replica while it is computed. That part is read
              from there, the rest is recomputed. This is replication as in DejaVu (Strati et al., ICML 2024),
              where a worker sends the KV of each token to the next worker. If that replica is down, too,
              recovery is as with tokens.

Streamed tokens are never sampled, emitted or counted again. A request that cannot continue in the chosen
replica, because the KV memory of that one is too small, restarts there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, OneOf, check

WAYS = ("scratch", "tokens", "kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery(Checked):
    """Settings of the recovery of requests after a crash of their replica."""

    way: Annotated[str, OneOf(WAYS)] = "scratch"
    """scratch, tokens or kv; see the module."""
    every_tokens: int | None = None
    """With kv: replication interval in iterations, which are output tokens of each decoding sequence."""

    def __post_init__(self) -> None:
        check(self)
        if self.way != "kv" and self.every_tokens is not None:
            raise ValueError(
                f"every_tokens={self.every_tokens}: must be null, as way={self.way} copies no KV; "
                "or choose way=kv"
            )
        if self.way == "kv" and (self.every_tokens is None or self.every_tokens < 1):
            raise ValueError(f"every_tokens={self.every_tokens}: must be >= 1 with way=kv")

    @property
    def keeps_tokens(self) -> bool:
        """True if a request continues after the tokens that its client already has."""
        return self.way != "scratch"
