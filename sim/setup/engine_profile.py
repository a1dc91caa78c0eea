"""Settings of a serving engine: its limits, its memory, and its host overhead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import (
    Checked,
    Ge,
    Le,
    NonNegative,
    NonNegativeInt,
    OneOf,
    Positive,
    PositiveInt,
    Unit,
    check,
)
from hwmodels.assembly.site import Kernels
from hwmodels.devices.host import Compilation, CudaGraphs, HostOverhead
from hwmodels.iterations.memory_profile import MEMORY_RULES, MemoryProfile
from hwmodels.iterations.offload import Offload
from hwmodels.speculation.host import DraftHost
from policies.core.release import SGLANG_0_5, VLLM_0_32, Release, release_of
from sim.engine.frontend import TOKENS, Frontend

MAX_SLOTS = 1_000_000
"""Most sequences of an engine that run at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile(Checked):
    """Settings of an engine besides its policies; names as in vLLM."""

    max_num_seqs: Annotated[int, Ge(1), Le(MAX_SLOTS), "as each slot is in memory"]
    """Maximum number of sequences that hold KV at the same time."""
    max_num_batched_tokens: PositiveInt
    """Default token budget of the batching policies; activation memory is reserved for that many tokens."""
    host: HostOverhead
    cuda_graphs: CudaGraphs
    compilation: Compilation | None = None
    """How the model is run where no CUDA graph is; None: inductor beside CUDA graphs, eager without them, as
    with vLLM's --enforce-eager."""
    kernels: Kernels = Kernels()
    family: str | None = None
    """Engine whose simulated figures were compared with measured ones: vllm, sglang, tensorrt_llm; None: this
    profile never was. See `sim.setup.expected_errors`."""
    default_limits: str | None = None
    """Engine whose rule for the device gave limits that were null: see `sim.settings.engine_limits`."""
    load_balance_method: str | None = None
    """Choice of the rank of data-parallel attention for a request, see `policies.core.ranks`; None: that of
    the engine, round_robin for SGLang and total_requests for others."""
    frontend_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds from the arrival of a request until it reaches the scheduler, beside the work of `frontend`."""
    frontend: Frontend | None = None
    """Work of the API server, for whose processes requests wait; None: there is none."""
    scheduler_recv_interval: PositiveInt = 1
    """Iterations of decodes between two looks for new requests; see `sim.engine.frontend`."""
    pp_max_micro_batch_size: Annotated[
        NonNegativeInt | None, "0 for max_num_seqs over the stages", "null for no limit"
    ] = None
    """Maximum number of sequences of a batch in a pipeline that admits some; 0: max_num_seqs over the stages,
    None: no limit (vLLM). See `policies.core.parts`."""
    gpu_memory_utilization: float | None = 0.9
    """Share of device memory by the rule of `memory_profile`; None: the share that SGLang computes itself."""
    memory_profile: Annotated[str, OneOf(MEMORY_RULES)] = "vllm"
    """Rule by which the engine finds the memory for KV: see `hwmodels.iterations.memory_profile`."""
    version: str | None = None
    """Version of vLLM whose scheduler and memory profile are modelled, such as 0.11.0; None: the newest."""
    flashinfer_sampler: bool = False
    """Whether FlashInfer samples in vLLM, see `MemoryProfile`."""
    max_model_len: Annotated[int | None, Ge(2), "a prompt and an output token"] = None
    """Maximum number of prompt and output tokens of one sequence, for which KV memory must suffice; None: the
    context length of the model, or as much as KV memory holds (vLLM's `--max-model-len auto`)."""
    swap_space_gib: Annotated[NonNegative, Unit("GiB")] = 4.0
    """Host memory per GPU for the KV of sequences preempted by swapping."""
    num_kv_blocks: Annotated[PositiveInt | None, "null for all that fit"] = None
    """KV blocks of a replica; None: as many as the rest of the memory holds."""
    kv_cache_memory_bytes: Annotated[Positive | None, Unit("B"), "null for the rest of the memory"] = None
    """Bytes of each device for KV, in place of its share of memory (vLLM's option); None: the rest of it."""
    offload: Offload = field(default_factory=Offload)
    """Weights in host memory: vLLM's cpu_offload_gb, llama.cpp's n_gpu_layers."""
    draft_host: Mapping[str, DraftHost] = field(default_factory=dict)
    """Host time of draft tokens by method, such as ngram; `others`: of all methods that are not listed."""

    def __post_init__(self) -> None:
        check(self)
        if self.gpu_memory_utilization is None:
            if self.memory_profile != "sglang":
                raise ValueError(
                    "gpu_memory_utilization=null: must be > 0 and <= 1; only memory_profile=sglang "
                    "computes it"
                )
        elif not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be > 0 and <= 1")
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise ValueError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes:g}: num_kv_blocks={self.num_kv_blocks} "
                "gives the memory for KV, too; leave one of them out"
            )
        _ = self.memory  # its own checks

    @property
    def launching_host(self) -> HostOverhead:
        """The host overhead with the launches of `compilation`."""
        default = Compilation.inductor if self.cuda_graphs.enabled else Compilation.eager
        return self.host.under(self.compilation or default)

    @property
    def release(self) -> Release:
        """The rules of its scheduler, which differ between engines and releases of vLLM."""
        if self.family == "sglang":
            return SGLANG_0_5
        return release_of(self.version) if self.family == "vllm" else VLLM_0_32

    @property
    def idle_frontend_s(self) -> float:
        """Seconds of an idle front end for a prompt of `TOKENS` tokens."""
        work = self.frontend or Frontend()
        return self.frontend_s + work.request_s + TOKENS * work.prompt_token_s

    def num_frontend_servers(self, data_parallel_size: int) -> int:
        """Returns the processes of the front end; vLLM starts one for each data-parallel rank."""
        if self.frontend is not None and self.frontend.servers is not None:
            return self.frontend.servers
        return data_parallel_size if self.family == "vllm" else 1

    @property
    def memory(self) -> MemoryProfile:
        """The rule by which the engine finds the memory for KV. Raises ValueError for an unknown one."""
        return MemoryProfile(
            rule=self.memory_profile, version=self.version, flashinfer_sampler=self.flashinfer_sampler
        )
