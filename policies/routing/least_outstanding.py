"""Least outstanding requests (join the shortest queue), or prompt tokens.

NGINX's least_conn counts requests. Tokens distinguish a long prompt from a short one. A request counts from
the time it is sent until it ends, by the router's own count, which has no delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, OneOf
from policies.core.request import Request
from policies.routing import COUNTS, ReplicaView
from policies.routing.loads import counts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOutstanding(Checked):
    """Fewest outstanding requests or tokens. Ties go to the smallest index. Reads all replicas."""

    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """The load that is compared: requests, or tokens (of their prompts)."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the fewest outstanding requests or tokens."""
        return int(counts_of(replicas, COUNTS[self.count]).argmin())
