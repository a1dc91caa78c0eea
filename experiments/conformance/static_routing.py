"""The promise of routing policies that declare reads_replicas = False."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.conformance.promises import Routed
from experiments.conformance.same_run import assert_same_records
from experiments.conformance.worlds import World
from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.static import index_views


class Blind(Routed):
    """Routing policy that gets views of replicas with their index only."""

    def __init__(self, routing: Any) -> None:
        super().__init__(routing)
        self._seen: Sequence[ReplicaView] = ()
        self._views: list[ReplicaView] = []

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the policy's choice."""
        if replicas is not self._seen:
            self._seen, self._views = replicas, index_views([view.index for view in replicas], self._routing)
        return super().choose(request, self._views, now)


def choices_need_no_replica(world: World) -> None:
    """Requires that a policy with reads_replicas = False reads only the index of replicas."""
    blind = replace(world, routing=Blind(world.routing))
    assert_same_records(world.simulate().records, blind.simulate().records)
