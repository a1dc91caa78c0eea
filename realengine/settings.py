"""Settings of an engine besides its model: device, dtypes, memory, policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from hwmodels.iterations.layout import ParallelLayout
from kernels.paged_kv import INT4
from policies.adapters.fixed_slots import FixedSlots
from policies.batching import LOAD_BALANCE_METHODS, Batching, DataParallel
from policies.batching.chunked import Chunked
from policies.batching.static import Static
from policies.caching.paged import Paged
from policies.caching.pool import Caching
from policies.caching.prefix import PrefixCaching
from policies.caching.selective import SnapKv
from policies.caching.streaming import StreamingLlm
from policies.core.release import VLLM_0_32, Release
from policies.placement.experts import ExpertPlacing, InOrder, in_order
from policies.prediction import LengthPredictor
from policies.scheduling import Scheduling
from policies.scheduling.fcfs import Fcfs
from realengine.attention.choice import NAMES as ATTENTION_BACKENDS
from realengine.model.architecture import Architecture
from realengine.model.lora_adapter import Adapter
from realengine.model.token_exchange import BACKENDS as ALL2ALL_BACKENDS
from realengine.runner.graph_mode import check_mode
from realengine.speculation.settings import SpeculationSettings

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}

PARALLELISM = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pp_layer_partition",
    "expert_parallel_size",
    "attention_data_parallel_size",
    "context_parallel_size",
)
"""Sizes of a `ParallelLayout` that an engine has."""
SEVERAL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "attention_data_parallel_size",
    "context_parallel_size",
)
"""Sizes whose product is the number of ranks."""
SIMULATED_PARALLELISM = ("sequence_parallel",)


@runtime_checkable
class LimitsTokens(Protocol):
    """A batching policy with a limit of the tokens of a step; None: it has no limit."""

    max_num_batched_tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of an engine; the policies are those of the simulator."""

    device: str | None = None
    """Name of the device; None: a GPU, which must exist; "cpu" must be set explicitly."""
    backend: str | None = None
    """triton or torch; None: triton on a GPU."""
    attention_backend: str = "triton"
    """Attention of prompts' chunks, one of `realengine.attention.choice`; triton: the kernel of `backend`.

    Others compute what they support; the rest is computed as with triton (`realengine.attention`).
    """
    dtype: str | None = None
    """float32, float16 or bfloat16; None: bfloat16 on a GPU, float32 on a CPU."""
    quantization: str | None = None
    """Quantization of the linear layers at loading, one of `realengine.model.quantization`.

    None: as in the checkpoint.
    """
    kv_cache_dtype: str = "auto"
    """auto (as dtype), or int8, fp8 or int4, with scales per token and head."""
    max_model_len: int | None = None
    """Prompt and output tokens of one sequence; None: the model's context."""
    max_num_seqs: int = 256
    num_kv_blocks: int | None = None
    """Number of KV blocks; None: what gpu_memory_utilization leaves on a GPU, and 1 GiB on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, KV and the largest step may take together."""
    swap_space_gib: float = 4.0
    """Host memory for swapped-out KV, in GiB per GPU; allocated when needed."""
    tensor_parallel_size: int = 1
    """Number of GPUs (processes, on a CPU) that share the model's heads and matrices."""
    pipeline_parallel_size: int = 1
    """Number of stages that hold some of the layers each; as many steps are computed at once."""
    pp_layer_partition: tuple[int, ...] | None = None
    """Layers of each stage; None: equal numbers, as `ParallelLayout.stage_layers` says."""
    pp_max_micro_batch_size: int | None = None
    """Most sequences of one of the steps in a pipeline; None: max_num_seqs limits them alone."""
    expert_parallel_size: int = 1
    """Number of ranks, of those of a stage, that hold different experts; the others share each expert."""
    attention_data_parallel_size: int = 1
    """Number of ranks that compute attention for sequences of their own, and share the experts.

    Limits and KV blocks are those of all ranks together, as in simulations.
    """
    context_parallel_size: int = 1
    """Number of ranks that divide the tokens of prompts; each has the KV of all (`context_cut.py`)."""
    load_balance_method: str = LOAD_BALANCE_METHODS[0]
    """How requests are given to these ranks: total_requests or round_robin (`policies.core.ranks`)."""
    all2all_backend: str | None = None
    """How tokens travel to the experts of these ranks: allgather_reducescatter or all_to_all.

    None: by the number of tokens (`realengine.model.token_exchange`).
    """
    expert_placement: ExpertPlacing = field(default_factory=InOrder)
    """Policy that places experts on expert-parallel ranks, and says how many copies there are."""
    enable_sleep_mode: bool = False
    """Whether the engine may sleep, for which it keeps the weights as they were loaded."""
    cudagraph_mode: str | None = None
    """Which steps run as CUDA graphs: NONE, PIECEWISE, FULL_DECODE_ONLY or FULL_AND_PIECEWISE.

    FULL_...: decode steps and passes that verify drafts. PIECEWISE: other steps of up to 512 tokens, without
    their attention. None: FULL_AND_PIECEWISE on a GPU, NONE on a CPU.
    """
    progress: bool | None = None
    """Whether bars on stderr show the loading, compiling and capturing; None: if it is a terminal."""
    overlap: bool | None = None
    """Whether a step is launched before the tokens of the last one are read; None: on a GPU."""
    max_iterations: int = 1
    """Maximum number of decode iterations in one launch, if the plan holds for so many."""
    batching: Batching = field(default_factory=Chunked)
    scheduling: Scheduling = field(default_factory=Fcfs)
    caching: Caching = field(default_factory=PrefixCaching)
    predictor: LengthPredictor | None = None
    lora_adapters: Mapping[str, str | Path | Adapter] = field(default_factory=dict)
    """LoRA adapters by the names that requests use: folders in PEFT's format, or adapters."""
    max_loras: int | None = None
    """Maximum number of adapters on the GPU; None: all. The least recently used one is replaced."""
    adapters: FixedSlots | None = None
    """Policy of the adapter slots, instead of max_loras."""
    speculative_config: SpeculationSettings | Mapping[str, Any] | None = None
    """Speculative decoding: its settings, or a mapping with the keys of vLLM's speculative_config."""
    seed: int = 0
    release: Release = VLLM_0_32
    """The rules of the scheduler, which differ between releases of vLLM."""

    def __post_init__(self) -> None:
        checks = (
            ("dtype", self.dtype is None or self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            (
                "attention_backend",
                self.attention_backend in ATTENTION_BACKENDS,
                f"one of {', '.join(ATTENTION_BACKENDS)}",
            ),
            (
                "kv_cache_dtype",
                self.kv_cache_dtype in ("auto", *KV_DTYPES),
                f"one of auto, {', '.join(KV_DTYPES)}",
            ),
            ("max_num_seqs", self.max_num_seqs >= 1, ">= 1"),
            ("num_kv_blocks", self.num_kv_blocks is None or self.num_kv_blocks >= 1, ">= 1, or None"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "> 0 and <= 1"),
            ("swap_space_gib", self.swap_space_gib >= 0, ">= 0 GiB"),
            ("tensor_parallel_size", self.tensor_parallel_size >= 1, ">= 1"),
            ("pipeline_parallel_size", self.pipeline_parallel_size >= 1, ">= 1"),
            (
                "pp_max_micro_batch_size",
                self.pp_max_micro_batch_size is None or self.pp_max_micro_batch_size >= 1,
                ">= 1, or None",
            ),
            ("expert_parallel_size", self.expert_parallel_size >= 1, ">= 1"),
            ("context_parallel_size", self.context_parallel_size >= 1, ">= 1"),
            ("attention_data_parallel_size", self.attention_data_parallel_size >= 1, ">= 1"),
            (
                "all2all_backend",
                self.all2all_backend in (None, *ALL2ALL_BACKENDS),
                f"one of {', '.join(ALL2ALL_BACKENDS)}, or None",
            ),
            ("max_loras", self.max_loras is None or self.max_loras >= 1, ">= 1, or None"),
            ("max_iterations", self.max_iterations >= 1, ">= 1"),
        )
        for name, holds, allowed in checks:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: must be {allowed}")
        if self.pp_layer_partition is not None:
            object.__setattr__(self, "pp_layer_partition", tuple(self.pp_layer_partition))
        check_mode(self.cudagraph_mode)
        if self.expert_parallel_size == 1 and self.expert_placement.num_redundant_experts:
            raise ValueError(
                f"expert_placement: num_redundant_experts={self.expert_placement.num_redundant_experts} must "
                "be 0 with expert_parallel_size=1, as every rank has a share of every expert"
            )
        self._check_stages()
        self._check_sleep()
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", SpeculationSettings.of(self.speculative_config))
        elif not isinstance(self.speculative_config, SpeculationSettings | None):
            raise ValueError(
                f"speculative_config={self.speculative_config!r}: must be a mapping with the keys of vLLM's "
                "speculative_config, such as method and num_speculative_tokens"
            )
        if self.speculation is not None:
            self.speculation.check(self.batching, self.caching, self.max_num_batched_tokens)
        if self.adapters is not None and self.max_loras is not None:
            raise ValueError(
                f"max_loras={self.max_loras}: must be None beside adapters, which has max_loras="
                f"{self.adapters.max_loras}"
            )
        if isinstance(self.batching, Static) and self.batching.until_last:
            raise ValueError("batching.until_last=true: works in simulations only; set it to false")
        _check_caching(self.caching)

    def _check_sleep(self) -> None:
        """Raises ValueError for settings with which an engine cannot sleep, if it may."""
        if not self.enable_sleep_mode:
            return
        for name in SEVERAL:
            if (size := getattr(self, name)) > 1:
                raise ValueError(
                    f"enable_sleep_mode: {name}={size} must be 1, as ranks of other processes do not sleep; "
                    "end the engine to free its devices"
                )
        if self.caching.tiers_gib[0]:
            raise ValueError(
                "enable_sleep_mode: a sleep would lose the KV that caching keeps in host memory; choose a "
                "caching policy without it"
            )

    def with_layout(self, layout: ParallelLayout) -> EngineSettings:
        """Returns the settings with a layout's sizes.

        Raises ValueError for sizes that only the simulator has.
        """
        for name in SIMULATED_PARALLELISM:
            size, alone = getattr(layout, name), getattr(ParallelLayout(), name)
            if size != alone:
                raise ValueError(
                    f"{name}={size}: works in simulations only, because the engine has "
                    f"no such ranks; set it to {alone}"
                )
        return replace(self, **{name: getattr(layout, name) for name in PARALLELISM})

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout of the engine."""
        return ParallelLayout(**{name: getattr(self, name) for name in PARALLELISM})

    @property
    def may_capture(self) -> bool:
        """True if steps may run as CUDA graphs; those of a pipeline send to other ranks, and do not."""
        return all(getattr(self, name) == 1 for name in SEVERAL[1:])

    @property
    def data_parallel(self) -> DataParallel | None:
        """The ranks of data-parallel attention, as the core plans for them; None: there is one."""
        size = self.attention_data_parallel_size
        if size == 1:
            return None
        return DataParallel(size=size, load_balance_method=self.load_balance_method)

    def check_layout(self, architecture: Architecture) -> None:
        """Raises ValueError if the layers of a model cannot be divided into stages, or its experts."""
        for name in ("expert_parallel_size", "attention_data_parallel_size"):
            if (shared := getattr(self, name)) > 1 and not architecture.num_experts:
                raise ValueError(f"{name}={shared}: the model has no experts; must be 1")
        if architecture.latent is not None and self.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size}: must be 1 with latent attention "
                f"(model_type={architecture.model_type}), whose rows are not gathered"
            )
        if self.expert_parallel_size > 1:
            num_redundant = self.expert_placement.num_redundant_experts
            in_order(architecture.num_experts, self.expert_parallel_size, num_redundant)
        num_layers = architecture.num_layers
        size, partition = self.pipeline_parallel_size, self.pp_layer_partition
        if size > num_layers:
            raise ValueError(
                f"pipeline_parallel_size={size}: must be <= {num_layers}, the layers of the model"
            )
        if partition is not None and sum(partition) != num_layers:
            raise ValueError(
                f"pp_layer_partition={list(partition)}: the sum is {sum(partition)}; must be {num_layers}, "
                "the layers of the model"
            )

    def _check_stages(self) -> None:
        """Raises ValueError for settings that stages or ranks of data-parallel attention do not support."""
        self.layout  # noqa: B018 (raises ValueError)
        self.data_parallel  # noqa: B018 (raises ValueError)
        names = [name for name in SEVERAL[1:] if getattr(self, name) > 1]
        if not names:
            return
        size = f"{names[0]}={getattr(self, names[0])}"
        if self.speculative_config is not None:
            raise ValueError(
                f"speculative_config: {size} must be 1, as drafts are not sent to other ranks; use "
                "tensor_parallel_size"
            )
        if self.cudagraph_mode not in (None, "NONE"):
            raise ValueError(
                f"cudagraph_mode={self.cudagraph_mode}: must be NONE or None with {size}, as graphs do not "
                "send to other ranks"
            )
        if self.caching.changes_outputs and names != ["pipeline_parallel_size"]:
            raise ValueError(
                f"{names[-1]}={getattr(self, names[-1])}: must be 1 with caching="
                f"{type(self.caching).__name__}, which drops KV that another rank has; choose PrefixCaching"
            )
        if self.context_parallel_size > 1:
            size = f"context_parallel_size={self.context_parallel_size}"
            for name in ("expert_parallel_size", "attention_data_parallel_size"):
                if (shared := getattr(self, name)) > 1:
                    raise ValueError(
                        f"{name}={shared}: must be 1 with {size}, as tokens of "
                        "prompts that are divided do not travel to experts"
                    )
        if self.attention_data_parallel_size == 1:
            return
        size = f"attention_data_parallel_size={self.attention_data_parallel_size}"
        if self.scheduling.preemption_mode == "swap" or self.caching.tiers_gib[0]:
            raise ValueError(f"{size}: must be 1 with KV in host memory; choose preemption_mode=recompute")

    @property
    def speculation(self) -> SpeculationSettings | None:
        """Settings of speculative decoding; None: the engine does not speculate."""
        assert not isinstance(self.speculative_config, Mapping)
        return self.speculative_config

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Number of tokens of the largest step; None if the batching policy has no limit."""
        return self.batching.max_num_batched_tokens if isinstance(self.batching, LimitsTokens) else None


def on_gpu_by_default(choice: bool | None, device: torch.device) -> bool:
    """Resolves an open choice: true on a GPU."""
    return device.type == "cuda" if choice is None else choice


def _check_caching(caching: Caching) -> None:
    """Raises ValueError for a cache that works in simulations only."""
    if caching.changes_outputs and not isinstance(caching, StreamingLlm | SnapKv):
        name = type(caching).__name__
        raise ValueError(
            f"caching={name}: it drops KV by the attention weights of every token, which the engine's "
            "kernels do not return, so it works in simulations only; choose StreamingLlm or SnapKv"
        )
    if caching.has_groups:
        name = type(caching).__name__
        raise ValueError(
            f"caching={name}: the engine has one block table per sequence, so it works in simulations only"
        )
    if caching.needs_future:
        name = type(caching).__name__
        raise ValueError(f"caching={name}: it needs to know future requests, so it works in simulations only")
    if isinstance(caching, Paged) and caching.presume_cached:
        raise ValueError("caching.presume_cached: the KV would be missing, so it works in simulations only")
    if caching.tiers_gib[1]:
        raise ValueError("caching.disk_gib: the engine keeps KV in host memory, not on disk; set it to 0")
