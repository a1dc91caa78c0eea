"""Fixed roles: every replica keeps the role of its pool, as in DistServe (OSDI 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.roles import ReplicaLoad, Switch


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Never changes a role."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None, as `switch` is never called."""
        return None

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """Returns None: no replica changes its role."""
        return None
