"""One rank's share of an engine: the weights, the KV memory and the executor on its device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch

from policies.adapters.fixed_slots import FixedSlots
from policies.caching.selective import SnapKv
from policies.caching.streaming import StreamingLlm
from policies.placement.experts import in_order
from policies.speculation.engine.drafts import Shapes
from realengine.ahead.startup import compile_kernels
from realengine.ahead.zeros import EngineShape
from realengine.attention.choice import HopperAttention, with_attention
from realengine.model.architecture import Architecture
from realengine.model.backend import TRITON, Backend, check_supported, choose_backend
from realengine.model.decoders import decoder_of
from realengine.model.kv_cache import KvCache
from realengine.model.lora import AdapterBank
from realengine.model.lora_adapter import Adapter
from realengine.model.quantization import Weights, weights_on
from realengine.model.token_exchange import TokenExchange
from realengine.progress import Progress
from realengine.runner import piecewise
from realengine.runner.executor import Executor
from realengine.runner.expert_balance import ExpertBalance
from realengine.runner.graph_mode import mode_of
from realengine.runner.graphs import default_sizes
from realengine.runner.host_kv import HostKv
from realengine.runner.kept_tokens import KeptPrompt, KeptTokens, KeptWindow
from realengine.runner.memory import CPU_NO_MEMORY, GIB, Memory, MemoryPlan
from realengine.runner.parallel import ExpertRanks, Group, Mesh
from realengine.serving.model import Model
from realengine.settings import DTYPES, KV_DTYPES, EngineSettings
from realengine.speculation.drafter import DrafterContext, LoadedDraft
from realengine.speculation.drafters.load import load_draft
from realengine.speculation.verifier import DeviceDrafts
from realengine.weights.load import load_weights
from realengine.weights.lora_checkpoint import read_adapter


def build_executor(
    model: Model,
    settings: EngineSettings,
    device: torch.device,
    mesh: Mesh | None = None,
    weights: Weights | None = None,
) -> tuple[Executor, Memory]:
    """Builds one rank's model, KV cache and executor. Raises ValueError if the GPU has too little memory.

    mesh: the groups of this rank; None: it is alone. weights: those that `load_weights` has returned before,
    on any device; None: they are loaded.
    """
    mesh = mesh or Mesh.alone(model.architecture.num_layers)
    backend, group, layers = choose_backend(settings.backend, device), mesh.tensor, mesh.stage.layers
    progress = Progress(settings.progress if mesh.everyone.rank == 0 else False)
    name = settings.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = DTYPES[name]
    kv_dtype = KV_DTYPES.get(settings.kv_cache_dtype, dtype)
    architecture, max_model_len = model.architecture, max_model_len_of(model.architecture, settings)
    quantization, world_size = settings.quantization, group.world_size
    check_supported(architecture, backend, dtype, kv_dtype, quantization=quantization, world_size=world_size)
    backend = with_attention(backend, settings.attention_backend, device)
    experts, exchange = _expert_ranks(architecture, settings, mesh)
    weights = _weights(model, settings, dtype, device, mesh, experts, progress, weights)
    check_drafts(architecture, settings)
    window = kept_tokens_of(architecture, settings, device)
    if window is not None:
        backend = window.observed(backend)
    adapters = _adapters(architecture, settings, backend, dtype, device, group)
    decoder = decoder_of(
        *(architecture, weights, backend, max_model_len, group, adapters),
        *(mesh.stage, experts, exchange, mesh.context),
    )
    block_size, draft = settings.caching.block_size, None
    if settings.speculation is not None:
        context = DrafterContext(
            target=decoder,
            architecture=architecture,
            source=model.source,
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
    block_bytes, all_bytes = _block_bytes(architecture, block_size, kv_dtype, mesh, draft)
    mode = mode_of(settings.cudagraph_mode, is_gpu=device.type == "cuda" and settings.may_capture)
    if mode.captures and device.type == "cuda" and backend.name == TRITON.name and mesh.everyone.rank == 0:
        shape = EngineShape(
            architecture=architecture,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantization=quantization,
            world_size=world_size,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_tokens=settings.max_num_batched_tokens or max_model_len,
            max_loras=0 if adapters is None else adapters.max_loras,
            max_rank=0 if adapters is None else adapters.max_rank,
            backend=backend if settings.attention_backend == HopperAttention.name else TRITON,
        )
        with torch.cuda.device(device):
            compile_kernels(shape, progress)
    plan = MemoryPlan.of(architecture, settings, dtype, max_model_len, block_bytes, draft, mode)
    num_blocks = settings.num_kv_blocks
    if num_blocks is None:
        num_blocks = mesh.everyone.smallest(plan.num_blocks(device))
    _check_alike(
        mesh,
        device,
        {"the model": architecture, "dtype": dtype, "kv_cache_dtype": kv_dtype, "num_kv_blocks": num_blocks},
    )
    num_swap_blocks = int(settings.swap_space_gib * GIB * mesh.everyone.world_size / all_bytes)
    memory = Memory(num_blocks, num_swap_blocks, all_bytes)
    drafts = None
    try:
        cache = KvCache(architecture, num_blocks, block_size, kv_dtype, device, world_size, layers)
        if settings.speculation is not None:
            drafter = None if draft is None else draft.build(cache)
            if drafter is not None:
                cache.attached += drafter.cache_sets
            drafts = DeviceDrafts(
                settings.speculation.proposer,
                drafter,
                draft is not None and draft.draws,
                settings.speculation.draft_length,
            )
        executor = Executor(
            decoder,
            cache,
            backend,
            num_slots=settings.max_num_seqs,
            max_model_len=max_model_len,
            host_kv=HostKv(cache, backend),
            adapters=adapters,
            graph_sizes=default_sizes(settings.max_num_seqs) if mode.full_decodes else (),
            piece_sizes=piecewise.SIZES if mode.piecewise else (),
            window=window,
            drafts=drafts,
            balance=None
            if experts is None
            else ExpertBalance(decoder.placed_experts, experts, settings.expert_placement),
        )
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and CPU_NO_MEMORY not in str(error):
            raise
        raise plan.no_room(num_blocks, device) from None
    if mode.captures:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            executor.warm_up()
            executor.capture(progress)
    executor.start_s = dict(progress.seconds)
    executor.weights = weights if settings.enable_sleep_mode else None
    return executor, memory


def _block_bytes(
    architecture: Architecture, block_size: int, dtype: torch.dtype, mesh: Mesh, draft: LoadedDraft | None
) -> tuple[int, int]:
    """Returns the bytes of a KV block on this rank, and on all ranks together, with the KV of drafts."""
    size, of_draft = mesh.tensor.world_size, 0 if draft is None else draft.block_bytes
    num_copies = mesh.data.world_size * mesh.context.world_size
    own, whole = (
        KvCache.bytes_per_block(architecture, block_size, dtype, size, layers) + of_draft
        for layers in (mesh.stage.layers, None)
    )
    return own, whole * size * num_copies


def _check_alike(mesh: Mesh, device: torch.device, facts: Mapping[str, object]) -> None:
    """Raises RuntimeError if the ranks differ in facts, in the version of torch, or in the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    mesh.everyone.check_alike({"torch": torch.__version__, "the device": name, **facts})


def _weights(
    model: Model,
    settings: EngineSettings,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh,
    experts: ExpertRanks | None,
    progress: Progress,
    weights: Weights | None,
) -> Weights:
    """Returns the weights on the device; loads them unless they are given. Raises ValueError for no room."""
    try:
        if weights is not None:
            return weights_on(weights, device)
        return load_weights(
            model.source,
            model.architecture,
            dtype,
            device,
            quantization=settings.quantization,
            rank=mesh.tensor.rank,
            world_size=mesh.tensor.world_size,
            layers=mesh.stage.layers,
            experts=None if experts is None else experts.loaded,
            seed=settings.seed,
            progress=progress,
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the weights do not fit into the GPU's memory: {error}; choose a quantization, a larger "
            "tensor_parallel_size or pipeline_parallel_size, or a smaller model"
        ) from error


def _expert_ranks(
    architecture: Architecture, settings: EngineSettings, mesh: Mesh
) -> tuple[ExpertRanks | None, TokenExchange | None]:
    """Returns the ranks of a stage as those of its experts, and how data-parallel ones exchange tokens.

    None: all ranks of a tensor-parallel group have a share of every expert.
    """
    size, data = settings.expert_parallel_size, mesh.data
    if size == data.world_size == 1:
        return None, None
    num_redundant = settings.expert_placement.num_redundant_experts
    ranks = ExpertRanks.of(in_order(architecture.num_experts, size, num_redundant), mesh.peers)
    if data.world_size == 1:
        return ranks, None
    return ranks, TokenExchange(data, ranks, mesh.tensor.rank, settings.all2all_backend)


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


def check_drafts(architecture: Architecture, settings: EngineSettings) -> None:
    """Raises ValueError for draft tokens that this model's attention cannot verify."""
    speculation = settings.speculation
    if architecture.is_plain or speculation is None:
        return
    if speculation.proposer.method in ("eagle", "eagle3", "mtp"):
        raise ValueError(
            f"speculative_config: method={speculation.proposer.method}: layers that draft are not computed "
            f"for model_type={architecture.model_type}; choose ngram, suffix, draft_model or self_speculative"
        )
    if architecture.latent is None and not architecture.alibi:
        return
    if not Shapes(speculation.proposer).is_chain or speculation.proposer.method == "lookahead":
        raise ValueError(
            f"speculative_config: method={speculation.proposer.method}: token trees are not computed for "
            f"model_type={architecture.model_type}; choose a method that drafts one token per place"
        )


def turns_of_adapters(settings: EngineSettings, max_rank: int) -> FixedSlots:
    """Returns the policy of the adapter slots: the configured one, or least recently used."""
    slots = settings.adapters or FixedSlots(max_loras=settings.max_loras or len(settings.lora_adapters))
    return slots.fitted([max_rank])


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
    if not architecture.is_plain:
        raise ValueError(
            f"lora_adapters: LoRA is not computed for model_type={architecture.model_type}; remove them"
        )
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


def kept_tokens_of(
    architecture: Architecture, settings: EngineSettings, device: torch.device
) -> KeptTokens | None:
    """Returns what decoding sequences keep; None: all. Raises ValueError if the model cannot drop KV."""
    caching = settings.caching
    if isinstance(caching, StreamingLlm):
        return KeptWindow.of(architecture, caching)
    if isinstance(caching, SnapKv):
        return KeptPrompt.of(architecture, caching, settings.max_num_seqs, device)
    return None
