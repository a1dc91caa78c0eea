"""What becomes of the requests of a replica that crashes: how much of the work on them is kept, and where.

    scratch   nothing: the request begins again, and its client waits for the answer from the beginning.
    tokens    the gateway has kept the tokens that it has streamed: the request goes on behind them in another
              replica, which computes the KV of prompt and tokens again, as far as its cache has not got it.
              NVIDIA Dynamo's request migration.
    kv        and KV has been copied to the host memory of another replica while it was computed; that part is
              read from there, the rest computed again. Replication as in DejaVu (Strati et al., ICML 2024),
              whose workers send each token's KV to the next one's. If that replica is gone, too: as tokens.

Tokens that went out are never sampled, emitted or counted again. A request that cannot go on in the replica
that was chosen, whose KV memory is smaller than the other's, begins again there.
"""

from __future__ import annotations

from dataclasses import dataclass

WAYS = ("scratch", "tokens", "kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How requests go on whose replica has crashed."""

    way: str = "scratch"
    """scratch, tokens or kv."""
    every_tokens: int | None = None
    """With kv: KV is copied after every so many iterations, a token each of all who decode; None: never."""

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way={self.way}: must be one of {', '.join(WAYS)}")
        if self.way != "kv" and self.every_tokens is not None:
            raise ValueError(
                f"every_tokens={self.every_tokens}: must be null, way={self.way} copies no KV; or choose kv"
            )
        if self.way == "kv" and (self.every_tokens is None or self.every_tokens < 1):
            raise ValueError(f"every_tokens={self.every_tokens}: must be >= 1 with way=kv")

    @property
    def keeps_tokens(self) -> bool:
        """Whether a request goes on behind the tokens that its client has."""
        return self.way != "scratch"
