"""The two backends for everything except plain matrix products: Triton kernels, or their torch references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels import (
    activation,
    attention,
    block_copy,
    decode_attention,
    mla_decode,
    mla_rope,
    moe,
    moe_routing,
    norm,
    prefill_attention,
    rejection,
    rope,
    sampling,
    token_moves,
    w4a16,
    w8a8,
    w8a16,
)
from kernels.launch import target
from kernels.mxfp4_weight import BLOCK
from kernels.paged_kv import INT4
from realengine.model.architecture import Architecture
from realengine.model.quantization import EXPERT_QUANTIZATIONS, check_int4_inputs, check_quantization

HALVES = (torch.bfloat16, torch.float16)


class Backend(NamedTuple):
    """The kernels that the model calls; both backends have the same signatures."""

    name: str
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    qk_norm: Callable[..., Any]
    rope_and_write_kv: Callable[..., Any]
    decode_attention: Callable[..., Any]
    prefill_attention: Callable[..., Any]
    mla_rope_and_write: Callable[..., Any]
    mla_decode: Callable[..., Any]
    silu_mul: Callable[..., Any]
    gelu_tanh_mul: Callable[..., Any]
    quantise_tokens: Callable[..., Any]
    w4a16_gemm: Callable[..., Any]
    w8a16_gemm: Callable[..., Any]
    w8a8_gemm: Callable[..., Any]
    moe_route: Callable[..., Any]
    moe_mlp: Callable[..., Any]
    sample: Callable[..., torch.Tensor]
    greedy: Callable[..., torch.Tensor]
    copy_blocks: Callable[..., None]
    gather_blocks: Callable[..., None]
    scatter_blocks: Callable[..., None]
    match_drafts: Callable[..., rejection.Matched]
    move_tokens: Callable[..., None]


TRITON = Backend(
    name="triton",
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    qk_norm=norm.qk_norm,
    rope_and_write_kv=rope.rope_and_write_kv,
    decode_attention=decode_attention.decode_attention,
    prefill_attention=prefill_attention.prefill_attention,
    mla_rope_and_write=mla_rope.mla_rope_and_write,
    mla_decode=mla_decode.mla_decode,
    silu_mul=activation.silu_mul,
    gelu_tanh_mul=activation.gelu_tanh_mul,
    quantise_tokens=w8a8.quantise_tokens,
    w4a16_gemm=w4a16.w4a16_gemm,
    w8a16_gemm=w8a16.w8a16_gemm,
    w8a8_gemm=w8a8.w8a8_gemm,
    moe_route=moe_routing.moe_route,
    moe_mlp=moe.moe_mlp,
    sample=sampling.sample,
    greedy=sampling.greedy,
    copy_blocks=block_copy.copy_blocks,
    gather_blocks=block_copy.gather_blocks,
    scatter_blocks=block_copy.scatter_blocks,
    match_drafts=rejection.match_drafts,
    move_tokens=token_moves.move_tokens,
)

TORCH = Backend(
    name="torch",
    rms_norm=norm.rms_norm_reference,
    add_rms_norm=norm.add_rms_norm_reference,
    qk_norm=norm.qk_norm_reference,
    rope_and_write_kv=rope.rope_and_write_kv_reference,
    decode_attention=decode_attention.decode_attention_reference,
    prefill_attention=prefill_attention.prefill_attention_reference,
    mla_rope_and_write=mla_rope.mla_rope_and_write_reference,
    mla_decode=mla_decode.mla_decode_reference,
    silu_mul=activation.silu_mul_reference,
    gelu_tanh_mul=activation.gelu_tanh_mul_reference,
    quantise_tokens=w8a8.quantise_tokens_reference,
    w4a16_gemm=w4a16.w4a16_gemm_reference,
    w8a16_gemm=w8a16.w8a16_gemm_reference,
    w8a8_gemm=w8a8.w8a8_gemm_reference,
    moe_route=moe_routing.moe_route_reference,
    moe_mlp=moe.moe_mlp_reference,
    sample=sampling.sample_reference,
    greedy=sampling.greedy_reference,
    copy_blocks=block_copy.copy_blocks_reference,
    gather_blocks=block_copy.gather_blocks_reference,
    scatter_blocks=block_copy.scatter_blocks_reference,
    match_drafts=rejection.match_drafts_reference,
    move_tokens=token_moves.move_tokens_reference,
)

BACKENDS = {backend.name: backend for backend in (TRITON, TORCH)}


def choose_backend(name: str | None, device: torch.device) -> Backend:
    """Returns the backend of this name; None: Triton on a GPU, torch on a CPU.

    Raises ValueError otherwise.
    """
    if name is None:
        return TRITON if device.type == "cuda" else TORCH
    if name not in BACKENDS:
        raise ValueError(f"backend={name}: must be one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def choose_device(name: str | None) -> torch.device:
    """Returns the device of this name; None: a GPU. Raises RuntimeError with advice if it does not exist."""
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise RuntimeError("no GPU was found; device='cpu' runs on the CPU, slowly")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device={name}: no GPU was found; device='cpu' runs on the CPU, slowly")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_supported(
    architecture: Architecture,
    backend: Backend,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    quantization: str | None = None,
    world_size: int = 1,
) -> None:
    """Raises ValueError with alternatives if the backend cannot compute this model with these settings.

    Call it before loading weights, so that no step meets a shape or dtype that its kernels do not support.
    """
    check_quantization(quantization)
    packed = architecture.packed
    if packed is not None and quantization not in (None, "w4a16"):
        raise ValueError(
            f"quantization={quantization}: the checkpoint is packed by {packed.quant_method}, "
            "which is w4a16; remove the setting"
        )
    quantization = "w4a16" if packed is not None else quantization
    _check_kv(architecture, dtype, kv_dtype)
    if architecture.gpt_oss is not None and world_size > 1:
        raise ValueError(
            f"tensor_parallel_size={world_size}: experts of gpt_oss are not divided among ranks; set it to 1"
        )
    if quantization == "mxfp4" and not architecture.num_experts:
        raise ValueError("quantization=mxfp4: experts only are kept in 4 bits, and this model has none")
    if architecture.num_experts and quantization not in (None, *EXPERT_QUANTIZATIONS):
        raise ValueError(
            f"quantization={quantization}: experts cannot be quantised in this way; with num_experts="
            f"{architecture.num_experts} use {', '.join(EXPERT_QUANTIZATIONS)} or None"
        )
    if quantization == "mxfp4":
        for name, size in (
            ("hidden_size", architecture.hidden_size),
            ("moe_intermediate_size", architecture.moe_intermediate_size // world_size),
        ):
            if size % BLOCK:
                raise ValueError(f"{name}={size} of a rank: mxfp4 supports multiples of {BLOCK}")
    if quantization == "w4a16":
        for name, num_inputs in _inputs_of_a_rank(architecture, world_size).items():
            check_int4_inputs(name, num_inputs)
    if backend is TRITON:
        _check_triton(architecture, dtype, kv_dtype, quantization)


def _check_kv(architecture: Architecture, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raises ValueError if the model's keys and values cannot be kept in this dtype."""
    head_dim, rotary_dim = architecture.head_dim, architecture.rotary_dim
    if architecture.latent is not None and kv_dtype != dtype:
        raise ValueError(
            f"kv_cache_dtype={'int4' if kv_dtype == INT4 else kv_dtype}: latent rows are kept in the model's "
            "dtype; set it to auto"
        )
    if kv_dtype == INT4 and (head_dim % 2 or rotary_dim % 4):
        raise ValueError(
            f"kv_cache_dtype=int4: a byte has two neighbours of a head, so head_dim={head_dim} must be even "
            f"and its {rotary_dim} rotated numbers a multiple of 4; choose int8"
        )


def _inputs_of_a_rank(architecture: Architecture, world_size: int) -> dict[str, int]:
    return {
        "qkv and gate_up": architecture.hidden_size,
        "o": architecture.num_heads * architecture.value_dim // world_size,
        "down": architecture.intermediate_size // world_size,
    }


def _check_triton(
    architecture: Architecture, dtype: torch.dtype, kv_dtype: torch.dtype, quantization: str | None
) -> None:
    head_dim, most = architecture.head_dim, attention.MAX_HEAD_DIM
    if head_dim % 16 or head_dim > most:
        raise ValueError(
            f"head_dim={head_dim}: the Triton kernels support multiples of 16 up to {most}; backend='torch' "
            "supports any"
        )
    if architecture.hidden_size > norm.MAX_HIDDEN:
        raise ValueError(
            f"hidden_size={architecture.hidden_size}: the Triton kernels support up to {norm.MAX_HIDDEN}"
        )
    latent = architecture.latent
    if latent is not None and (
        latent.rank not in mla_decode.LATENT_DIMS or latent.rope_dim not in mla_decode.ROPE_DIMS
    ):
        raise ValueError(
            f"kv_lora_rank={latent.rank}, qk_rope_head_dim={latent.rope_dim}: the Triton kernels support "
            f"{mla_decode.LATENT_DIMS} with {mla_decode.ROPE_DIMS}; backend='torch' supports any"
        )
    prefill_attention.tile_of(head_dim, architecture.num_heads // architecture.num_kv_heads, 1)
    if dtype not in HALVES and (architecture.num_experts or quantization in ("w4a16", "w8a16")):
        what = f"quantization={quantization}" if quantization else "a mixture of experts"
        raise ValueError(f"dtype={dtype}: {what} needs bfloat16 or float16 with the Triton kernels")
    if (
        architecture.num_experts > moe_routing.MAX_EXPERTS
        or architecture.num_experts_per_tok > moe_routing.MAX_CHOICES
    ):
        raise ValueError(
            f"num_experts_per_tok={architecture.num_experts_per_tok} of num_experts="
            f"{architecture.num_experts}: the Triton kernels support up to {moe_routing.MAX_CHOICES} of "
            f"{moe_routing.MAX_EXPERTS}"
        )
    if quantization == "fp8":
        w8a8.check_dtype(w8a8.FP8)
    if kv_dtype == w8a8.FP8 and target() in attention.NO_FP8:
        raise ValueError(
            f"kv_cache_dtype=fp8: needs sm_89 or later, this is {target()}; int8 is supported there"
        )
