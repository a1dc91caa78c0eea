"""Priority classes, first come, first served within a class (vLLM's `--scheduling-policy priority`).

Strict: a class that keeps the engine busy starves the classes behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority:
    """A smaller `Request.priority` is admitted first; among the running, the largest is preempted first."""

    def rank(self, request: Request) -> tuple[float, ...]:
        """(priority, arrival)."""
        return (request.priority, request.arrival_s)
