"""No migration: a request stays on its replica until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.migration import Move, ReplicaLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class Stay:
    """Never moves a request."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None, as `moves` is never called."""
        return None

    @property
    def last_stage_tokens(self) -> int:
        """Maximum number of tokens of a last stage; there is none."""
        return 0

    @property
    def max_stages(self) -> int:
        """Maximum number of stages; there are none."""
        return 0

    def moves(self, replicas: Sequence[ReplicaLoad], now: float) -> Sequence[Move]:
        """Returns an empty sequence: running requests stay where they are."""
        return ()
