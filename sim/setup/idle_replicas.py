"""Replicas that no request can reach: they cost money, but their engines need not be simulated.

With round robin, request i goes to replica i modulo the number of replicas, so of 100,000 replicas with 50
requests only the first 50 ever work. The others are idle for the whole run, and their records say so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from policies.admission.none import AdmitAll
from policies.migration.none import Stay
from policies.routing.round_robin import RoundRobin
from sim.cluster.failures import Failures
from sim.records.run import ReplicaRecord, RunRecords
from sim.workload.base import Source

if TYPE_CHECKING:
    from sim.setup.scenario import Scenario


def num_reached(scenario: Scenario, source: Source) -> int:
    """Returns the number of replicas, from the first one on, that requests of a run may reach.

    It is that of all replicas unless they are alike, never change, and requests are sent in turn and once.
    """
    count = source.num_requests
    is_in_turn = type(scenario.routing) is RoundRobin and type(scenario.admission) is AdmitAll
    never_changes = scenario.scaling is None and scenario.failures == Failures()
    is_alone = type(scenario.migration) is Stay and not scenario.encoders.replicas
    is_one_pool = not scenario.pools and scenario.turns.sleep_level is None and scenario.adapters is None
    is_known = count is not None and scenario.retries.max_attempts == 1
    if not (is_in_turn and never_changes and is_alone and is_one_pool and is_known):
        return scenario.num_replicas
    if scenario.sim.shards is not None or scenario.sim.thin > 1 or scenario.caching.needs_future:
        return scenario.num_replicas
    return min(scenario.num_replicas, max(count or 0, 1))


def with_idle(records: RunRecords, num_replicas: int) -> RunRecords:
    """Returns the records of a run with idle replicas added, up to num_replicas."""
    idle = ReplicaRecord(0, 0.0, records.end_s)
    return replace(records, replicas=records.replicas + (idle,) * (num_replicas - len(records.replicas)))
