"""Who goes first, and who is preempted. One policy a file."""

from __future__ import annotations

from typing import Protocol

from policies.request import Request


class Scheduling(Protocol):
    """An order of requests: the smallest rank is admitted first, the largest rank is preempted first."""

    def rank(self, request: Request) -> tuple[float, ...]:
        """Sort key of a request, asked once, at its intake. Ties go by request id."""
        ...
