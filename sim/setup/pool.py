"""Settings of a pool of identical replicas: creates their engines and computes their price; checks of pools.

Replicas that no request can reach cost money, but their engines need not be simulated. With round robin,
request i goes to replica i modulo the number of replicas, so of 100,000 replicas with 50 requests only the
first 50 ever work. The others are idle for the whole run, and are recorded as idle. The pools of a service
must be compatible with each other and with the rest of the scenario: - Pools of a disaggregated service,
their network and their roles policy. - Pools that take turns on the same GPUs: which are rejected, and how
long a change takes. - A workload and the latencies that an SLO limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from fieldlimits import Ge, Le, OneOf, check
from hwmodels.assembly.roofline import Roofline
from hwmodels.device import Storage
from hwmodels.host import GIB, ColdStart, ColdStartParts, WeightSource
from hwmodels.levels import Calibrated, Spec
from policies.adapters import residents_of
from policies.adapters.serving import Adapter, Registry
from policies.admission import AdmitAll
from policies.batching import BatchingTraits, max_unasked_of, supports_mixed_role
from policies.batching.disaggregated import DecodeOnly, PrefillOnly
from policies.caching.content import FutureUses
from policies.caching.pool import pool_of
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.release import Release
from policies.migration import Stay
from policies.prediction import LengthPredictor
from policies.roles import Roles
from policies.routing.load_balancing import RoundRobin
from policies.scaling import Scaling
from policies.speculation import DraftLength
from policies.user_code import name_of, traits_of
from sim.cluster.failures import Failures, Recovery
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.frontend import Frontend
from sim.engine.replica_pool import ROLES, Links, ReplicaPool
from sim.metrics.slo import WORKLOAD_TERMS, Slo
from sim.records.run import ReplicaRecord, RunRecords
from sim.setup.combinations import check_pool
from sim.setup.deployment import Deployment, drafting_of, stores_kv
from sim.speculation import Acceptance
from sim.transfer.network import NetworkSettings
from sim.workload.base import Source, Workload, own_slo_terms
from sim.workload.modified import answers_of, branching_key

if TYPE_CHECKING:
    from sim.speculation.passes import Passes


MAX_REPLICAS = 1_000_000
"""Maximum number of replicas of a pool: each is an engine in memory with about 50 kB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings(Deployment):
    """Settings of a pool, as objects. Raises ValueError for settings that are incompatible."""

    prediction: LengthPredictor | None = None
    """Predictor of output lengths, for policies that need one."""
    draft_length: DraftLength | None = None
    """Policy that decides the number of draft tokens; None: no speculation."""
    acceptance: Acceptance | None = None
    """Model of draft token acceptance; None: no speculation."""
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
        """Raises ValueError for a proposer that is incompatible with the other policies."""
        if self.speculation is None:
            return
        from policies.speculation.checks import check_adapters, check_policies  # noqa: PLC0415 (with drafts only)

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
        """The work of the API server, with the number of its processes; None: no work."""
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
        """Creates the passes of a replica that speculates; None: replicas do not speculate."""
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
        """The rules of the engine's scheduler; replicas that send or load KV use the old block hashes."""
        return (
            self.engine.release if self.role == "mixed" else self.engine.release._replace(hashes_ahead=False)
        )

    @property
    def _ends_with_batch(self) -> bool:
        return traits_of(self.batching, BatchingTraits).until_last

    @property
    def batches_in_flight(self) -> int:
        """Number of batches in flight: one per pipeline stage, if the stages are priced separately.

        With drafts, batches that end as a whole, or measured times of complete iterations, there is one at a
        time.
        """
        if self.pipeline_parallel_size == 1 or self._ends_with_batch:
            return 1
        model = self.iteration_model()
        has_stages = isinstance(model, Roofline) and model.stages is not None
        return self.pipeline_parallel_size if has_stages else 1

    @property
    def max_batch_seqs(self) -> int | None:
        """Maximum number of sequences in a pipeline batch; None: only the slots limit them."""
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

    It is the number of all replicas unless they are equal, never change, and requests are sent once, in turn.
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


_HALVES = {"prefill": PrefillOnly, "decode": DecodeOnly}


def check_roles(pools: Mapping[str, PoolSettings], network: NetworkSettings, roles: Roles) -> None:
    """Raises ValueError, with the key of the setting, for pools or policies that are incompatible."""
    by_role: dict[str, list[str]] = {}
    for name, pool in pools.items():
        by_role.setdefault(pool.role, []).append(name)
        _check_batching(f"pools.{name}." if name else "", pool)
    if by_role.keys() == {"mixed"}:
        if roles.interval_s is not None:
            raise ValueError(f"roles={name_of(roles)}: must be fixed, as all pools have role=mixed")
        return
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if other not in by_role:
            name = by_role[role][0] if role in by_role else ""
            where = f"pools.{name}.role={role}" if name else f"role={role}"
            raise ValueError(f"{where}: needs a pool with role={other} as well; add one to `pools`")
    check_kv(pools)
    for pool in pools.values():
        network.check(pool.hardware)
    if roles.interval_s is not None:
        _check_alike(pools, by_role, roles)


def _check_batching(where: str, pool: PoolSettings) -> None:
    for role, half in _HALVES.items():
        if isinstance(pool.batching, half) and pool.role != role:
            raise ValueError(
                f"{where}batching={name_of(pool.batching)}, {where}role={pool.role}: needs role={role}; "
                "set that, or choose a policy that prefills and decodes, such as batching=chunked"
            )
    if pool.role == "mixed" and not supports_mixed_role(pool.batching):
        raise ValueError(
            f"{where}batching={name_of(pool.batching)}, {where}role=mixed: does not support this role; "
            "choose another policy, such as batching=chunked"
        )


def check_kv(pools: Mapping[str, PoolSettings]) -> None:
    """Raises ValueError if a pool cannot use the KV that another one computes."""
    first_name, first = next(iter(pools.items()))
    for name, pool in pools.items():
        where = f"pools.{name}." if name else ""
        if pool.model != first.model:
            if pool.model.name == first.model.name:
                raise ValueError(_other_settings(where, pool.model, first_name, first.model))
            raise ValueError(
                f"{where}model={pool.model.name}: must be {first.model.name} as in pools.{first_name}, as KV "
                "is transferred between them"
            )
        if pool.role != "prefill" and stores_kv(pool.speculation, pool.model, pool.layout):
            _check_prompts_drafted(where, pool, pools)
        if pool.caching.changes_outputs:
            raise ValueError(
                f"{where}caching={name_of(pool.caching)}: keeps only a part of the KV, with which "
                "no other replica can continue; choose caching=paged, prefix or radix"
            )


def _check_prompts_drafted(where: str, pool: PoolSettings, pools: Mapping[str, PoolSettings]) -> None:
    """Raises ValueError if a pool that prefills for this one does not compute the KV of its draft."""
    for name, other in pools.items():
        own = None if pool.speculation is None else pool.speculation.draft
        if other.speculation is None or other.speculation.draft != own:
            raise ValueError(
                f"{where}speculation: its draft has KV of its own, which pools.{name} does not compute for "
                "the prompts that it hands over; choose the same speculation there, or one without KV of its "
                "own, such as ngram, suffix, medusa or self_speculative"
            )


def _other_settings(where: str, model: object, first_name: str, first: object) -> str:
    """Returns the message for two pools whose models have the same name but differ, such as in KV type."""
    why = f"pools.{first_name}, as KV is transferred between them"
    if (own := getattr(model, "kv_dtype", None)) != (other := getattr(first, "kv_dtype", None)):
        return f"{where}model.kv_cache_dtype={own}: must be {other} as in {why}"
    return f"{where}model: must have the same settings as the model of {why}"


def _check_alike(pools: Mapping[str, PoolSettings], by_role: Mapping[str, list[str]], roles: Roles) -> None:
    """Raises ValueError unless replicas can change between the prefill pool and the decode pool."""
    key = f"roles={name_of(roles)}"
    for role in ("prefill", "decode"):
        if len(by_role[role]) > 1:
            raise ValueError(f"{key}: needs one pool with role={role}, has {', '.join(by_role[role])}")
    one, other = pools[by_role["prefill"][0]], pools[by_role["decode"][0]]
    if (one.hardware, one.layout) != (other.hardware, other.layout):
        raise ValueError(
            f"{key}: pools.{by_role['prefill'][0]} and pools.{by_role['decode'][0]} must have the same "
            "hardware and layout, as replicas change between them; or choose roles=fixed"
        )


def first_token_at(pools: Mapping[str, PoolSettings]) -> str:
    """Returns which replica sends the first token to the client, for the engine of the decode replicas.

    With vLLM (NixlConnector and llm-d's sidecar), SGLang, TensorRT-LLM's disaggregated serving and NVIDIA
    Dynamo, the client reads the answer from the decode replica, which also sends the first token. In the
    papers that proposed the split (Splitwise, DistServe), the prefill replica sends it.
    """
    families = {pool.engine.family for pool in pools.values() if pool.role == "decode"}
    return "decode" if families and None not in families else "prefill"


def check_slo(slo: Slo | None, workload: Workload) -> None:
    """Raises ValueError for a limit of a latency that no request of the workload has."""
    limited = () if slo is None else slo.workload_terms
    for term in limited:
        assert slo is not None
        setting = f"slo.{term}_ms={slo.limits_s[term] * 1e3:g}"
        if term not in own_slo_terms(workload):
            raise ValueError(f"{setting}: {WORKLOAD_TERMS[term]}, or set slo.{term}_ms=null")
        width, key = answers_of(workload).width, f"{branching_key(workload)}.width"
        if term == "publish" and width > 1:
            raise ValueError(
                f"{setting}, {key}={width}: the time to publish of requests with several outputs is not "
                f"known; set {key}=1 or slo.publish_ms=null"
            )


def taking_turns(
    pools: Sequence[ReplicaPool], settings: Sequence[PoolSettings], sleep_level: int
) -> list[ReplicaPool]:
    """Returns the pools with a replica only in the first one, and with the times to sleep and wake.

    Level 1 copies the weights to host memory and back, level 2 loads them from the source of a cold start.
    """
    return [
        replace(
            pool,
            replicas=int(index == 0),
            sleep_s=own.load_from_host_s if sleep_level == 1 else 0.0,
            wake_s=own.load_from_host_s if sleep_level == 1 else own.load_s,
        )
        for index, (pool, own) in enumerate(zip(pools, settings, strict=True))
    ]


def check_turns(pools: Mapping[str, PoolSettings], host_memory_gib: float) -> None:
    """Raises ValueError for pools that cannot take turns on the same GPUs.

    host_memory_gib: host memory per GPU for the weights of all models.
    """
    if len(pools) < 2:
        raise ValueError("turns.sleep_level: needs a pool for each model, at least two; choose `pools`")
    first_name, first = next(iter(pools.items()))
    models = [pool.model.name for pool in pools.values()]
    if len(set(models)) < len(models):
        raise ValueError(f"turns.sleep_level, pools: must serve different models, not {', '.join(models)}")
    for name, pool in pools.items():
        if pool.replicas != 1 or pool.scaling is not None or pool.role != "mixed":
            raise ValueError(
                f"turns.sleep_level, pools.{name}: must have replicas=1, role=mixed and scaling=none, as one "
                "replica at a time runs on the GPUs"
            )
        if (pool.hardware, pool.layout.num_devices) != (first.hardware, first.layout.num_devices):
            raise ValueError(
                f"turns.sleep_level, pools.{name}: must have the hardware and the number of GPUs of "
                f"pools.{first_name}, as they share them"
            )
    weights_gib = sum(pool.plan_memory().weights_bytes for pool in pools.values()) / GIB
    if weights_gib > host_memory_gib:
        raise ValueError(
            f"turns.sleep_level=1: the weights of all models need {weights_gib:.1f} GiB of host memory per "
            f"GPU, more than storage.host_memory_gib={host_memory_gib:g}; choose turns.sleep_level=2"
        )
