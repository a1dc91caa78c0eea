"""Outstanding loads of all replicas at once, for routers that look for the least loaded of hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from policies.routing import COUNTS, ReplicaView


class Counted(Protocol):
    """Replicas whose counts are kept in arrays, so that they need not be asked one by one."""

    def counts(self, name: str) -> NDArray[np.int64]:
        """The result of `counts_of`: read-only, and valid only at this instant."""
        ...


def counts_of(replicas: Sequence[ReplicaView], name: str) -> NDArray[np.int64]:
    """num_outstanding or num_outstanding_tokens, as `name` says, of all replicas [num_replicas].

    The array is read-only and holds at this instant only. Raises ValueError for another name.
    """
    if name not in COUNTS.values():
        raise ValueError(f"counts_of: name={name}: must be one of {', '.join(COUNTS.values())}")
    if hasattr(replicas, "counts"):
        return cast(Counted, replicas).counts(name)
    counts = np.fromiter(map(attrgetter(name), replicas), np.int64, len(replicas))
    counts.flags.writeable = False
    return counts
