"""No admission control: every request is admitted, however long it will wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitAll:
    """Admits every request; reads nothing."""

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Returns None: every request is admitted."""
        return None
