"""Memory plan of a device: weights, activations and other fixed memory, and the KV blocks that remain.

Each engine determines the KV memory by its own rule at startup (`MemoryProfile`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, NamedTuple, Protocol

from fieldlimits import Checked, OneOf, check
from hwmodels.checks import check_whole
from hwmodels.device import Device
from hwmodels.host import GIB, CudaGraphs, Offload
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model import MixtureOfExperts, ModelSpec
from hwmodels.model.weights import Lora, Ranks, Role

MIB = 2.0**20

DRIVER_BYTES, DRIVER_SHARE = 0.38 * GIB, 0.0018
"""Memory that nvidia-smi counts but CUDA does not have: 79.19 of 79.65 GiB are left on an H100, 139.81 of
140.40 on an H200, 178.35 of 179.06 on a B200, 23.52 of 23.99 on an RTX 4090, 79.25 of 80 on an A100.
"""

CONTEXT_BYTES = 0.75 * GIB
"""CUDA context and libraries before SGLang loads the weights: at that point 78.43 GiB are free on an H100."""

NCCL_BYTES = 1.6 * GIB
"""Additional buffers of NCCL and of the all-reduce, with several devices: 137.3 GiB are free on an H200."""

WORKSPACE_BYTES = 0.25 * GIB
"""Memory of TensorRT-LLM's kernels and libraries, in addition to the activations."""

FLASHINFER_BYTES_PER_LOGIT = 15.0
"""Peak of the dummy sampling per logit with FlashInfer, which does not sort the logits: assumed equal to that
of 0.17. FlashInfer issue 1180 shows 4.00 GiB for KV with it and 2.49 GiB without.
"""

SGLANG_MIB_PER_TOKEN = 1.5
"""Activations per token of the largest chunk that SGLang reserves."""
SGLANG_MIB_PER_GRAPH_ROW = 2.0
SGLANG_MIB_PER_PREFILL_GRAPH = 8.0

SGLANG_STATE_SHARE = 0.9 / 1.9
"""Share of the memory without weights that SGLang gives to linear-attention states, with its default
`mamba_full_memory_ratio=0.9`; KV gets the rest.
"""
SGLANG_STATES_PER_SEQUENCE = 3
"""Number of states that SGLang counts per running sequence: its own, and those of cached prefixes that it
uses (`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`).
"""


class Era(NamedTuple):
    """vLLM's profile run from a given version on, in bytes of one device."""

    since: tuple[int, int, int]
    bytes_per_logit: float
    """Peak of the dummy sampling over max_num_seqs rows of logits, in bytes per logit. Up to 0.16 top-p sorts
    all logits: fp32 logits, their sorted copy, 64-bit indices and the sort's buffers. Since 0.17 it does
    not."""
    library_bytes: float
    """Memory outside PyTorch: library workspaces, compiled kernels."""
    all_reduce_bytes: float
    """Buffers of all-reduces over NVLink, with tensor parallelism."""
    keeps_expert_buffers: bool
    """Whether the buffers of routed experts stay allocated while the profile run samples."""
    counts_graphs: bool
    """Whether the memory of CUDA graphs is estimated and subtracted."""
    mxfp4_tile: tuple[int, int]
    """Multiples to which MXFP4 experts are padded: see `MXFP4_TILE`."""


MXFP4_TILE = 256, 128
"""Multiples to which kernels for MXFP4 pad the hidden size and a rank's intermediate size: gpt-oss's 2,880
become 3,072 and 2,944, which adds 9 % to its experts (vLLM 0.32, `fused_moe/oracle/mxfp4.py`). The Triton
kernels of 0.11 added 7 %.
"""

ERAS = (
    Era((0, 9, 0), 38.4, 0.13 * GIB, 0.42 * GIB, False, False, (256, 1)),
    Era((0, 17, 0), 15.0, 0.13 * GIB, 0.42 * GIB, True, False, (256, 1)),
    Era((0, 18, 0), 15.0, 0.25 * GIB, 1.85 * GIB, True, False, MXFP4_TILE),
    Era((0, 21, 0), 15.0, 0.25 * GIB, 1.85 * GIB, True, True, MXFP4_TILE),
)
"""Oldest first. All-reduce buffers of 0.42 GiB were measured in 0.11, of 1.85 GiB in 0.19; the version of the
change is unknown. The tile changed between 0.14 and 0.19, also in an unknown version.
"""

GRAPH_BYTES, GRAPH_LAYER_BYTES = 0.25 * GIB, 0.17 * MIB
"""CUDA graphs take the first value, plus the second for every layer in every graph: 0.8 GiB for 32 layers in
51 graphs of decodes and 51 of other batches, as vLLM estimates them.
"""


MEMORY_RULES = ("vllm", "sglang", "tensorrt_llm")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile(Checked):
    """The rule of an engine, and for vLLM of one of its versions.

        vllm share x total - weights - peak of a profile run of the largest batch [- CUDA graphs] sglang share
        x free memory before the weights are loaded - weights tensorrt_llm share x (total - weights - peak of
        a profile run)

    The share is `gpu_memory_utilization`, `mem_fraction_static` and `free_gpu_memory_fraction`. Sources: vLLM
    0.32, `gpu_worker.determine_available_memory` and `mem_utils.memory_profiling`; SGLang 0.5.23,
    `arg_groups/memory_hook.py` and `profile_max_num_token`; TensorRT-LLM, `pyexecutor/_util.py`. The
    constants were set on half of the start-up logs in `hwmodels/trust/kv_memory_logs.csv`; `windtunnel score
    kind=kv_memory` gives the errors of both halves.
    """

    rule: Annotated[str, OneOf(MEMORY_RULES)] = "vllm"
    """vllm, sglang or tensorrt_llm."""
    version: str | None = None
    """Version of vLLM, such as 0.11.0; None: the newest known version, 0.33."""
    flashinfer_sampler: bool = False
    """Whether vLLM samples with FlashInfer, which up to 0.16 takes less memory than sorting the logits."""

    def __post_init__(self) -> None:
        check(self)
        if self.flashinfer_sampler and self.rule != "vllm":
            raise ValueError("flashinfer_sampler=true: only memory_profile=vllm knows it; set it to false")
        if self.version is not None:
            if self.rule != "vllm":
                raise ValueError(
                    f"version={self.version}: only memory_profile=vllm knows versions; set it to null"
                )
            _parsed(self.version)

    @property
    def era(self) -> Era:
        """The profile run of this version."""
        if self.version is None:
            return ERAS[-1]
        return [era for era in ERAS if era.since <= _parsed(self.version)][-1]

    @property
    def has_state_share(self) -> bool:
        """True if linear-attention states have their own memory (SGLang); False if they are in KV blocks.

        For TensorRT-LLM the latter is assumed.
        """
        return self.rule == "sglang"

    def total_bytes(self, device: Device, layout: ParallelLayout) -> float:
        """Returns the memory to which the engine's share applies: all, or the free memory without weights."""
        total = device.memory_bytes * (1 - DRIVER_SHARE) - DRIVER_BYTES
        if self.rule == "sglang":
            total -= CONTEXT_BYTES + (NCCL_BYTES if layout.num_devices > 1 else 0.0)
        return max(total, 0.0)

    def runtime_bytes(self, device: Device, layout: ParallelLayout) -> float:
        """Returns the memory that the engine subtracts in addition to weights and activations."""
        if self.rule == "sglang":
            return 0.0
        several = layout.tensor_parallel_size > 1
        if self.rule == "tensorrt_llm":
            return CONTEXT_BYTES + WORKSPACE_BYTES + (NCCL_BYTES if layout.num_devices > 1 else 0.0)
        over_nvlink = several and device.scale_up is not None
        return self.era.library_bytes + (self.era.all_reduce_bytes if over_nvlink else 0.0)

    def activation_bytes(
        self, model: ModelSpec, layout: ParallelLayout, max_num_batched_tokens: int, max_num_seqs: int
    ) -> float:
        """Returns the peak of a forward pass over the largest batch; layers reuse each other's buffers.

        In a layer: four buffers of the hidden size, and gate, up and their product, or the buffers of routed
        experts. After the last layer: the hidden states of all tokens, and the logits of max_num_seqs rows
        with the memory of sampling. The larger of the two counts. SGLang subtracts neither, and TensorRT-LLM
        samples only the last tokens of the prompts.
        """
        if self.rule == "sglang":
            return 0.0
        groups = layout.attention_data_parallel_size
        tokens, rows = max_num_batched_tokens / groups, min(max_num_seqs, max_num_batched_tokens) / groups
        hidden = tokens * model.hidden_size * model.element_bytes
        dense = max(_dense_width(block.mlp, layout) for block in model.blocks)
        experts = tokens * max(_expert_width(block.mlp, model, layout) for block in model.blocks)
        experts *= model.element_bytes
        in_layer = 4 * hidden + tokens * dense * model.element_bytes + experts
        if self.rule == "tensorrt_llm":
            return in_layer
        per_logit = self.era.bytes_per_logit
        if self.flashinfer_sampler:
            per_logit = min(per_logit, FLASHINFER_BYTES_PER_LOGIT)
        in_sampler = hidden + rows * model.vocab_size * per_logit
        if self.era.keeps_expert_buffers and not _is_mxfp4(model):
            in_sampler += experts
        return max(in_layer, in_sampler)

    def cuda_graph_bytes(self, model: ModelSpec, graphs: CudaGraphs, max_num_seqs: int) -> float:
        """Returns the subtracted memory of captured graphs; other versions capture outside the share.

        Every size has a graph in pieces for batches with prompts, and up to max_num_seqs one for decodes.
        """
        counted = self.rule == "tensorrt_llm" or (self.rule == "vllm" and self.era.counts_graphs)
        if not counted or not graphs.sizes:
            return 0.0
        num_graphs = len(graphs.sizes) + sum(size <= max_num_seqs for size in graphs.sizes)
        return GRAPH_BYTES + num_graphs * model.num_layers * GRAPH_LAYER_BYTES

    def share(
        self,
        given: float | None,
        device: Device,
        layout: ParallelLayout,
        *,
        max_num_batched_tokens: int,
        graphs: CudaGraphs,
    ) -> float:
        """Returns the given share of memory, or for None SGLang's own `mem_fraction_static`.

        SGLang reserves 512 MiB, 1.5 MiB per token of a chunk, 2 MiB per row of the largest decode graph, 8
        MiB per prefill graph and 1 GiB per 8 devices; with more than 60 GiB at least 10 GiB. Two H100, chunks
        of 8,192, graphs of 256 rows: 0.828. Raises ValueError for None with another engine.
        """
        if given is not None:
            return given
        if self.rule != "sglang":
            raise ValueError(
                "gpu_memory_utilization=null: must be > 0 and <= 1; only memory_profile=sglang computes it"
            )
        total = device.memory_bytes / MIB
        groups = layout.attention_data_parallel_size
        aside = 512 + max(max_num_batched_tokens, 2048) * SGLANG_MIB_PER_TOKEN + layout.num_devices / 8 * 1024
        if graphs.enabled:
            rows = graphs.max_capture_size
            aside += rows * SGLANG_MIB_PER_GRAPH_ROW + _prefill_graphs(max_num_batched_tokens)
            if groups > 1:
                aside += rows * groups * (4.5 if rows > 300 else 3)
        if total > 60 * 1024:
            aside = max(aside, 10 * 1024)
        return max(round((total - aside) / total, 3), 0.05)


def padding_bytes(model: ModelSpec, layout: ParallelLayout, tile: tuple[int, int] = MXFP4_TILE) -> float:
    """Returns the bytes of padding of one device's MXFP4 experts: see `MXFP4_TILE`."""
    if not _is_mxfp4(model):
        return 0.0
    hidden = _padded(model.hidden_size, tile[0])
    extra = 0.0
    for block in model.blocks:
        if isinstance(block.mlp, MixtureOfExperts):
            width = -(-block.mlp.intermediate_size // layout.expert_tensor_parallel_size)
            held = -(-block.mlp.num_experts // layout.expert_parallel_size)
            matrices = 3 if block.mlp.gated else 2
            more = hidden * _padded(width, tile[1]) - model.hidden_size * width
            extra += block.count * held * matrices * more
    return extra * model.bytes_per_weight(Role.routed) * layout.stage_share(model.num_layers)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _is_mxfp4(model: ModelSpec) -> bool:
    return model.has_experts and model.weight_format_of(Role.routed).startswith("mxfp4")


def _dense_width(mlp: object, layout: ParallelLayout) -> float:
    """Returns the elements per token that dense matrices and shared experts hold at their peak."""
    if isinstance(mlp, MixtureOfExperts):
        return 3 * mlp.shared_intermediate_size / layout.tensor_parallel_size
    gated, width = getattr(mlp, "gated", True), getattr(mlp, "intermediate_size", 0)
    return float((3 if gated else 2) * width / layout.tensor_parallel_size)


def _expert_width(mlp: object, model: ModelSpec, layout: ParallelLayout) -> float:
    """Returns the elements per token of an attention group in the buffers of its devices' routed experts.

    Each of top_k copies of a token has gate and up (their space is reused for the output), and their product
    (vLLM's fused_moe: the larger of 2 N and K, and N). With several attention groups a device gets the tokens
    of all groups, or, with unsplit experts, its share of the copies.
    """
    if not isinstance(mlp, MixtureOfExperts):
        return 0.0
    groups = layout.attention_data_parallel_size
    copies = mlp.top_k * groups / min(groups, layout.expert_parallel_size)
    width = mlp.intermediate_size / layout.expert_tensor_parallel_size
    return copies * (max(2 * width, model.hidden_size) + width)


def _prefill_graphs(max_num_batched_tokens: int) -> float:
    """Returns the MiB that SGLang reserves for graphs of chunks: 58 sizes up to 8,192 tokens."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
    sizes = [size for step in steps for size in range(*step)]
    sizes += range(4608, max_num_batched_tokens + 1, 512)
    return SGLANG_MIB_PER_PREFILL_GRAPH * sum(size <= max_num_batched_tokens for size in sizes)


def _parsed(version: str) -> tuple[int, int, int]:
    """Parses a version of vLLM. Raises ValueError for versions before 0.9 and for invalid text."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)\S*", version)
    parsed = (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)
    if parsed < ERAS[0].since:
        raise ValueError(
            f"version={version}: must be a version of vLLM with three parts, 0.9.0 or later, such as 0.11.0"
        )
    return parsed


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of one device in bytes; if pipeline stages differ, of the device with the most.

    usable = weights + adapters + draft + activations + graphs + runtime + windows and states + KV blocks
             + less than a block

    Memory that an engine does not subtract, such as SGLang's activations, is 0 here: it must fit outside the
    share.
    """

    usable_bytes: float
    """The engine's share of memory (`hwmodels.iterations.memory`); all of memory_bytes with a given
    number of blocks."""
    weights_bytes: float
    activation_bytes: float
    cuda_graph_bytes: float
    runtime_bytes: float
    """Library workspaces and buffers of collectives."""
    window_and_state_bytes: float
    """KV of layers with a window and states of linear attention, allocated when the engine starts."""
    kv_bytes_per_token: float
    """KV bytes per token in KV blocks."""
    block_size: int
    num_blocks: int
    """Physical blocks of a replica, including a null block if the engine keeps one."""
    adapter_bytes: float = 0.0
    """Weights of LoRA adapters."""
    draft_bytes: float = 0.0
    """Weights of the draft model; in a pipeline, on the last stage."""
    draft_kv_bytes_per_token: float = 0.0
    """The draft's part of kv_bytes_per_token; in a pipeline, on the last stage."""
    num_pools: int = 1
    """Groups of devices with separate blocks; a group's devices hold layers and heads of the same blocks."""
    state_bytes_per_sequence: float = 0.0
    """Linear-attention states for which a sequence takes KV blocks; 0: they have separate memory."""
    state_slots: int | None = None
    """Maximum number of sequences of a replica whose states fit in memory; None: no limit."""

    @property
    def state_blocks(self) -> int:
        """Blocks of one pool that a sequence takes for its states."""
        return ceil(self.state_bytes_per_sequence / (self.block_size * self.kv_bytes_per_token))

    @property
    def kv_bytes(self) -> float:
        return self.num_blocks / self.num_pools * self.block_size * self.kv_bytes_per_token

    @property
    def fixed_bytes(self) -> float:
        """Everything but KV blocks, in bytes."""
        return (
            self.weights_bytes
            + self.adapter_bytes
            + self.draft_bytes
            + self.activation_bytes
            + self.cuda_graph_bytes
            + self.runtime_bytes
            + self.window_and_state_bytes
        )


class KeptDraft(Protocol):
    """The memory of drafting in addition to the target model; see `hwmodels.speculation.draft.Draft`."""

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        """Returns the bytes of weights that the target does not have, on the device with the most."""

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        """Returns the bytes of KV per token in addition to the target's, on the device with the most."""


def plan_memory(
    *,
    model: ModelSpec,
    device: Device,
    layout: ParallelLayout | None = None,
    gpu_memory_utilization: float | None = 0.9,
    profile: MemoryProfile | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    block_size: int = 16,
    num_kv_blocks: int | None = None,
    kv_cache_memory_bytes: float | None = None,
    cuda_graphs: CudaGraphs | None = None,
    lora: Lora | None = None,
    draft: KeptDraft | None = None,
    num_redundant_experts: int = 0,
    kv_group_layers: int | None = None,
    offload: Offload | None = None,
    blocks_hold_states: bool = True,
    finds_prefixes: bool = True,
) -> MemoryPlan:
    """Divides each device's memory; num_kv_blocks fixes the number of blocks, else they fill the rest.

    kv_cache_memory_bytes: the memory that they fill on each device, including windows and states, instead of
    the rest. profile: the engine's rule; None: the rule of the newest vLLM. gpu_memory_utilization: the share
    of memory, by that rule; None: SGLang's own. Llama-3.1-8B on an RTX 4090 at 0.92, defaults: 21.68 GiB
    usable - 14.96 weights - 0.47 activations - 0.71 graphs - 0.25 runtime = 5.29 GiB of KV: 2,708 blocks of
    16 tokens. With attention data parallelism, num_blocks counts the blocks of all attention groups; with
    context parallelism, the blocks of all devices that share a sequence. Layers with a window have their own
    space in every slot, or share the blocks as if they had no window, whichever leaves more blocks. lora: all
    active adapters are kept in memory; draft: its weights, and its KV in every block. num_redundant_experts:
    copies in each layer. kv_group_layers: number of layers per block, for a cache with one block table per
    group of layers; None: all. offload: weights, and layers with their KV, that are in host memory.
    blocks_hold_states: whether sequences may take cache blocks for linear-attention states. finds_prefixes:
    whether the cache keeps the KV and the states of past prefixes. Raises ValueError if no block fits, naming
    the smallest tensor parallelism that fits, and if num_kv_blocks or kv_cache_memory_bytes do not fit the
    device.
    """
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization={gpu_memory_utilization}: must be a share, > 0 and <= 1")
    limits = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
    }
    if num_kv_blocks is not None:
        limits["num_kv_blocks"] = num_kv_blocks
    for name, value in limits.items():
        check_whole(name, value)
    layout = layout or ParallelLayout()
    layout.check(model, device)
    model = replace(model, dtype=device.compute_dtype(model.dtype))
    profile, graphs = profile or MemoryProfile(), cuda_graphs or CudaGraphs()
    share = profile.share(
        gpu_memory_utilization, device, layout, max_num_batched_tokens=max_num_batched_tokens, graphs=graphs
    )
    demand = _Demand(
        model=model,
        device=device,
        profile=profile,
        share=share,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        context=max_model_len or model.max_position_embeddings,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        cuda_graphs=graphs,
        lora=lora,
        draft=draft,
        num_redundant_experts=num_redundant_experts,
        kv_group_layers=kv_group_layers,
        offload=offload or Offload(),
        blocks_hold_states=blocks_hold_states,
        finds_prefixes=finds_prefixes,
    )
    demand.offload.check(layout)
    if demand.missing_bytes(layout) > 0:
        raise ValueError(_does_not_fit(demand, layout, device))
    if kv_group_layers is not None:
        return demand.filled(layout)
    plans = [demand.filled(layout), demand.filled(layout, windows_by_slot=True)]
    return max(plans, key=lambda plan: plan.num_blocks if plan.fixed_bytes < plan.usable_bytes else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    """Settings that determine a device's memory plan, apart from the layout."""

    model: ModelSpec
    device: Device
    profile: MemoryProfile
    share: float
    max_num_batched_tokens: int
    max_num_seqs: int
    context: int
    block_size: int
    num_kv_blocks: int | None
    kv_cache_memory_bytes: float | None
    cuda_graphs: CudaGraphs
    lora: Lora | None
    draft: KeptDraft | None
    num_redundant_experts: int
    kv_group_layers: int | None
    offload: Offload
    blocks_hold_states: bool
    finds_prefixes: bool

    def without_kv(self, layout: ParallelLayout, windows_by_slot: bool = False) -> MemoryPlan:
        """Returns a plan without blocks; windows_by_slot: layers with a window have space in every slot."""
        model = self.model
        slots = self.max_num_seqs / layout.attention_data_parallel_size
        in_blocks, windows = kv_split(
            model, layout.tensor_parallel_size, slots, self.context if windows_by_slot else 0
        )
        if self.kv_group_layers is not None:
            in_blocks *= self.kv_group_layers / sum(e.count for e in model.kv_layers())
        draft_kv = 0.0 if self.draft is None else self.draft.kv_bytes_per_token(model, layout)
        profile, device = self.profile, self.device
        weights = weight_bytes(model, layout, profile.era.mxfp4_tile)
        if self.offload.is_used:
            weights -= self.offload.host_bytes(model, layout, weights)
        here = layout.stage_share(model.num_layers) * self.offload.layer_share(model.num_layers)
        plan = MemoryPlan(
            usable_bytes=self.share * profile.total_bytes(device, layout),
            weights_bytes=weights + redundant_bytes(model, layout, self.num_redundant_experts),
            activation_bytes=profile.activation_bytes(
                model, layout, self.max_num_batched_tokens, self.max_num_seqs
            ),
            cuda_graph_bytes=profile.cuda_graph_bytes(model, self.cuda_graphs, self.max_num_seqs),
            runtime_bytes=profile.runtime_bytes(device, layout),
            window_and_state_bytes=windows * here,
            kv_bytes_per_token=in_blocks * here + draft_kv,
            draft_kv_bytes_per_token=draft_kv,
            adapter_bytes=0.0 if self.lora is None else adapter_bytes(model, layout, self.lora),
            draft_bytes=0.0 if self.draft is None else self.draft.weight_bytes(model, layout),
            block_size=self.block_size,
            num_blocks=0,
            num_pools=layout.num_token_groups,
        )
        if self.num_kv_blocks is not None:
            plan = replace(plan, usable_bytes=device.memory_bytes)
        elif self.kv_cache_memory_bytes is not None:
            before_kv = plan.fixed_bytes - plan.window_and_state_bytes
            plan = replace(plan, usable_bytes=before_kv + self.kv_cache_memory_bytes)
        states = model.state_bytes_per_sequence(layout.tensor_parallel_size) * here
        if states:
            plan = self._with_states(plan, states, layout)
        fills_memory = self.num_kv_blocks is None and self.kv_cache_memory_bytes is None
        if fills_memory and profile.rule == "tensorrt_llm":
            free = profile.total_bytes(device, layout) - plan.fixed_bytes
            return replace(plan, usable_bytes=plan.fixed_bytes + self.share * free)
        return plan

    def _with_states(self, plan: MemoryPlan, state_bytes: float, layout: ParallelLayout) -> MemoryPlan:
        """Returns the plan with the linear-attention states: state_bytes per sequence on this device.

        With a fixed number of KV blocks, or with a cache that cannot hold states, every slot has a state.
        """
        groups = layout.attention_data_parallel_size
        slots = -(-self.max_num_seqs // groups)
        fills_memory = self.num_kv_blocks is None
        if fills_memory and self.profile.has_state_share:
            rest = max(plan.usable_bytes - plan.fixed_bytes, 0.0) * SGLANG_STATE_SHARE
            each = state_bytes * (SGLANG_STATES_PER_SEQUENCE if self.finds_prefixes else 1)
            held = max(rest if self.finds_prefixes else min(rest, slots * each), each)
            return replace(
                plan,
                window_and_state_bytes=plan.window_and_state_bytes + held,
                state_slots=int(held / each) * groups,
            )
        if fills_memory and self.blocks_hold_states and plan.kv_bytes_per_token:
            return replace(plan, state_bytes_per_sequence=state_bytes)
        held = plan.window_and_state_bytes + slots * state_bytes
        return replace(plan, window_and_state_bytes=held)

    def missing_bytes(self, layout: ParallelLayout) -> float:
        """Returns the bytes that a rank needs beyond its budget; <= 0 if it fits."""
        plan = self.without_kv(layout)
        blocks = (self.num_kv_blocks or plan.num_pools) / plan.num_pools
        kv_bytes = blocks * self.block_size * plan.kv_bytes_per_token + plan.state_bytes_per_sequence
        needed = max(plan.fixed_bytes + kv_bytes, plan.usable_bytes if self.kv_cache_memory_bytes else 0.0)
        return needed - self.budget_bytes(plan)

    def budget_bytes(self, plan: MemoryPlan) -> float:
        """Returns the maximum number of bytes of a device that the engine may use."""
        return min(plan.usable_bytes, self.device.memory_bytes)

    def filled(self, layout: ParallelLayout, windows_by_slot: bool = False) -> MemoryPlan:
        """Returns the plan with as many blocks as fit, or with the requested number."""
        plan = self.without_kv(layout, windows_by_slot)
        left = plan.usable_bytes - plan.fixed_bytes
        if self.kv_cache_memory_bytes is not None:  # the same, not rounded
            left = self.kv_cache_memory_bytes - plan.window_and_state_bytes
        left = max(left, 0.0)
        blocks = plan.num_pools * int(left // (self.block_size * plan.kv_bytes_per_token))
        return replace(plan, num_blocks=blocks if self.num_kv_blocks is None else self.num_kv_blocks)


def _does_not_fit(demand: _Demand, layout: ParallelLayout, device: Device) -> str:
    """Returns the error message: the missing memory, and the smallest tensor parallelism that fits."""
    model, missing = demand.model, demand.missing_bytes(layout)
    if (given := demand.kv_cache_memory_bytes) is not None:
        empty = demand.without_kv(layout)
        least = demand.block_size * empty.kv_bytes_per_token + empty.state_bytes_per_sequence
        if given < least:
            return (
                f"kv_cache_memory_bytes={given:g}: must hold a block of {demand.block_size} tokens of "
                f"{model.name}, {least:,.0f} bytes"
            )
    budget_bytes = demand.budget_bytes(demand.without_kv(layout))
    sizes = [2**n for n in range(device.gpus_per_node.bit_length()) if 2**n <= device.gpus_per_node]
    larger = [replace(layout, tensor_parallel_size=n) for n in sizes if n > layout.tensor_parallel_size]
    fitting = [
        wider.tensor_parallel_size
        for wider in larger
        if model.divides(wider.tensor_parallel_size) and demand.missing_bytes(wider) <= 0
    ]
    remedy = f"the smallest size that fits is {fitting[0]}" if fitting else f"no size up to {sizes[-1]} fits"
    blocks = f" with {demand.num_kv_blocks} KV blocks" if demand.num_kv_blocks else ""
    if demand.kv_cache_memory_bytes is not None:
        blocks = f" with {demand.kv_cache_memory_bytes / GIB:.1f} GiB of KV"
    if demand.draft is not None:
        plan = demand.without_kv(layout)
        fits = replace(demand, draft=None).missing_bytes(layout) <= 0
        return (
            f"speculation: {model.name}{blocks} and its draft of {plan.draft_bytes / GIB:.1f} GiB need "
            f"{(budget_bytes + missing) / GIB:.1f} GiB on each {device.name}, {missing / GIB:.1f} GiB more "
            f"than the {budget_bytes / GIB:.1f} GiB it may use, and the model "
            f"{'alone fits; choose a smaller draft' if fits else 'alone does not fit either'}; for "
            f"tensor_parallel_size, {remedy}"
        )
    return (
        f"tensor_parallel_size={layout.tensor_parallel_size}: {model.name}{blocks} needs "
        f"{(budget_bytes + missing) / GIB:.1f} GiB on each {device.name}, {missing / GIB:.1f} GiB more "
        f"than the {budget_bytes / GIB:.1f} GiB it may use; {remedy}"
    )


def weight_bytes(model: ModelSpec, layout: ParallelLayout, tile: tuple[int, int] = MXFP4_TILE) -> float:
    """Returns the bytes of one device's weights for its tensor and expert parallel rank, with padding.

    In a pipeline this is the stage with the most layers (of average size), plus the embedding table or the LM
    head, which are on the first and the last stage. Towers and additional tables are on the first stage.
    """
    whole = model.weight_bytes_per_rank(
        layout.tensor_parallel_size,
        moe_tensor_parallel_size=layout.expert_tensor_parallel_size,
        expert_parallel_size=layout.expert_parallel_size,
    )
    padding = padding_bytes(model, layout, tile)
    if layout.pipeline_parallel_size == 1:
        return whole + padding
    tables, others = (
        model.table_bytes(layout.tensor_parallel_size),
        model.other_bytes(layout.tensor_parallel_size),
    )
    layers = whole - sum(tables) - others
    return layers * layout.stage_share(model.num_layers) + max(tables) + others + padding


def redundant_bytes(model: ModelSpec, layout: ParallelLayout, num_experts: int) -> float:
    """Returns the bytes of one device's expert copies; num_experts: copies per layer on all ranks in total.

    DeepSeek-V3 in fp8, 32 copies on 32 ranks: one expert of 3 x 7,168 x 2,048 weights in each of 58 layers.
    """
    ranks = Ranks(
        layout.tensor_parallel_size, layout.expert_tensor_parallel_size, layout.expert_parallel_size
    )
    copies = 0.0
    for block in model.blocks if num_experts else ():
        if isinstance(block.mlp, MixtureOfExperts):
            matrices = block.layer_matrices(model.hidden_size, ranks)
            held = sum(model.matrix_bytes(matrix) for matrix in matrices if matrix.role is Role.routed)
            copies += block.count * held * num_experts / block.mlp.num_experts
    return copies * layout.stage_share(model.num_layers)


def adapter_bytes(model: ModelSpec, layout: ParallelLayout, lora: Lora) -> float:
    """Returns one device's bytes of all active adapters, sharded like their matrices, on the largest stage.

    Llama-3.1-8B, rank 16: 16 x 32 x (10,240 + 8,192 + 32,768 + 18,432) x 2 bytes = 68 MiB per adapter.
    """
    ranks = Ranks(
        layout.tensor_parallel_size, layout.expert_tensor_parallel_size, layout.expert_parallel_size
    )
    elements = lora.elements(model.layer_matrices(ranks))
    return elements * model.element_bytes * layout.stage_share(model.num_layers)


def kv_split(
    model: ModelSpec, tensor_parallel_size: int, num_slots: float, max_window: int
) -> tuple[float, float]:
    """Returns KV bytes per token in blocks, and bytes allocated for all slots, on one rank, all stages.

    A layer with a window keeps at most the window: every slot gets it at the start, at most max_window
    tokens; with max_window 0 such layers use full blocks.
    """
    layers = model.kv_layers(tensor_parallel_size)
    windowed = [entry for entry in layers if max_window and entry.window is not None]
    windows = sum(e.count * e.bytes_per_token * min(e.window or 0, max_window) for e in windowed)
    in_blocks = sum(e.count * e.bytes_per_token for e in layers if e not in windowed)
    if not in_blocks:  # every layer has the same window, so blocks hold it
        return model.kv_bytes_per_token(tensor_parallel_size), 0.0
    return in_blocks, num_slots * windows
