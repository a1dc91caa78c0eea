"""Least outstanding requests (join the shortest queue), or prompt tokens.

NGINX's least_conn counts requests. Tokens distinguish a long prompt from a short one. A request counts from
the time it is sent until it ends, by the router's own count, which has no delay.
Routers that compare hundreds of replicas read these counts of all of them as an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, OneOf
from policies.core.request import Request
from policies.routing import COUNTS, ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOutstanding(Checked):
    """Fewest outstanding requests or tokens. Ties go to the smallest index. Reads all replicas."""

    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """The load that is compared: requests, or tokens (of their prompts)."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the fewest outstanding requests or tokens."""
        return int(counts_of(replicas, COUNTS[self.count]).argmin())


class Counted(Protocol):
    """A sequence of replicas that keeps their counts in arrays."""

    def counts(self, name: str) -> NDArray[np.int64]:
        """Returns the result of `counts_of`: a read-only array, valid until a count changes."""
        ...


def counts_of(replicas: Sequence[ReplicaView], name: str) -> NDArray[np.int64]:
    """Returns num_outstanding or num_outstanding_tokens, by `name`, of all replicas [num_replicas].

    The array is read-only and valid until a count changes. Raises ValueError for another name.
    """
    if name not in COUNTS.values():
        raise ValueError(f"counts_of: name={name}: must be one of {', '.join(COUNTS.values())}")
    if hasattr(replicas, "counts"):
        return cast(Counted, replicas).counts(name)
    counts = np.fromiter(map(attrgetter(name), replicas), np.int64, len(replicas))
    counts.flags.writeable = False
    return counts
