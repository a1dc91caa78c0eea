"""Least outstanding requests (join the shortest queue), or prompt tokens.

NGINX's least_conn counts requests. Tokens tell a long prompt from a short one. What counts has been sent and
has not ended: the router's own count, which has no delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core.request import Request
from policies.routing import COUNTS, ReplicaView, check_count
from policies.routing.loads import counts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOutstanding:
    """Ties go to the replica of smallest index. Reads all replicas."""

    count: str = "requests"
    """What is counted: requests, or the tokens of their prompts."""

    def __post_init__(self) -> None:
        check_count(self.count)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica with the least that has not ended, at this instant."""
        return int(counts_of(replicas, COUNTS[self.count]).argmin())
