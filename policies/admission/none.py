"""No admission control: whoever comes is let in, and waits as long as it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitAll:
    """Reads nothing."""

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Never one."""
        return None
