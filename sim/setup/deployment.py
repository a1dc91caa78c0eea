"""A model served by an engine on some hardware: what a replica's prices and memory follow from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hwmodels.devices.device import Device
from hwmodels.iterations.iteration import IterationModel
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import MemoryPlan, adapter_bytes, plan_memory, weight_bytes
from hwmodels.levels.rooflines import Calibrated, LatencyLevel, Replica, Spec
from hwmodels.model.lora import Lora
from hwmodels.model.model_spec import ModelSpec
from hwmodels.operators.calibration import Calibration
from policies.adapters import AdapterServing
from policies.adapters.registry import AdapterMemory
from policies.batching import Batching
from policies.caching.eviction.future import FutureUses
from policies.caching.settings import Caching, KvMemory
from policies.scheduling import Scheduling
from sim.setup.engine_profile import EngineProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """One replica's settings, as objects. Raises ValueError for settings that do not go together."""

    model: ModelSpec
    hardware: Device
    engine: EngineProfile
    batching: Batching
    scheduling: Scheduling
    caching: Caching
    calibration: Calibration = Calibration()
    """What kernels reach on the hardware; for `latency=calibrated`."""
    latency: LatencyLevel = Calibrated()
    """How iterations are priced."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = False
    """How a replica is cut over its devices: see `hwmodels.iterations.layout`."""
    layout_notes: tuple[str, ...] = ()
    """Why so, where a policy chose: see `sim.setup.layout_choice`."""
    lora: Lora | None = None
    """Adapters in every batch."""
    adapters: AdapterServing | None = None
    """How the adapters that requests name are served."""

    def __post_init__(self) -> None:
        if self.lora is not None and self.adapters is not None:
            raise ValueError(
                "lora: must be null where requests name their adapters; set adapters=none to price the same "
                "ones in every batch"
            )
        if self.adapters is not None and not isinstance(self.latency, Spec | Calibrated):
            raise ValueError(
                f"latency={type(self.latency).__name__}: has no times of LoRA adapters; choose "
                "latency=calibrated or spec, or adapters=none"
            )
        self.layout.check(self.model, self.hardware)
        limit = self.model.max_position_embeddings
        if self.engine.max_model_len is not None and self.engine.max_model_len > limit:
            raise ValueError(
                f"engine.max_model_len={self.engine.max_model_len}: must be <= {limit}, "
                f"the context of {self.model.name}"
            )

    @property
    def layout(self) -> ParallelLayout:
        """Of one replica."""
        return ParallelLayout(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            context_parallel_size=self.context_parallel_size,
            attention_data_parallel_size=self.attention_data_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def replica(self) -> Replica:
        """What one replica's iterations are priced for."""
        return Replica(
            model=self.model,
            device=self.hardware,
            layout=self.layout,
            calibration=self.calibration,
            host=self.engine.host,
            cuda_graphs=self.engine.cuda_graphs,
            kernels=self.engine.kernels,
            lora=self.lora,
        )

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens of one sequence."""
        return self.engine.max_model_len or self.model.max_position_embeddings

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one iteration: the batching policy's own limit, the engine's if it has none."""
        limit: int = getattr(self.batching, "max_num_batched_tokens", self.engine.max_num_batched_tokens)
        return limit

    def plan_memory(self) -> MemoryPlan:
        """How each device's memory is used. Raises ValueError if the model does not fit.

        Equal settings get the same plan: a run asks ten times.
        """
        settings: dict[str, Any] = {
            "model": self.model,
            "device": self.hardware,
            "layout": self.layout,
            "gpu_memory_utilization": self.engine.gpu_memory_utilization,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.engine.max_num_seqs,
            "max_model_len": self.max_model_len,
            "block_size": self.caching.block_size,
            "num_kv_blocks": self.engine.num_kv_blocks,
            "cuda_graphs": self.engine.cuda_graphs,
            "lora": self.lora if self.adapters is None else self._adapter_slots(self.adapters),
        }
        for known, plan in tuple(_memory_plans):  # another thread may add one
            if known == settings:
                return plan
        plan = plan_memory(**settings)
        _memory_plans.appendleft((settings, plan))
        return plan

    def adapter_memory(self) -> AdapterMemory:
        """What an adapter takes in a replica."""
        one_rank = adapter_bytes(self.model, self.layout, Lora(rank=1)) * self.layout.num_devices
        return AdapterMemory(one_rank, self.caching.block_size * self.kv_bytes_per_token)

    @staticmethod
    def _adapter_slots(adapters: AdapterServing) -> Lora | None:
        """What is set aside for adapters, as large as so many of one rank."""
        num_slots, rank = adapters.slots
        return Lora(rank=rank, num_active=num_slots) if num_slots else None

    def kv_memory(self, num_blocks: int, future: FutureUses | None = None) -> KvMemory:
        """What a replica's KV pool is made for; `future` is for offline bounds."""
        return KvMemory(
            num_blocks=num_blocks,
            bytes_per_token=self.kv_bytes_per_token,
            num_devices=self.layout.num_devices,
            max_model_len=self.max_model_len,
            future=future,
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of one token, over all devices that hold a part of it."""
        plan = self.plan_memory()
        return plan.kv_bytes_per_token * self.layout.num_devices / plan.num_pools

    @property
    def merge_s(self) -> float:
        """To take an adapter out of the weights and put another in: all are read and written, twice."""
        bandwidth = self.hardware.memory_bandwidth_bytes_per_s
        return 4 * weight_bytes(self.model, self.layout) / bandwidth

    def iteration_model(self) -> IterationModel:
        """The prices of a replica's iterations. Raises ValueError where the level cannot price it.

        Equal deployments get the same object, as it remembers what it has computed: a tenth of a short run.
        """
        replica = self.replica
        for level, known, model in tuple(_iteration_models):  # another thread may add one
            if level == self.latency and known == replica:
                return model
        model = self.latency.iteration_model(replica)
        _iteration_models.appendleft((self.latency, replica, model))
        return model


_memory_plans: deque[tuple[dict[str, Any], MemoryPlan]] = deque(maxlen=16)
"""Those of this process that were asked for last, and their settings."""

_iteration_models: deque[tuple[LatencyLevel, Replica, IterationModel]] = deque(maxlen=16)
"""Those of this process that were asked for last."""
