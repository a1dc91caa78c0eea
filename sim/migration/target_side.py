"""The attachment of a replica to which running requests may move."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from policies.core.limits import StopAfter
from policies.core.plan import Migrant, StepPlan
from policies.core.sequence import Sequence
from sim.engine.replica import Replica
from sim.transfer.kv_transfers import KvSource, ReceivingSide


class MigrationControl(KvSource, Protocol):
    """The interface of `sim.migration.live_migrations.LiveMigrations` that the receiving side calls."""

    def refused(self, request_id: int, now: float) -> None:
        """Records that a plan of the replica had no slot or blocks for a request that moves there."""
        ...

    def resumed(self, request_id: int, now: float) -> None:
        """Records that an iteration with a moved request begins."""
        ...


class TargetSide(ReceivingSide):
    """Accepts sequences that decode on another replica, if its next plan has a slot and blocks for them."""

    def __init__(self, replica: Replica, migrations: MigrationControl) -> None:
        ReceivingSide.__init__(self, replica, migrations, "live")
        self._migrations = migrations
        self._complete: set[int] = set()  # ids of requests that have moved, until a plan includes them

    def adopt(self, migrant: Migrant, stop_after: StopAfter) -> None:
        """Adds a sequence between two steps. Raises RejectedError if it can never continue here."""
        replica, request = self._replica, migrant.request
        replica.core.check_migrant(request, migrant.num_known, stop_after)
        self._incoming.add(request.request_id)
        enter = partial(replica.core.adopt, stop_after=stop_after, tier="live")
        replica.take_in(request, enter, migrant)

    def received(self, request_id: int) -> None:
        """Marks the KV of a transferred sequence as complete."""
        ReceivingSide.received(self, request_id)
        self._complete.add(request_id)

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """Reports the sequences that this plan has refused, and those that it resumes."""
        loading = self._replica.core.loading
        for request_id in [request_id for request_id in self._new if request_id not in loading]:
            self._migrations.refused(request_id, now)
        self._new.clear()
        if self._complete and plan is not None:
            for seq in plan.admitted:
                if seq.request_id in self._complete:
                    self._complete.remove(seq.request_id)
                    self._migrations.resumed(seq.request_id, now)

    def left(self, seq: Sequence) -> None:
        ReceivingSide.left(self, seq)
        self._complete.discard(seq.request_id)

    def crashed(self, now: float) -> None:
        ReceivingSide.crashed(self, now)
        self._complete.clear()
