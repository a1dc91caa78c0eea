"""Static routing, for which a run can be divided into shards: policies that read no replica.

Static routing chooses a replica without reading the state of any.

Such a policy gives each replica the same requests whatever the replicas do, so replicas do not influence each
other, and each can be simulated apart. A policy declares this by reads_replicas: ClassVar[bool] = False, or
by a property if it depends on its settings. The declaration is checked: the policy gets views of replicas
that have nothing but an index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from policies.routing import ReplicaView, Routing, RoutingTraits
from policies.user_code import WrongDecisionError, traits_of

STATE = frozenset(n for n in (*ReplicaView.__annotations__, *vars(ReplicaView)) if n[0] != "_") - {"index"}
"""What a router may read of a replica if it does not declare that it reads none."""


def reads_replicas(routing: object) -> bool:
    """Returns whether a policy may read the state of replicas; a policy without a declaration may."""
    return bool(traits_of(routing, RoutingTraits).reads_replicas)


@runtime_checkable
class ChoosesMany(Protocol):
    """A static policy that reads no request either, so that it can choose for many at once."""

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns what the next `count` calls of `choose` would return, [count]."""
        ...


class IndexOnly:
    """A view of a replica with its index only; reading anything else raises WrongDecisionError."""

    __slots__ = ("_routing", "index")

    def __init__(self, index: int, routing: object) -> None:
        self.index = index
        self._routing = routing

    def __getattr__(self, name: str) -> Any:
        if name not in STATE:
            raise AttributeError(name)
        raise WrongDecisionError(
            self._routing,
            "choose",
            f"has read {name} of a replica, although reads_replicas is false",
            "it may read only index; leave out the declaration, or do not read it",
        )


def index_views(indices: Iterable[int], routing: Routing) -> list[ReplicaView]:
    """Returns a view for each index, for a policy that reads no replica."""
    return [cast(ReplicaView, IndexOnly(index, routing)) for index in indices]
