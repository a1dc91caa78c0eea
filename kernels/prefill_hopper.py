"""Paged prefill attention for Hopper: tiles arrive by TMA, and two groups of warps share a tile of queries.

The same results as `kernels.prefill_attention`, for long chunks of half-precision queries. A program has
three groups of four warps: one issues the copies of keys and values, and each of the others computes half of
a tile's rows, so that one computes softmax while the other multiplies (as in FlashAttention-3, Shah et al.,
2024). The tiles of all sequences and heads are dealt to as many programs as multiprocessors, those with most
keys first; few tiles are left to the chip's scheduler. A tile has queries of one head, because a descriptor's
rows are equally far apart.

TMA copies boxes: a tile of keys lies in one block of the cache if block_size is a multiple of the tile.
Otherwise the context of the chunks is copied to consecutive rows first, dequantised if need be. The copy
moves each key once, attention reads it for every tile of queries: for Llama-3.1-8B's heads it takes
75 / (queries of the chunk) of the time of attention, at 4 TB/s and 600 TFLOP/s (computed, not measured).

In blocks of the cache, slots behind a sequence's last token have weight 0, but must be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention import PLAIN, AttentionOptions, Contexts
from kernels.attention_models import MODELS, Dimensions, made, made_cache, name_of, prefill_work
from kernels.case import Case
from kernels.even_split import even_split
from kernels.launch import INTERPRETER, launch, sm_count, target
from kernels.paged_kv import INT4, PagedKv
from kernels.prefill_attention import Chunks, check_chunks
from kernels.prefill_hopper_kernels import gather_context_kernel, prefill_hopper_kernel, schedule_kernel

HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
MIN_QUERIES = 512
"""Queries of the longest chunk from which on the copy of the context takes at most a seventh of the time."""
MIN_ROUNDS = 6
"""Tiles of a program from which on dealing them is even: within 3 % for a prompt of 4k tokens, 32 heads."""
DENSE_BYTES = 1 << 29
"""Most memory for the copied keys and values of a layer; the memory plan of the engine reserves it."""


class Tile(NamedTuple):
    """Queries and keys of a tile, and the launch parameters of its program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    specialised: bool
    """Whether warps are specialised: then num_warps is that of a group, and there are three groups."""


SPECIALISED = {64: Tile(128, 128, 4, 2, True), 128: Tile(128, 128, 4, 2, True)}
PLAIN_WARPS = {64: Tile(128, 64, 8, 3, False), 128: Tile(128, 64, 8, 3, False)}
INTERPRETED = Tile(32, 32, 4, 1, False)


def unsupported(
    q_THD: torch.Tensor, kv: PagedKv, contexts: Contexts, chunks: Chunks, options: AttentionOptions = PLAIN
) -> str | None:
    """Returns why these arguments are not supported, in a few words; None: they are."""
    head_dim, num_seqs = q_THD.shape[2], len(contexts.lens_B)
    interpreted = target() == INTERPRETER
    checks = (
        (target() in ("sm_90", INTERPRETER), f"chip {target()}"),
        (q_THD.dtype in HALVES or interpreted, f"queries of {q_THD.dtype}"),
        (head_dim in HEAD_DIMS or interpreted, f"head_dim {head_dim}"),
        (options.alibi_slopes_H is None, "ALiBi"),
        (q_THD.stride(1) == head_dim and q_THD.stride(0) * q_THD.itemsize % 16 == 0, "strided queries"),
        (chunks.max_len >= MIN_QUERIES or interpreted, f"chunks of fewer than {MIN_QUERIES} queries"),
    )
    for holds, reason in checks:
        if not holds:
            return reason
    tile = _tile(head_dim, kv, options, specialised=True)
    if _lies_in_blocks(kv, tile.block_n, options):
        return None
    rows = num_seqs * triton.cdiv(contexts.max_len, tile.block_n) * tile.block_n
    num_bytes = 2 * rows * kv.keys.shape[2] * head_dim * q_THD.itemsize
    return f"contexts of more than {DENSE_BYTES >> 20} MiB" if num_bytes > DENSE_BYTES else None


def prefill_hopper(
    q_THD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    chunks: Chunks,
    options: AttentionOptions = PLAIN,
    *,
    out_THD: torch.Tensor | None = None,
    specialised: bool = True,
) -> torch.Tensor:
    """Returns what `prefill_attention` returns. specialised: whether groups of warps copy and compute.

    Raises ValueError for arguments that `unsupported` names.
    """
    tables, lens, starts = contexts.block_tables_BM, contexts.lens_B, chunks.start_loc
    check_chunks(q_THD, kv, contexts, chunks, options)
    reason = unsupported(q_THD, kv, contexts, chunks, options)
    if reason is not None:
        raise ValueError(f"{reason}: not supported by prefill_hopper; use prefill_attention")
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv.keys.shape[2]
    tile = _tile(head_dim, kv, options, specialised=specialised)
    in_blocks = _lies_in_blocks(kv, tile.block_n, options)
    num_units = num_tokens // tile.block_m + len(lens)
    schedule = schedule_of(contexts, chunks, options, tile, num_units)
    rows_per_seq = triton.cdiv(contexts.max_len, tile.block_n) * tile.block_n
    keys, values = kv[:2] if in_blocks else _gathered(q_THD, kv, contexts, chunks, options, tile)
    described = [
        TensorDescriptor(
            cache,
            [keys.shape[0] * keys.shape[1], num_kv_heads * head_dim],
            [cache.stride(1), 1],
            [tile.block_n, head_dim],
        )
        for cache in (keys, values)
    ]
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
    if q_THD.is_cuda:
        triton.set_allocator(_scratch)
    num_items, num_programs = num_units * num_heads, sm_count(q_THD.device)
    launch(
        prefill_hopper_kernel,
        (num_items if num_items < MIN_ROUNDS * num_programs else num_programs,),
        out,
        q_THD,
        *described,
        schedule,
        tables,
        starts,
        lens,
        options.sinks_H,
        options.scale_of(head_dim),
        options.softcap,
        options.window,
        num_units,
        num_tokens,
        rows_per_seq,
        *out.stride()[:2],
        q_THD.stride(0),
        tables.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv.keys.shape[1] if in_blocks else 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPECIALISED=tile.specialised,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _tile(head_dim: int, kv: PagedKv, options: AttentionOptions, *, specialised: bool) -> Tile:
    """Returns the tile of a head size; keys of a tile are no more than those of a block of 64."""
    if target() == INTERPRETER:
        return INTERPRETED
    tile = (SPECIALISED if specialised else PLAIN_WARPS)[head_dim]
    smaller = tile._replace(block_n=64)
    return smaller if kv.keys.shape[1] == 64 and _lies_in_blocks(kv, 64, options) else tile


def _lies_in_blocks(kv: PagedKv, block_n: int, options: AttentionOptions) -> bool:
    """Returns whether each tile of keys is consecutive rows of the cache, from which TMA can read it."""
    block_size, _, head_dim = kv.keys.shape[1:]
    return (
        kv.key_scales is None
        and options.window is None  # blocks before a window may hold anything
        and block_size % block_n == 0
        and all(
            cache.stride(2) == head_dim
            and cache.stride(0) == block_size * cache.stride(1)
            and cache.stride(1) * cache.itemsize % 16 == 0
            for cache in (kv.keys, kv.values)
        )
    )


def schedule_of(
    contexts: Contexts, chunks: Chunks, options: AttentionOptions, tile: Tile, num_units: int
) -> torch.Tensor:
    """Returns sequence and first query of every unit, int32 [U, 2], longest first; layers share it."""
    shared = {} if contexts.splits is None else contexts.splits
    key = "schedule", tile.block_m, tile.block_n, options.window
    if key not in shared:
        num_seqs, starts = len(contexts.lens_B), chunks.start_loc
        split = even_split(
            contexts.lens_B,
            1,
            tile.block_n,
            options.window,
            query_start_loc=starts,
            block_q=tile.block_m,
            num_units=num_units,
        )
        schedule = torch.empty(num_units, 2, dtype=torch.int32, device=starts.device)
        block = 64
        launch(
            schedule_kernel,
            (triton.cdiv(num_units, block),),
            schedule,
            split.table,
            starts,
            num_seqs,
            num_units,
            num_seqs.bit_length(),
            BLOCK_Q=tile.block_m,
            BLOCK=block,
            num_warps=4,
        )
        shared[key] = schedule
    found: torch.Tensor = shared[key]
    return found


def _gathered(
    q_THD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    chunks: Chunks,
    options: AttentionOptions,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values of the contexts in consecutive rows, [B, rows of a sequence, K, D] each."""
    block_size, num_kv_heads = kv.keys.shape[1:3]
    head_dim = kv.head_dim
    num_tiles, num_seqs = triton.cdiv(contexts.max_len, tile.block_n), len(contexts.lens_B)
    shape = num_seqs, num_tiles * tile.block_n, num_kv_heads, head_dim
    keys, values = q_THD.new_empty(shape), q_THD.new_empty(shape)
    launch(
        gather_context_kernel,
        (num_tiles, num_seqs, num_kv_heads),
        keys,
        values,
        *kv,
        contexts.block_tables_BM,
        chunks.start_loc,
        contexts.lens_B,
        options.window,
        shape[1],
        *kv.keys.stride()[:3],
        *kv.values.stride()[:3],
        contexts.block_tables_BM.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_N=tile.block_n,
        num_warps=8,
    )
    return keys, values


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Allocates the memory in which a kernel makes its descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def cases() -> Iterator[Case]:
    """Yields long chunks of several models, over blocks of 16 (copied first), 64 and 128 tokens."""
    bf16 = torch.bfloat16
    for name, num_seqs, query_len, context_len, dtype, block_size in (
        ("llama_8b", 1, 8192, 8192, bf16, 16),
        ("llama_8b", 1, 8192, 8192, bf16, 64),
        ("llama_8b", 1, 8192, 8192, bf16, 128),
        ("llama_8b", 4, 512, 4096, bf16, 16),
        ("llama_8b", 2, 2048, 2048, torch.int8, 16),
        ("llama_8b", 2, 2048, 2048, torch.float8_e4m3fn, 16),
        ("llama_8b", 2, 2048, 2048, INT4, 16),
        ("mistral_7b", 1, 8192, 8192, bf16, 16),
        ("gpt_oss_20b", 1, 4096, 4096, bf16, 16),
        ("falcon_7b", 1, 2048, 2048, bf16, 16),
    ):
        for specialised in (True, False):
            yield hopper_case(
                name, num_seqs, query_len, context_len, dtype, block_size, specialised=specialised
            )


def hopper_case(
    name: str,
    num_seqs: int,
    query_len: int,
    context_len: int,
    dtype: torch.dtype,
    block_size: int,
    *,
    specialised: bool = True,
) -> Case:
    """Returns the case of sequences with chunks and contexts of these lengths."""
    model = MODELS[name]
    return Case(
        f"{name}-{name_of(dtype)}-batch{num_seqs}-{query_len}of{context_len}"
        f"-blocks{block_size}" + ("" if specialised else "-plain"),
        _make(model, num_seqs, query_len, context_len, dtype, block_size, specialised),
        *prefill_work(model, num_seqs, query_len, context_len, dtype),
    )


def _make(
    model: Dimensions,
    num_seqs: int,
    query_len: int,
    context_len: int,
    dtype: torch.dtype,
    block_size: int,
    specialised: bool,
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        kv, contexts = made_cache([context_len] * num_seqs, model, dtype, device, block_size)
        q = made((num_seqs * query_len, model.num_heads, model.head_dim), torch.bfloat16, device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        chunks, options = Chunks(starts, query_len), model.options(device)
        return lambda: prefill_hopper(q, kv, contexts, chunks, options, specialised=specialised)

    return make
