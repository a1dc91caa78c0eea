"""Builds the gateway of a run and attaches the required parts: see `policies.gateway`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from policies.admission import AdmissionTraits, AdmitAll
from policies.core.request import Request
from policies.gateway.gateway import Routers
from policies.user_code import traits_of
from sim.cluster.autoscaler import PoolCounts
from sim.cluster.clients import Clients, FirstTokens
from sim.cluster.disaggregation import KeptPrefills, PrefillPools, TransferGateway
from sim.cluster.failures import Resends
from sim.cluster.fleet import Fleet
from sim.cluster.gateway import (
    AdmissionControl,
    Gateway,
    LengthPredictions,
    RequestAttempt,
    output_length,
)
from sim.cluster.settings import ClusterSettings
from sim.engine.clock import Clock
from sim.engine.replica_pool import ReplicaPool
from sim.records.requests import RequestLog
from sim.transfer.kv_replication import KvReplication
from sim.transfer.kv_transfers import KvTransfers
from sim.transfer.network import Interconnect

if TYPE_CHECKING:
    from sim.migration.live_migrations import LiveMigrations


class GatewayAssembly:
    """The gateway, its attachments, and the KV transfers between replicas, if the run has any.

    on_end is called with every request that has ended. patience_s: see `Source`.
    """

    def __init__(
        self,
        pools: Sequence[ReplicaPool],
        cluster: ClusterSettings,
        *,
        clock: Clock,
        requests: RequestLog,
        patience_s: float | None,
        on_end: Callable[[Request], None],
    ) -> None:
        self.pool_counts: PoolCounts  # set by `connect`
        self._pools = pools
        self._cluster = cluster
        self._clock = clock
        self._requests = requests
        self._patience_s = patience_s
        attempts: dict[int, RequestAttempt] = {}
        predictor = cluster.prediction
        self._length_predictions = (
            None
            if predictor is None
            else LengthPredictions(
                predictor,
                attempts,
                true_length=attrgetter("num_output_tokens"),
                output_length=partial(output_length, requests),
            )
        )
        routers = Routers(cluster.routing, self._length_predictions)
        self.gateway = Gateway(
            routers,
            clock=clock,
            requests=requests,
            attempts=attempts,
            on_end=on_end,
            max_resends=cluster.max_resends,
            keeps_tokens=cluster.recovery.keeps_tokens,
        )
        admission_sees = traits_of(cluster.admission, AdmissionTraits).on_first_token is not None
        self.first_tokens = FirstTokens(
            self.gateway,
            are_wanted=cluster.retries.waits_for_token or admission_sees or routers.see_first_tokens,
        )
        self.resends = Resends(self.gateway, requests=requests, first_tokens=self.first_tokens)
        self.interconnect: Interconnect | None = None
        self._transfers: TransferGateway | None = None
        is_disaggregated = any(pool.role != "mixed" for pool in pools)
        if is_disaggregated or cluster.recovery.every_tokens is not None:
            self._make_transfers(is_disaggregated)
        elif cluster.migration.interval_s is not None:
            self.interconnect = Interconnect(cluster.network, clock)

    def _make_transfers(self, is_disaggregated: bool) -> None:
        """Creates the network between replicas and the KV transfers over it."""
        cluster = self._cluster
        self.interconnect = Interconnect(cluster.network, self._clock)
        self._transfers = TransferGateway(
            self.gateway,
            first_tokens=self.first_tokens,
            length_predictions=self._length_predictions,
            requests=self._requests,
        )
        every_tokens = cluster.recovery.every_tokens
        if every_tokens is not None:
            self.resends.kv_replication = KvReplication(every_tokens, self._transfers, self.interconnect)
        if is_disaggregated:
            self.resends.kv_transfers = KvTransfers(
                settings=cluster.kv_transfer,
                routing=cluster.decode_routing,
                clock=self._clock,
                requests=self._requests,
                gateway=self._transfers,
                interconnect=self.interconnect,
            )

    def kept_prefills(self) -> KeptPrefills | None:
        """Attaches and returns the kept prefills; None: there are no prefill pools."""
        kv_transfers = self.resends.kv_transfers
        if kv_transfers is None:
            return None
        return KeptPrefills(
            self.gateway,
            kv_transfers,
            requests=self._requests,
            clock=self._clock,
            first_token=self.first_tokens.notify,
        )

    def live_migrations(self, requests_remain: Callable[[], bool]) -> LiveMigrations | None:
        """Attaches and returns the live migrations of the run; None: there is no migration policy."""
        cluster = self._cluster
        if cluster.migration.interval_s is None:
            return None
        from sim.migration.live_migrations import LiveMigrations  # noqa: PLC0415 (most runs do not migrate)

        assert self.interconnect is not None
        return LiveMigrations(
            cluster.migration,
            gateway=self.gateway,
            interconnect=self.interconnect,
            pool_counts=self.pool_counts,
            requests=self._requests,
            clock=self._clock,
            message_bytes=cluster.kv_transfer.message_bytes,
            requests_remain=requests_remain,
        )

    def connect(self, fleet: Fleet, *, may_crash: bool) -> None:
        """Connects the gateway to its fleet, and attaches its parts in the order in which they are called.

        may_crash: whether replicas may crash.
        """
        gateway, cluster, patience_s = self.gateway, self._cluster, self._patience_s
        gateway.fleet = fleet
        scales = any(pool.scaling is not None for pool in self._pools)
        slo = cluster.slo if scales else None
        self.pool_counts = PoolCounts(fleet, slo, self._requests, self._clock)
        if self._transfers is not None:
            self._transfers.pool_counts = self.pool_counts
        kv_transfers, retries = self.resends.kv_transfers, cluster.retries
        if scales or kv_transfers is not None:
            gateway.attach(self.pool_counts)
        if self._length_predictions is not None:
            gateway.attach(self._length_predictions)
        if type(cluster.admission) is not AdmitAll:
            gateway.attach(AdmissionControl(cluster.admission, gateway))
        if may_crash:
            gateway.attach(self.resends)
        if kv_transfers is not None:
            gateway.attach(PrefillPools(kv_transfers, gateway))
        if patience_s is not None or retries.timeout_s is not None or retries.max_attempts > 1:
            gateway.attach(Clients(gateway, retries, patience_s, clock=self._clock, requests=self._requests))
