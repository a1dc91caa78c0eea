"""Attention sizes of real models, for which the kernels are compiled ahead of time and timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from kernels.attention import AttentionOptions, Contexts
from kernels.paged_kv import INT4, QUANTISED, PagedKv, scales_of, vector_bytes


class Dimensions(NamedTuple):
    """Attention sizes of a model, and the options of its layers, for `cases()`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def options(self, device: torch.device) -> AttentionOptions:
        """Returns the options of the layers, with equal sinks and slopes."""
        return AttentionOptions(
            window=self.window,
            softcap=self.softcap,
            sinks_H=torch.zeros(self.num_heads, device=device) if self.sinks else None,
            alibi_slopes_H=torch.full((self.num_heads,), 0.01, device=device) if self.alibi else None,
        )


MODELS = {
    "llama_8b": Dimensions(32, 8, 128),
    "qwen3_0.6b": Dimensions(16, 8, 128),
    "smollm2_135m": Dimensions(9, 3, 64),
    "mistral_7b": Dimensions(32, 8, 128, window=4096),
    "gpt_oss_20b": Dimensions(64, 8, 64, window=128, sinks=True),
    "gemma2_9b": Dimensions(16, 8, 256, window=4096, softcap=50.0),
    "mpt_7b": Dimensions(32, 32, 128, alibi=True),
    "phi3_mini": Dimensions(32, 32, 96),
    "falcon_7b": Dimensions(71, 1, 64),
}


class Work(NamedTuple):
    """Lower bounds of what a call of prefill attention moves and computes."""

    bytes_moved: float
    flops: float


def prefill_work(
    model: Dimensions, num_seqs: int, query_len: int, context_len: int, kv_dtype: torch.dtype
) -> Work:
    """Returns the work of chunks of query_len tokens, of 16 bits, at the end of contexts."""
    window = model.window or context_len
    pairs = sum(min(context_len - i, window) for i in range(query_len))
    num_vectors = 2 * min(context_len, window + query_len) * model.num_kv_heads
    q_elements = query_len * model.num_heads * model.head_dim
    return Work(
        num_seqs * (num_vectors * vector_bytes(model.head_dim, kv_dtype) + 4 * q_elements),
        4 * num_seqs * pairs * model.num_heads * model.head_dim,
    )


def made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns random numbers on a GPU, uninitialised memory on the CPU, where cases are only compiled."""
    if device.type == "cpu":
        return torch.empty(shape, dtype=dtype)
    if dtype in QUANTISED:
        return torch.randint(-96, 96, shape, dtype=torch.int8, device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def made_cache(
    context_lens: Sequence[int],
    model: Dimensions,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int = 16,
) -> tuple[PagedKv, Contexts]:
    """Returns a cache with the scales of its dtype, and sequences of these lengths over shuffled blocks."""
    num_seqs, longest = len(context_lens), max(context_lens)
    max_blocks = triton.cdiv(longest, block_size)
    num_used = [triton.cdiv(length, block_size) for length in context_lens]
    num_blocks = sum(num_used) + 1
    shape = num_blocks, block_size, model.num_kv_heads, model.head_dim
    tables = torch.zeros(num_seqs, max_blocks, dtype=torch.int32, device=device)
    shuffled = torch.randperm(num_blocks - 1, device=device).int() + 1
    for seq, blocks in enumerate(shuffled.split(num_used)):
        tables[seq, : len(blocks)] = blocks
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    scales: list[torch.Tensor] = []
    if dtype in QUANTISED:
        scale_shape, scale_dtype = scales_of(shape, dtype)
        scales = [made(scale_shape, scale_dtype, device).abs_().mul_(0.02) for _ in range(2)]
    stored = (*shape[:3], model.head_dim // 2) if dtype == INT4 else shape
    kv = PagedKv(made(stored, dtype, device), made(stored, dtype, device), *scales)
    return kv, Contexts(tables, lens, longest)


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a cache's dtype in the names of cases."""
    return "int4" if dtype == INT4 else str(dtype).removeprefix("torch.")
