"""Settings of a pool of identical replicas: creates their engines and computes their price.

Replicas that no request can reach cost money, but their engines need not be simulated. With round robin,
request i goes to replica i modulo the number of replicas, so of 100,000 replicas with 50 requests only the
first 50 ever work. The others are idle for the whole run, and their records say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fieldlimits import Ge, Le, OneOf, check
from hwmodels.assembly.roofline import Roofline
from hwmodels.devices.cold_start import ColdStart, ColdStartParts, WeightSource
from hwmodels.devices.device import Storage
from hwmodels.iterations.memory_profile import GIB
from hwmodels.levels.rooflines import Calibrated, Spec
from policies.adapters import residents_of
from policies.adapters.registry import Adapter, Registry
from policies.admission.none import AdmitAll
from policies.batching import BatchingTraits, max_unasked_of
from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.release import Release
from policies.migration.none import Stay
from policies.prediction import LengthPredictor
from policies.routing.round_robin import RoundRobin
from policies.scaling import Scaling
from policies.speculation import DraftLength
from policies.speculation.checks import check_adapters, check_policies
from policies.user_code.traits import traits_of
from sim.cluster.failures import Failures
from sim.cluster.recovery import Recovery
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.frontend import Frontend
from sim.engine.links import Links
from sim.engine.replica_pool import ROLES, ReplicaPool
from sim.records.run import ReplicaRecord, RunRecords
from sim.setup.combinations import check_pool
from sim.setup.deployment import Deployment
from sim.setup.speculation import drafting_of
from sim.speculation.acceptance import Acceptance
from sim.workload.base import Source

if TYPE_CHECKING:
    from sim.speculation.passes import Passes


MAX_REPLICAS = 1_000_000
"""Largest number of replicas of a pool: each is an engine in memory, with about 50 kB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings(Deployment):
    """Settings of a pool, as objects. Raises ValueError for settings that are incompatible."""

    prediction: LengthPredictor | None = None
    """Predictor of output lengths, for policies that need one."""
    draft_length: DraftLength | None = None
    """Policy that decides how many tokens are drafted; None: without speculation."""
    acceptance: Acceptance | None = None
    """Model of the draft tokens that are accepted; None: without speculation."""
    storage: Storage = Storage()
    """Host memory and disk."""
    replicas: Annotated[int, Ge(1), Le(MAX_REPLICAS), "as each is an engine in memory"] = 1
    """Number of replicas; with `scaling`, at the beginning of the run."""
    scaling: Scaling | None = None
    """Policy that decides the number of replicas during the run; None: it is constant."""
    cold_start: ColdStart = field(default_factory=ColdStart)
    """The parts of the time from the start of a replica until it serves."""

    role: Annotated[str, OneOf(ROLES)] = "mixed"
    """prefill: computes prompts and transfers their KV after the first token; decode: continues these
    requests; mixed: does both, and takes the overflow of prefill and decode pools if there are any."""

    def __post_init__(self) -> None:
        check(self)
        max_unasked_of(self.batching)  # raises for an invalid declaration before the run
        scaling = self.scaling
        if scaling is not None and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError(
                f"replicas={self.replicas}: must be from scaling.min_replicas={scaling.min_replicas} to "
                f"scaling.max_replicas={scaling.max_replicas}; replicas is the number at the beginning"
            )
        if scaling is not None and scaling.min_replicas < 1 and self.role != "mixed":
            raise ValueError(
                f"scaling.min_replicas={scaling.min_replicas}, role={self.role}: must be >= 1, as requests "
                "are held for replicas of mixed pools only"
            )
        Deployment.__post_init__(self)  # super() does not know classes with slots
        check_pool(self)
        self._check_batch_size()
        self._check_speculation()
        host_gib, disk_gib = self.caching.tiers_gib
        swap_gib = self.engine.swap_space_gib if self.scheduling.preemption_mode == "swap" else 0.0
        offload_gib = self.engine.offload.cpu_offload_gb
        if host_gib + swap_gib + offload_gib > self.storage.host_memory_gib:
            offloaded = f" and engine.offload.cpu_offload_gb={offload_gib:g}" if offload_gib else ""
            raise ValueError(
                f"caching.host_gib={host_gib:g} and engine.swap_space_gib={swap_gib:g}{offloaded}: "
                f"together must be <= storage.host_memory_gib={self.storage.host_memory_gib:g}, "
                "the host memory per GPU"
            )
        if disk_gib > self.storage.disk_gib:
            raise ValueError(
                f"caching.disk_gib={disk_gib:g}: must be <= storage.disk_gib="
                f"{self.storage.disk_gib:g}, the disk space per GPU"
            )

    def _check_batch_size(self) -> None:
        """Raises ValueError for a batching policy whose batches are larger than the number of slots."""
        limit, traits = self.engine.max_num_seqs, traits_of(self.batching, BatchingTraits)
        for name, batch_size in (("batch_size", traits.batch_size), ("n_parallel", traits.n_parallel)):
            if isinstance(batch_size, int) and batch_size > limit:
                raise ValueError(
                    f"batching.{name}={batch_size}: must be <= engine.max_num_seqs={limit}, the sequences "
                    f"that run at once; set batching.{name}={limit} or engine.max_num_seqs={batch_size}"
                )

    def _check_speculation(self) -> None:
        """Raises ValueError for a proposer that the engine cannot run with the policies beside it."""
        if self.speculation is None:
            return
        check_adapters(self.speculation, self.adapters)
        assert self.draft_length is not None
        check_policies(
            self.speculation, self.draft_length, self.batching, self.caching, self.max_num_batched_tokens
        )
        if self.acceptance is not None:
            try:
                self.acceptance.check(self.speculation)
            except ValueError as error:
                raise ValueError(f"acceptance.{error}") from None

    def pool(
        self,
        name: str = "",
        future: FutureUses | None = None,
        served: Iterable[Adapter] = (),
        tpot_s: float | None = None,
    ) -> ReplicaPool:
        """Returns the pool for a run.

        future: for offline bounds. served: the adapters that requests name. tpot_s: time per output token
        that the SLO allows, s; None: no limit.
        """
        num_blocks = self.plan_memory().num_blocks
        return ReplicaPool(
            name=name,
            serves=self.model.name,
            replicas=self.replicas,
            core=lambda: self.core(num_blocks, future, served, tpot_s),
            model=self.iteration_model(),
            new_passes=self._new_passes,
            jitter=self.jitter,
            frontend_s=self.engine.frontend_s,
            plans_ahead=self.host.overlapped and self.batches_in_flight == 1,
            batches_in_flight=self.batches_in_flight,
            waits_for_ranks=self.num_ranks > 1 and isinstance(self.latency, Spec | Calibrated),
            frontend=self._frontend,
            recv_interval=self.engine.scheduler_recv_interval,
            links=self.links,
            price_usd_per_hour=self.price_usd_per_hour,
            scaling=deepcopy(self.scaling),
            cold_start_s=self.cold_start_s,
            role=self.role,
            device=self.hardware,
            num_devices=self.layout.num_devices,
            num_layers=self.model.num_layers,
            kv_layout=self.kv_layout,
            embedding_bytes=self.model.hidden_size * self.model.element_bytes,
        )

    @property
    def _frontend(self) -> Frontend | None:
        """The work of the API server, with the number of its processes; None: there is none."""
        settings = self.engine.frontend
        if settings is None:
            return None
        num_servers = self.engine.num_frontend_servers(self.layout.attention_data_parallel_size)
        return replace(settings, servers=num_servers)

    @property
    def cold_start_s(self) -> float:
        """Seconds from the start of a replica until it accepts requests."""
        return self._start_parts(self.cold_start).total_s

    @property
    def load_s(self) -> float:
        """Seconds to load the weights from the storage of a cold start."""
        return self._start_parts(self.cold_start).load_s

    @property
    def load_from_host_s(self) -> float:
        """Seconds to copy the weights from host memory to the devices."""
        return self._start_parts(ColdStart(source=WeightSource.host_memory, loader_bytes_per_s=None)).load_s

    def _start_parts(self, start: ColdStart) -> ColdStartParts:
        plan = self.plan_memory()
        return start.parts(
            weights_bytes=plan.weights_bytes + plan.draft_bytes,
            pcie=self.hardware.pcie,
            storage=self.storage,
            cuda_graphs=self.engine.cuda_graphs,
        )

    @property
    def price_usd_per_hour(self) -> float:
        """Price of one replica, USD per hour."""
        return self.hardware.price_usd_per_hour * self.layout.num_devices

    def registry(self, served: Iterable[Adapter]) -> Registry:
        """Returns the registry of the served adapters. Raises ValueError if one does not fit the model."""
        return Registry(served, self.model.name, self.adapter_memory())

    def check_served(self, served: Iterable[Adapter]) -> None:
        """Raises ValueError if the adapter policy cannot serve these adapters."""
        if self.adapters is not None:
            kv_pool = pool_of(self.caching, self.kv_memory(1, FutureUses(())))
            residents_of(self.adapters, self.registry(served), kv_pool)

    @property
    def _new_passes(self) -> Callable[..., Passes] | None:
        """Makes the passes of a replica that speculates; None: replicas do not."""
        if self.speculation is None or self.acceptance is None:
            return None
        from sim.speculation.passes import Passes  # noqa: PLC0415 (most runs do not speculate)

        return partial(Passes, self.acceptance, self.speculation)

    def core(
        self,
        num_kv_blocks: int,
        future: FutureUses | None = None,
        served: Iterable[Adapter] = (),
        tpot_s: float | None = None,
    ) -> EngineCore:
        """Returns a new engine of a replica, with its own copies of the policies.

        future, served, tpot_s: see `pool`.
        """
        kv_pool = pool_of(self.caching, self.kv_memory(num_kv_blocks, future))
        residents = None
        if self.adapters is not None:
            residents = residents_of(self.adapters, self.registry(served), kv_pool)
        has_stages = self.batches_in_flight > 1
        ends = Ends.one_step_late if self.host.overlapped and not has_stages else Ends.at_once
        if self._ends_with_batch:
            ends = Ends.with_batch
        new_drafts = None
        if self.speculation is not None and self.draft_length is not None:
            new_drafts = drafting_of(self.speculation, self.draft_length, self.iteration_model(), tpot_s)
        return EngineCore(
            batching=self.batching,
            scheduling=self.scheduling,
            block_pool=kv_pool,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            predictor=self.prediction,
            num_swap_blocks=self.num_swap_blocks,
            residents=residents,
            ends=ends,
            max_batches=self.batches_in_flight if has_stages else None,
            max_batch_seqs=self.max_batch_seqs if has_stages else None,
            new_drafts=new_drafts,
            data_parallel=self.data_parallel,
            release=self._release,
        )

    @property
    def _release(self) -> Release:
        """The rules of the engine's scheduler; replicas that send or load KV hash blocks in the old way."""
        return (
            self.engine.release if self.role == "mixed" else self.engine.release._replace(hashes_ahead=False)
        )

    @property
    def _ends_with_batch(self) -> bool:
        return traits_of(self.batching, BatchingTraits).until_last

    @property
    def batches_in_flight(self) -> int:
        """Batches that a replica has in flight: one per pipeline stage, if the stages are priced one by one.

        Drafts, batches that end as a whole and measured times of whole iterations have one at a time.
        """
        if self.pipeline_parallel_size == 1 or self._ends_with_batch:
            return 1
        model = self.iteration_model()
        has_stages = isinstance(model, Roofline) and model.stages is not None
        return self.pipeline_parallel_size if has_stages else 1

    @property
    def max_batch_seqs(self) -> int | None:
        """Maximum number of sequences in a batch of a pipeline; None: the slots limit them alone."""
        limit = self.engine.pp_max_micro_batch_size
        if limit == 0:
            return max(1, self.engine.max_num_seqs // self.num_ranks // self.pipeline_parallel_size)
        return limit

    @property
    def num_swap_blocks(self) -> int:
        """KV blocks in the host memory of a replica for preempted sequences."""
        block_bytes = self.caching.block_size * self.kv_bytes_per_token
        return int(self.engine.swap_space_gib * GIB * self.layout.num_devices / block_bytes)

    def links(self) -> Links:
        """Returns the idle links between the memory tiers of a replica."""
        num_devices = self.layout.num_devices
        return Links(
            bytes_per_token=self.kv_bytes_per_token * max(1, len(self.kv_groups)),
            host_bytes_per_s=self.hardware.pcie.bandwidth_bytes_per_s * self.storage.pcie_share * num_devices,
            disk_bytes_per_s=self.storage.disk_bytes_per_s * num_devices,
            latency_s=self.hardware.pcie.latency_s,
            overlapped=self.storage.overlapped,
            merge_s=self.merge_s,
        )


def num_reached(
    cluster: ClusterSettings, pools: Mapping[str, PoolSettings], sim: SimSettings, source: Source
) -> int:
    """Returns the number of replicas, from the first one on, that requests of a run may reach.

    It is that of all replicas unless they are alike, never change, and requests are sent in turn and once.
    """
    count, num_replicas = source.num_requests, sum(pool.replicas for pool in pools.values())
    [pool, *others] = pools.values()
    is_in_turn = type(cluster.routing) is RoundRobin and type(cluster.admission) is AdmitAll
    never_changes = (
        pool.scaling is None and cluster.failures == Failures() and (cluster.recovery == Recovery())
    )
    is_alone = type(cluster.migration) is Stay and not cluster.encoders.replicas
    is_one_pool = not others and cluster.turns.sleep_level is None and pool.adapters is None
    is_sent_once = count is not None and cluster.retries.max_attempts == 1
    if not (is_in_turn and never_changes and is_alone and is_one_pool and is_sent_once):
        return num_replicas
    if sim.shards is not None or sim.thin > 1 or pool.role != "mixed" or pool.caching.needs_future:
        return num_replicas
    return min(num_replicas, max(count or 0, 1))


def with_idle(records: RunRecords, num_replicas: int) -> RunRecords:
    """Returns the records of a run with idle replicas added, up to num_replicas."""
    idle = ReplicaRecord(0, 0.0, records.end_s)
    return replace(records, replicas=records.replicas + (idle,) * (num_replicas - len(records.replicas)))
