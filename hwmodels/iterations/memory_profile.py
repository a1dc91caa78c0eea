"""Rules by which vLLM, SGLang and TensorRT-LLM find the memory for KV when they start.

    vllm           share x total - weights - what a profile run of the largest batch needs [- CUDA graphs]
    sglang         share x what is free before the weights are loaded - weights
    tensorrt_llm   share x (total - weights - what a profile run needs)

The share is `gpu_memory_utilization`, `mem_fraction_static` and `free_gpu_memory_fraction`. Sources: vLLM
0.32, `gpu_worker.determine_available_memory` and `mem_utils.memory_profiling`; SGLang 0.5.23,
`arg_groups/memory_hook.py` and `profile_max_num_token`; TensorRT-LLM, `pyexecutor/_util.py`. The constants
were set on half of the start-up logs in `hwmodels/trust/kv_memory_logs.csv`; `windtunnel score
kind=kv_memory` gives the errors of both halves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fieldlimits import Checked, OneOf, check
from hwmodels.device import Device
from hwmodels.host import CudaGraphs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model.model_spec import MixtureOfExperts, ModelSpec
from hwmodels.model.weights import Role

GIB = 2.0**30
MIB = 2.0**20

DRIVER_BYTES, DRIVER_SHARE = 0.38 * GIB, 0.0018
"""Memory that nvidia-smi counts and CUDA does not have: 79.19 of 79.65 GiB are left on an H100, 139.81 of
140.40 on an H200, 178.35 of 179.06 on a B200, 23.52 of 23.99 on an RTX 4090, 79.25 of 80 on an A100."""

CONTEXT_BYTES = 0.75 * GIB
"""CUDA context and libraries before SGLang loads the weights: 78.43 GiB are free on an H100 then."""

NCCL_BYTES = 1.6 * GIB
"""Buffers of NCCL and of the all-reduce besides, with several devices: 137.3 GiB are free on an H200."""

WORKSPACE_BYTES = 0.25 * GIB
"""What TensorRT-LLM's kernels and libraries take besides the activations."""

FLASHINFER_BYTES_PER_LOGIT = 15.0
"""Peak of the dummy sampling per logit where FlashInfer samples, which does not sort the logits: assumed to
be that of 0.17. FlashInfer issue 1180 shows 4.00 GiB for KV with it and 2.49 GiB without."""

SGLANG_MIB_PER_TOKEN = 1.5
"""Activations per token of the largest chunk, as SGLang sets them aside."""
SGLANG_MIB_PER_GRAPH_ROW = 2.0
SGLANG_MIB_PER_PREFILL_GRAPH = 8.0

SGLANG_STATE_SHARE = 0.9 / 1.9
"""Share of the memory besides the weights that SGLang gives to states of linear attention, by its default
`mamba_full_memory_ratio=0.9`; KV gets the rest."""
SGLANG_STATES_PER_SEQUENCE = 3
"""States that SGLang counts for a running sequence, its own and those of cached prefixes that it uses
(`MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`)."""


class Era(NamedTuple):
    """The profile run of vLLM from a version on, in bytes of one device."""

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
    """Multiples to which experts in MXFP4 are padded: see `MXFP4_TILE`."""


MXFP4_TILE = 256, 128
"""Multiples to which kernels for MXFP4 pad the hidden size and a rank's intermediate size: gpt-oss's 2,880
take 3,072 and 2,944, which is 9 % of its experts (vLLM 0.32, `fused_moe/oracle/mxfp4.py`). The Triton kernels
of 0.11 took 7 %."""

ERAS = (
    Era((0, 9, 0), 38.4, 0.13 * GIB, 0.42 * GIB, False, False, (256, 1)),
    Era((0, 17, 0), 15.0, 0.13 * GIB, 0.42 * GIB, True, False, (256, 1)),
    Era((0, 18, 0), 15.0, 0.25 * GIB, 1.85 * GIB, True, False, MXFP4_TILE),
    Era((0, 21, 0), 15.0, 0.25 * GIB, 1.85 * GIB, True, True, MXFP4_TILE),
)
"""Oldest first. All-reduce buffers of 0.42 GiB were measured in 0.11, of 1.85 GiB in 0.19; the version of the
change is not known. Nor is it for the tile, which changed between 0.14 and 0.19."""

GRAPH_BYTES, GRAPH_LAYER_BYTES = 0.25 * GIB, 0.17 * MIB
"""CUDA graphs take the first, and the second for every layer in every graph: 0.8 GiB for 32 layers in 51
graphs of decodes and 51 of other batches, as vLLM estimates them."""


MEMORY_RULES = ("vllm", "sglang", "tensorrt_llm")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProfile(Checked):
    """The rule of an engine, and for vLLM of one of its versions."""

    rule: Annotated[str, OneOf(MEMORY_RULES)] = "vllm"
    """vllm, sglang or tensorrt_llm."""
    version: str | None = None
    """Version of vLLM, such as 0.11.0; None: the newest that is known, 0.33."""
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
        """True if states of linear attention have a share of the memory (SGLang), false if in KV blocks.

        For TensorRT-LLM the latter is assumed.
        """
        return self.rule == "sglang"

    def total_bytes(self, device: Device, layout: ParallelLayout) -> float:
        """Returns the memory of which the engine takes a share: all, or what is free without weights."""
        total = device.memory_bytes * (1 - DRIVER_SHARE) - DRIVER_BYTES
        if self.rule == "sglang":
            total -= CONTEXT_BYTES + (NCCL_BYTES if layout.num_devices > 1 else 0.0)
        return max(total, 0.0)

    def runtime_bytes(self, device: Device, layout: ParallelLayout) -> float:
        """Returns the memory besides weights and activations that the engine subtracts."""
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
        with what sampling takes. The larger of the two counts. SGLang subtracts neither, and TensorRT-LLM
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
        """Returns the memory of captured graphs that is subtracted; other versions capture beyond the share.

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
        """Returns the share of memory that was given, or for None SGLang's own `mem_fraction_static`.

        SGLang sets aside 512 MiB, 1.5 MiB per token of a chunk, 2 MiB per row of the largest decode graph,
        8 MiB per prefill graph and 1 GiB per 8 devices; with more than 60 GiB at least 10 GiB. Two H100,
        chunks of 8,192, graphs of 256 rows: 0.828. Raises ValueError for None and another engine.
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
    """Returns the bytes that one device's experts in MXFP4 take beyond their weights: see `MXFP4_TILE`."""
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

    Each of top_k copies of a token has gate and up, whose space the output takes next, and their product
    (vLLM's fused_moe: the larger of 2 N and K, and N). With several attention groups a device gets the tokens
    of all, or with whole experts its share of the copies.
    """
    if not isinstance(mlp, MixtureOfExperts):
        return 0.0
    groups = layout.attention_data_parallel_size
    copies = mlp.top_k * groups / min(groups, layout.expert_parallel_size)
    width = mlp.intermediate_size / layout.expert_tensor_parallel_size
    return copies * (max(2 * width, model.hidden_size) + width)


def _prefill_graphs(max_num_batched_tokens: int) -> float:
    """Returns the MiB that SGLang sets aside for graphs of chunks: 58 sizes up to 8,192 tokens."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
    sizes = [size for step in steps for size in range(*step)]
    sizes += range(4608, max_num_batched_tokens + 1, 512)
    return SGLANG_MIB_PER_PREFILL_GRAPH * sum(size <= max_num_batched_tokens for size in sizes)


def _parsed(version: str) -> tuple[int, int, int]:
    """Parses a version of vLLM. Raises ValueError for one before 0.9 and for other texts."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)\.(\d+)\S*", version)
    parsed = (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)
    if parsed < ERAS[0].since:
        raise ValueError(
            f"version={version}: must be a version of vLLM with three parts, 0.9.0 or later, such as 0.11.0"
        )
    return parsed
