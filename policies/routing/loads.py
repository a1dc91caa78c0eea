"""Outstanding requests or tokens of all replicas as an array, for routers that compare hundreds of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from policies.routing import COUNTS, ReplicaView


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
