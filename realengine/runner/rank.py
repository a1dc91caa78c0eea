"""One rank's share of an engine: the weights, the KV memory and the executor on its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from policies.adapters.fixed_slots import MAX_RANKS, FixedSlots
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend, check_supported, choose_backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.lora_adapter import Adapter
from realengine.runner.executor import Executor
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import STAGED_BLOCKS, HostKv
from realengine.runner.parallel import Group
from realengine.serving.model import Model
from realengine.settings import DTYPES, KV_DTYPES, EngineSettings
from realengine.speculation.context import DrafterContext
from realengine.speculation.drafters.load import load_draft
from realengine.speculation.executor import SpeculativeExecutor
from realengine.weights.load import load_weights
from realengine.weights.lora_checkpoint import read_adapter

CPU_KV_BYTES = 1 << 30
GIB = 1 << 30
GRAPH_BYTES = GIB  # rough estimate for captured steps and libraries' workspaces


class Memory(NamedTuple):
    """Number of KV blocks on the device, and in host memory for swapped-out sequences."""

    num_blocks: int
    num_swap_blocks: int
    block_bytes: int  # bytes of a block, summed over all ranks


def build_executor(
    model: Model, settings: EngineSettings, device: torch.device, group: Group
) -> tuple[Executor, Memory]:
    """Builds one rank's model, KV cache and executor. Raises ValueError if the GPU has too little memory."""
    backend = choose_backend(settings.backend, device)
    name = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = DTYPES[name]
    kv_dtype = KV_DTYPES.get(settings.kv_cache_dtype, dtype)
    architecture, max_model_len = model.architecture, max_model_len_of(model.architecture, settings)
    quantization, world_size = settings.quantization, group.world_size
    check_supported(architecture, backend, dtype, kv_dtype, quantization=quantization, world_size=world_size)
    try:
        weights = load_weights(
            model.source,
            architecture,
            dtype,
            device,
            quantization=quantization,
            rank=group.rank,
            world_size=world_size,
            seed=settings.seed,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the weights do not fit into the GPU's memory: {error}; choose a quantization, a larger "
            "tensor_parallel_size, or a smaller model"
        ) from error
    adapters = _adapters(architecture, settings, backend, dtype, device, group)
    decoder = Decoder(architecture, weights, backend, max_model_len, group, adapters)
    block_size = settings.caching.block_size
    draft = None
    if settings.speculation is not None:
        context = DrafterContext(
            target=decoder,
            architecture=architecture,
            backend=backend,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            group=group,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            seed=settings.seed,
        )
        draft = load_draft(settings.speculation, context)
    block_bytes = KvCache.bytes_per_block(architecture, block_size, kv_dtype, world_size)
    block_bytes += 0 if draft is None else draft.block_bytes
    num_blocks = settings.num_kv_blocks
    if num_blocks is None:
        num_blocks = group.smallest(_num_blocks_that_fit(architecture, settings, dtype, device, block_bytes))
    memory = Memory(num_blocks, int(settings.swap_space_gib * GIB / block_bytes), block_bytes * world_size)
    try:
        cache = KvCache(architecture, num_blocks, block_size, kv_dtype, device, world_size)
        drafter = None if draft is None else draft.build(cache)
    except torch.OutOfMemoryError:
        fitting = _num_blocks_that_fit(architecture, settings, dtype, device, block_bytes)
        what = "weights" if draft is None else "weights of the model and of its draft"
        raise _no_room(num_blocks, block_bytes, fitting, what) from None
    new_executor: Callable[..., Executor] = Executor
    if settings.speculation is not None:
        if drafter is not None:
            cache.attached += drafter.cache_sets
        new_executor = partial(SpeculativeExecutor, proposer=settings.speculation.proposer, drafter=drafter)
    captures = on_gpu_by_default(settings.use_graphs, device)
    decodes_plainly = settings.speculation is None  # else no step is one of those that graphs replay
    executor = new_executor(
        decoder,
        cache,
        backend,
        num_slots=settings.max_num_seqs,
        max_model_len=max_model_len,
        host_kv=HostKv(cache, backend),
        adapters=adapters,
        graph_sizes=default_sizes(settings.max_num_seqs) if captures and decodes_plainly else (),
    )
    if captures:
        with torch.cuda.device(device):
            executor.warm_up()
            if executor.graphs is not None:
                executor.graphs.capture()
    return executor, memory


def _no_room(num_blocks: int, block_bytes: int, num_fitting: int, what: str) -> ValueError:
    return ValueError(
        f"num_kv_blocks={num_blocks}: the GPU has no memory for {num_blocks * block_bytes / GIB:.2f} GiB "
        f"of KV beside the {what}; {num_fitting} blocks would fit, as with num_kv_blocks=None"
    )


def max_model_len_of(architecture: Architecture, settings: EngineSettings) -> int:
    """Returns the maximum number of tokens of a sequence. Raises ValueError if the model has fewer."""
    context = architecture.max_position_embeddings
    if settings.max_model_len is None:
        return context
    if settings.max_model_len > context:
        raise ValueError(
            f"max_model_len={settings.max_model_len}: must be <= {context}, the model's context length"
        )
    return settings.max_model_len


def on_gpu_by_default(choice: bool | None, device: torch.device) -> bool:
    """Resolves an open choice: true on a GPU."""
    return device.type == "cuda" if choice is None else choice


def turns_of_adapters(settings: EngineSettings, max_rank: int) -> FixedSlots:
    """Returns the policy of the adapter slots: the configured one, or least recently used."""
    if settings.adapters is not None:
        return settings.adapters
    return FixedSlots(
        max_loras=settings.max_loras or len(settings.lora_adapters),
        max_lora_rank=next(allowed for allowed in MAX_RANKS if allowed >= max_rank),
    )


def _adapters(
    architecture: Architecture,
    settings: EngineSettings,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> AdapterBank | None:
    """Loads the LoRA adapters into host memory; returns their bank, or None if there are none."""
    if not settings.lora_adapters:
        return None
    adapters = {
        name: given if isinstance(given, Adapter) else read_adapter(Path(given), architecture)
        for name, given in settings.lora_adapters.items()
    }
    max_rank = max(adapter.rank for adapter in adapters.values())
    bank = AdapterBank(
        architecture,
        backend,
        dtype,
        device,
        max_loras=turns_of_adapters(settings, max_rank).max_loras,
        max_rank=max_rank,
        rank=group.rank,
        world_size=group.world_size,
    )
    for name, adapter in adapters.items():
        bank.load(name, adapter)
    return bank


def _num_blocks_that_fit(
    architecture: Architecture,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    block_bytes: int,
) -> int:
    """Returns the number of blocks that fit beside weights and the largest step.

    Raises ValueError if none does.
    """
    free_bytes = float(CPU_KV_BYTES)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        free_bytes = free - (1 - settings.gpu_memory_utilization) * total
        free_bytes -= _step_bytes(architecture, settings, dtype)
        free_bytes -= STAGED_BLOCKS * block_bytes
        if on_gpu_by_default(settings.use_graphs, device):
            free_bytes -= GRAPH_BYTES
    num_blocks = int(free_bytes // block_bytes) - 1
    if num_blocks < 1:
        share = settings.gpu_memory_utilization
        drafts = "" if settings.speculation is None else " with the KV of drafts"
        raise ValueError(
            f"gpu_memory_utilization={share}: only {max(free_bytes, 0) / GIB:.2f} GiB are left for "
            f"KV; a block of {settings.caching.block_size} tokens needs {block_bytes / GIB:.4f} GiB{drafts}; "
            "raise it, or serve a smaller model"
        )
    return num_blocks


def _step_bytes(architecture: Architecture, settings: EngineSettings, dtype: torch.dtype) -> float:
    """Returns an upper bound of the bytes of the largest step's activations and logits, also in fp32."""
    spec = architecture
    heads = spec.num_heads + 2 * spec.num_kv_heads
    width = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
    if spec.num_experts:
        width += spec.num_experts_per_tok * (2 * spec.hidden_size + 3 * spec.moe_intermediate_size)
    if settings.quantization == "w4a16" or spec.packed is not None:  # large steps unpack a weight
        unpacked = 2.0 * spec.intermediate_size * spec.hidden_size * dtype.itemsize
    else:
        unpacked = 0.0
    logits = settings.max_num_seqs * spec.vocab_size * (dtype.itemsize + 12)  # fp32 twice, and penalties
    num_tokens = settings.max_num_batched_tokens or max_model_len_of(architecture, settings)
    return float(num_tokens * width * dtype.itemsize + logits) + unpacked
