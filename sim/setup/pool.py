"""Replicas that are alike: their settings, how one of them is made, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from hwmodels.devices.cold_start import ColdStart
from hwmodels.devices.storage import Storage
from hwmodels.iterations.memory import GIB
from policies.adapters.registry import Adapter, Registry
from policies.batching import max_unasked_of
from policies.caching.eviction.future import FutureUses
from policies.core.engine import EngineCore
from policies.prediction import LengthPredictor
from policies.scaling import Scaling
from sim.engine.links import Links
from sim.engine.replica_pool import ReplicaPool, check_role
from sim.setup.deployment import Deployment


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings(Deployment):
    """A pool's settings, as objects. Raises ValueError for settings that do not go together."""

    prediction: LengthPredictor | None = None
    """Who guesses how long answers will be, for policies that ask."""
    storage: Storage = Storage()
    """Memory below the GPUs'."""
    replicas: int = 1
    """Engines, all alike; with `scaling`, those that there are at the beginning."""
    scaling: Scaling | None = None
    """Who says how many there should be later."""
    cold_start: ColdStart = field(default_factory=ColdStart)
    """How long a replica takes until it serves."""

    role: str = "mixed"
    """prefill: computes prompts, and hands them over after their first token; decode: goes on with those;
    mixed: does both, beside the others for what is too much for them."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas}: must be >= 1")
        max_unasked_of(self.batching)  # a declaration that is no number is refused before the run
        scaling = self.scaling
        if scaling is not None and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError(
                f"replicas={self.replicas}: must be from scaling.min_replicas={scaling.min_replicas} to "
                f"scaling.max_replicas={scaling.max_replicas}; these are the replicas at the beginning"
            )
        if scaling is not None and scaling.min_replicas < 1 and self.role != "mixed":
            raise ValueError(
                f"scaling.min_replicas={scaling.min_replicas}, role={self.role}: must be >= 1, as requests "
                "are held for replicas of mixed pools only"
            )
        check_role(self.role)
        Deployment.__post_init__(self)  # super() does not know classes with slots
        name = type(self.scheduling).__name__
        if self.scheduling.needs_predictor and self.prediction is None:
            raise ValueError(
                f"prediction=none: {name} needs predicted output lengths; "
                "choose one, such as prediction=histogram"
            )
        if self.caching.needs_predictor and self.prediction is None:
            raise ValueError(
                "caching.reserve=predicted, prediction=none: it needs predicted output lengths; choose a "
                "predictor, such as prediction=histogram, or caching.reserve=max_tokens"
            )
        if self.scheduling.preemption_mode == "swap" and not self.engine.swap_space_gib:
            raise ValueError(
                "scheduling.preemption_mode=swap, engine.swap_space_gib=0: give it host memory, or recompute"
            )
        host_gib, disk_gib = self.caching.tiers_gib
        swap_gib = self.engine.swap_space_gib if self.scheduling.preemption_mode == "swap" else 0.0
        if host_gib + swap_gib > self.storage.host_memory_gib:
            raise ValueError(
                f"caching.host_gib={host_gib:g} and engine.swap_space_gib={swap_gib:g}: "
                f"together must be <= storage.host_memory_gib={self.storage.host_memory_gib:g}, "
                "a GPU's share of the host's memory"
            )
        if disk_gib > self.storage.disk_gib:
            raise ValueError(
                f"caching.disk_gib={disk_gib:g}: must be <= storage.disk_gib="
                f"{self.storage.disk_gib:g}, a GPU's share of the disk"
            )

    def pool(
        self, name: str = "", future: FutureUses | None = None, served: Iterable[Adapter] = ()
    ) -> ReplicaPool:
        """The same for a run. `future` is for offline bounds, served: the adapters that the traffic names."""
        num_blocks = self.plan_memory().num_blocks
        return ReplicaPool(
            name=name,
            serves=self.model.name,
            replicas=self.replicas,
            core=lambda: self.core(num_blocks, future, served),
            model=self.iteration_model(),
            frontend_s=self.engine.frontend_s,
            plans_ahead=self.engine.host.overlapped,
            links=self.links,
            price_usd_per_hour=self.price_usd_per_hour,
            scaling=deepcopy(self.scaling),
            cold_start_s=self.cold_start_s,
            role=self.role,
            device=self.hardware,
            num_devices=self.layout.num_devices,
            num_layers=self.model.num_layers,
        )

    @property
    def cold_start_s(self) -> float:
        """Until a replica that is ordered takes requests."""
        parts = self.cold_start.parts(
            weights_bytes=self.plan_memory().weights_bytes,
            pcie=self.hardware.pcie,
            storage=self.storage,
            cuda_graphs=self.engine.cuda_graphs,
        )
        return parts.total_s

    @property
    def price_usd_per_hour(self) -> float:
        """Of a replica."""
        return self.hardware.price_usd_per_hour * self.layout.num_devices

    def registry(self, served: Iterable[Adapter]) -> Registry:
        """The adapters that a replica serves. Raises ValueError where they do not fit its model."""
        return Registry(served, self.model.name, self.adapter_memory())

    def core(
        self, num_kv_blocks: int, future: FutureUses | None = None, served: Iterable[Adapter] = ()
    ) -> EngineCore:
        """One replica's engine, with policies of its own: what they remember stays there."""
        kv_pool = self.caching.pool(self.kv_memory(num_kv_blocks, future))
        residents = None if self.adapters is None else self.adapters.residents(self.registry(served), kv_pool)
        return EngineCore(
            batching=self.batching,
            scheduling=self.scheduling,
            block_pool=kv_pool,
            max_num_seqs=self.engine.max_num_seqs,
            max_model_len=self.max_model_len,
            predictor=self.prediction,
            num_swap_blocks=self.num_swap_blocks,
            residents=residents,
        )

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of host memory of a replica for preempted KV."""
        block_bytes = self.caching.block_size * self.kv_bytes_per_token
        return int(self.engine.swap_space_gib * GIB * self.layout.num_devices / block_bytes)

    def links(self) -> Links:
        """The ways between a replica's memory tiers, idle."""
        num_devices = self.layout.num_devices
        return Links(
            bytes_per_token=self.kv_bytes_per_token,
            host_bytes_per_s=self.hardware.pcie.bandwidth_bytes_per_s * self.storage.pcie_share * num_devices,
            disk_bytes_per_s=self.storage.disk_bytes_per_s * num_devices,
            latency_s=self.hardware.pcie.latency_s,
            overlapped=self.storage.overlapped,
            merge_s=self.merge_s,
        )
