"""Paged decode attention: one query token per sequence against its blocks of KV cache.

Split-KV as in Flash-Decoding (Dao et al., 2023), with ranges of equal length instead of a number of splits
(`kernels.even_split`): each program has a running softmax over its part of a context, and a second kernel
combines the parts of a context by their log-sum-exp. So a long context among short ones delays nothing: with
one sequence of 32k tokens and 63 of 1k in Llama-3.1-8B on an H200, 528 programs read at most 1,504 tokens of
a KV head each; with a program per sequence and KV head, one would read 32,768. The query heads of a KV head
are the rows of one tile (GQA), padded to 16 for the tensor cores, so that each key and value is read once.
The kernel is memory-bound: 4 * head_dim bytes per token and KV head in bf16, for 4 * head_dim * group flops.

It supports sliding windows, attention sinks, ALiBi and soft-capped scores
(`kernels.attention.AttentionOptions`). The last bits of the output depend on where ranges end, so on the
context lengths of the batch.

Shapes: B sequences, T tokens, H query heads, K KV heads, D head_dim, N blocks, P block_size, M largest number
of blocks of a sequence, L tokens of one context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import (
    PLAIN,
    STEP_ARGS,
    AttentionOptions,
    Contexts,
    capped,
    check_caches,
    check_options,
    check_sequences,
    padded,
    shared_split,
    widened,
)
from kernels.attention_models import MODELS, made, made_cache, name_of
from kernels.attention_reference import attend, gather_slots, slots_of
from kernels.case import Case
from kernels.even_split import LOG2E, combine_parts, make_parts, num_ranges_of
from kernels.int4_kv import loaded_int4
from kernels.launch import INTERPRETER, launch, nearest, target
from kernels.paged_kv import INT4, PagedKv, vector_bytes

MAX_GATHERED = 8192  # maximum tokens that the reference gathers at once, padding included


class Tile(NamedTuple):
    """Keys per step of the loop, launch parameters of a program, and programs per multiprocessor.

    The addresses of the keys are loaded, too, which takes two of num_stages: with 5 stages two tiles of keys
    and of values are in flight, with 3 stages one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    resident: int


# By target, then by head_dim: the first key that is at least the head_dim padded to a power of two.
TILES: dict[str, dict[int, Tile]] = {
    "sm_80": {64: Tile(64, 4, 5, 4), 128: Tile(64, 4, 3, 4), 256: Tile(32, 4, 2, 3)},
    "sm_90": {64: Tile(64, 4, 5, 6), 128: Tile(32, 4, 5, 4), 256: Tile(32, 8, 5, 2)},
    "gfx942": {64: Tile(64, 4, 2, 2), 128: Tile(64, 4, 1, 1), 256: Tile(32, 4, 1, 1)},
    INTERPRETER: {256: Tile(32, 4, 1, 1)},
}


def decode_attention(
    q_BHD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    options: AttentionOptions = PLAIN,
    *,
    num_ranges: int | None = None,
    out_BHD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of each sequence's newest token over its context, its own KV included.

    q_BHD: fp32, fp16 or bf16, last dimension contiguous; head_dim a multiple of 16, at most 256. kv: last
    dimensions contiguous. num_ranges: programs per KV head; None: as many as fill the chip. The result is
    out_BHD, or a new tensor if that is None, of q's dtype. Raises ValueError for unsupported arguments.
    """
    tables, lens = contexts.block_tables_BM, contexts.lens_B
    check_caches(q_BHD, kv)
    check_sequences(tables, lens)
    check_options(q_BHD, options)
    num_seqs, num_heads, head_dim = q_BHD.shape
    if tables.shape[0] != num_seqs or lens.shape[0] != num_seqs:
        raise ValueError(
            f"{num_seqs} queries, {tables.shape[0]} block tables and {lens.shape[0]} context lengths: must "
            "be one of each per sequence"
        )
    block_size, num_kv_heads = kv.keys.shape[1:3]
    group = num_heads // num_kv_heads
    block_h = min(max(16, triton.next_power_of_2(group)), 64 if head_dim <= 128 else 32)
    head_tiles = num_kv_heads * triton.cdiv(group, block_h)
    tile = _tile_of(head_dim, q_BHD.dtype)
    num_ranges = num_ranges_of(num_ranges, head_tiles, tile.resident, q_BHD.device)
    split = shared_split(contexts, num_ranges, tile.block_n, options.window)
    parts = make_parts(split, num_heads, head_dim)
    out = torch.empty_like(q_BHD, memory_format=torch.contiguous_format) if out_BHD is None else out_BHD
    launch(
        decode_attention_kernel,
        (num_ranges, head_tiles),
        out,
        *parts,
        split.table,
        q_BHD,
        *kv,
        tables,
        lens,
        options.sinks_H,
        options.alibi_slopes_H,
        options.scale_of(head_dim),
        options.softcap,
        options.window,
        *out.stride()[:2],
        *q_BHD.stride()[:2],
        *kv.keys.stride()[:3],
        *kv.values.stride()[:3],
        tables.stride(0),
        num_seqs,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded(head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    combine_parts(out, parts, split, options.sinks_H)
    return out


def decode_attention_reference(
    q_BHD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    options: AttentionOptions = PLAIN,
    *,
    out_BHD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the reference of `decode_attention` in torch: sequences of similar length together, padded."""
    out = torch.zeros_like(q_BHD) if out_BHD is None else out_BHD.zero_()
    tables_BM, lens_B, window = contexts.block_tables_BM, contexts.lens_B, options.window
    seen = [length if window is None else min(length, window) for length in lens_B.tolist()]
    for group in _by_length(seen):
        # If the group has all sequences, slices avoid index copies, which cost as much as a short context.
        of = slice(None) if len(group) == len(seen) else torch.tensor(group, device=q_BHD.device)
        tokens_BL = torch.arange(seen[group[0]], device=q_BHD.device).unsqueeze(0)
        mask_BTL = distance_BTL = None
        is_padded = seen[group[-1]] < seen[group[0]]
        if is_padded or window is not None or options.alibi_slopes_H is not None:
            last_B1 = lens_B[of].unsqueeze(1) - 1
            if window is not None:
                tokens_BL = tokens_BL + (last_B1 - (window - 1)).clamp(min=0)
            distance_BTL = (tokens_BL - last_B1).unsqueeze(1)
            if is_padded:
                mask_BTL = distance_BTL <= 0
                # Padding reads the last token again, because memory without a token may contain NaN.
                tokens_BL = torch.minimum(tokens_BL, last_B1)
        slots_BL = slots_of(tables_BM[of], tokens_BL, kv.keys.shape[1])
        out[of] = attend(
            q_BHD[of].unsqueeze(1),
            gather_slots(kv.keys, kv.key_scales, slots_BL, q_BHD.dtype),
            gather_slots(kv.values, kv.value_scales, slots_BL, q_BHD.dtype),
            options,
            mask_BTL,
            distance_BTL,
        ).squeeze(1)
    return out


def _tile_of(head_dim: int, dtype: torch.dtype) -> Tile:
    """Returns the launch table's entry for the target and the first head_dim that is large enough."""
    by_head_dim = TILES[nearest(target(), TILES)]
    tile = by_head_dim[min(key for key in by_head_dim if key >= padded(head_dim))]
    if dtype == torch.float32:  # NVIDIA's tensor cores do not support fp32: products need more registers
        tile = tile._replace(block_n=32, num_warps=8)
    return tile


def _by_length(lengths: list[int]) -> list[list[int]]:
    """Groups sequences of similar length (at least half of the group's longest); omits those of length 0."""
    groups: list[list[int]] = []
    longest = 0
    for seq in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not lengths[seq]:
            break
        full = (len(groups[-1]) + 1) * longest > MAX_GATHERED if groups else True
        if full or 2 * lengths[seq] < longest:
            groups.append([])
            longest = lengths[seq]
        groups[-1].append(seq)
    return groups


def cases() -> Iterator[Case]:
    """Yields decode steps of several models, one of them with mixed lengths; block_size 16."""
    bf16 = torch.bfloat16
    for name, num_seqs, context_len, dtype in (
        ("llama_8b", 64, 1024, bf16),
        ("llama_8b", 16, 4096, bf16),
        ("llama_8b", 1, 32768, bf16),
        ("llama_8b", 16, 4096, torch.int8),
        ("llama_8b", 16, 4096, torch.float8_e4m3fn),
        ("llama_8b", 16, 4096, INT4),
        ("smollm2_135m", 8, 256, INT4),
        ("gemma2_9b", 16, 4096, INT4),
        ("phi3_mini", 16, 2048, INT4),
        ("qwen3_0.6b", 256, 512, bf16),
        ("smollm2_135m", 8, 256, bf16),
        ("mistral_7b", 16, 8192, bf16),
        ("gpt_oss_20b", 16, 4096, bf16),
        ("gemma2_9b", 16, 4096, bf16),
        ("mpt_7b", 16, 2048, bf16),
        ("phi3_mini", 16, 2048, bf16),
        ("falcon_7b", 16, 2048, bf16),
    ):
        yield decode_case(name, f"batch{num_seqs}-context{context_len}", [context_len] * num_seqs, dtype)
    yield decode_case("llama_8b", "batch64-mixed", [32768] + [1024] * 63, bf16)


def decode_case(model_name: str, name: str, lens: list[int], dtype: torch.dtype) -> Case:
    """Returns the case of sequences with contexts of these lengths."""
    model = MODELS[model_name]
    seen = sum(min(length, model.window or length) for length in lens)

    def make(device: torch.device) -> Callable[[], object]:
        kv, contexts = made_cache(lens, model, dtype, device)
        q = made((len(lens), model.num_heads, model.head_dim), torch.bfloat16, device)
        options = model.options(device)
        return lambda: decode_attention(q, kv, contexts, options)

    kv_bytes = 2 * seen * model.num_kv_heads * vector_bytes(model.head_dim, dtype)
    return Case(
        f"{model_name}-{name_of(dtype)}-{name}",
        make,
        bytes_moved=kv_bytes + 4 * len(lens) * model.num_heads * model.head_dim,
        flops=4 * seen * model.num_heads * model.head_dim,
    )


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def decode_attention_kernel(  # noqa: C901, PLR0912, PLR0915  a Triton kernel is one function
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    context_lens_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    scale,
    softcap,
    window,
    stride_ob,
    stride_oh,
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kp,
    stride_kk,
    stride_vn,
    stride_vp,
    stride_vk,
    stride_tb,
    num_units,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Computes the parts of one range; grid: ranges, KV heads times tiles of their query heads."""
    index = tl.program_id(0)
    num_ranges = tl.num_programs(0)
    tiles_per_group: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // tiles_per_group
    row = (tl.program_id(1) % tiles_per_group) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + row
    head_ok = row < GROUP
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    row_ok = head_ok[:, None] & d_ok[None, :]
    is_int4: tl.constexpr = key_ptr.dtype.element_ty == tl.uint8
    has_factors: tl.constexpr = key_scales_ptr is not None and not is_int4
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + head, mask=head_ok, other=0.0) * LOG2E

    size = tl.load(table_ptr + num_units + 1 + num_ranges)
    begin = index * size
    at = begin
    end = tl.minimum(begin + size, tl.load(table_ptr + num_units))
    seq = tl.load(table_ptr + num_units + 1 + index)
    while at < end:
        seq_start = tl.load(table_ptr + seq)
        seq_end = tl.load(table_ptr + seq + 1)
        stop = tl.minimum(end, seq_end)
        length = tl.load(context_lens_ptr + seq)
        start = 0
        if window is not None:
            start = tl.maximum(length - window, 0)
        first_tile = start // BLOCK_N - seq_start
        lo = (first_tile + at) * BLOCK_N
        hi = tl.minimum((first_tile + stop) * BLOCK_N, length)
        q_at = q_ptr + seq.to(tl.int64) * stride_qb
        q = tl.load(q_at + head[:, None] * stride_qh + d[None, :], mask=row_ok, other=0.0)
        top = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        blocks_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
        for first in tl.range(lo, hi, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            seen = n < hi
            if window is not None:
                seen = seen & (n >= start)
            block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
            kv_ok = seen[:, None] if HEAD_DIM == BLOCK_D else seen[:, None] & d_ok[None, :]
            key_row = block * stride_kn + (n % BLOCK_SIZE) * stride_kp + kv_head * stride_kk
            scale_row = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
            if is_int4:
                k = loaded_int4(key_ptr, key_scales_ptr, key_row, scale_row, seen, q.dtype, HEAD_DIM, BLOCK_D)
            else:
                k = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=kv_ok, other=0.0)
            scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee") * scale
            if has_factors:
                scores *= tl.load(key_scales_ptr + scale_row, mask=seen, other=0.0)[None, :]
            scores = capped(scores, softcap) if softcap is not None else scores * LOG2E
            if alibi_slopes_ptr is not None:
                scores += slope[:, None] * (n - length + 1).to(tl.float32)[None, :]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            top = new_top
            if has_factors:
                p *= tl.load(value_scales_ptr + scale_row, mask=seen, other=0.0)[None, :]
            value_row = block * stride_vn + (n % BLOCK_SIZE) * stride_vp + kv_head * stride_vk
            if is_int4:
                v = loaded_int4(
                    value_ptr, value_scales_ptr, value_row, scale_row, seen, q.dtype, HEAD_DIM, BLOCK_D
                )
            else:
                v = tl.load(value_ptr + value_row[:, None] + d[None, :], mask=kv_ok, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(q.dtype), widened(v, q.dtype), acc, input_precision="ieee")

        if (at == seq_start) & (stop == seq_end):
            if sinks_ptr is not None:
                sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * LOG2E
                new_top = tl.maximum(top, sink)
                acc = acc * tl.exp2(top - new_top)[:, None]
                total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            out_row = seq.to(tl.int64) * stride_ob + head * stride_oh
            tl.store(out_ptr + out_row[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_ok)
        else:
            part_row = (2 * index + (at > begin).to(tl.int32)) * (NUM_KV_HEADS * GROUP) + head
            tl.store(part_lse_ptr + part_row, top + tl.log2(total), mask=head_ok)
            tl.store(part_ptr + part_row[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=row_ok)
        at = stop
        seq += 1
