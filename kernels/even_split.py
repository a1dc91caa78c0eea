"""Even split of a step's attention: every program reads as many keys, however the context lengths differ.

The key tiles of all rows of a step lie one after another, and each program has an equal range of them, as in
stream-K (Osama et al., PPoPP 2023; for attention LeanAttention, Sanovar et al., 2024): a long context among
short ones is read by many programs, and a program may read several short ones. The number of programs is
fixed by the chip, and the ranges follow from the lengths on the device, so a CUDA graph serves all lengths. A
row's tiles in one range are a part; `combine_parts` combines the parts of rows that have several by their
log-sum-exp.

A unit is what a program computes at once: a sequence in decode, a tile of queries in prefill. The split is
one int32 tensor, made once per step: the first tile of each of U units and the end [U + 1], the first unit of
each of G ranges [G], and the tiles per range [1].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, sm_count, target

LOG2E = tl.constexpr(1.4426950408889634)
MIN_RANGE_TOKENS = 64
"""Keys of a range, at least. On an H200, a decode of 512 tokens takes 9.1 us with 64, 16.5 us with 256."""
STEP_ARGS = ["context_lens_ptr", "query_start_loc_ptr", "num_before"]
STEP_ARGS += ["num_units", "num_ranges", "num_seqs", "num_steps"]
MAX_RANGES = 2048
BLOCK_UNITS = 512


class EvenSplit(NamedTuple):
    """Ranges of a step's key tiles, one per program of a KV head."""

    table: torch.Tensor
    """int32 [U + G + 2], see the module."""
    num_units: int
    num_ranges: int


def even_split(
    lens_B: torch.Tensor,
    num_ranges: int,
    block_n: int,
    window: int | None,
    *,
    query_start_loc: torch.Tensor | None = None,
    block_q: int = 1,
    num_units: int | None = None,
    is_tree: bool = False,
    num_before: int = 0,
) -> EvenSplit:
    """Splits the key tiles of B sequences evenly into num_ranges ranges, on the device.

    lens_B: context lengths, int32. block_n: keys of a tile. window: keys that a token sees. For chunks of
    queries, query_start_loc [B + 1] has the first token of each, block_q the tokens of a unit, num_units the
    number of units; is_tree: each query may see all keys of its chunk, and of num_before tokens before it.
    """
    num_seqs = len(lens_B)
    num_units = num_seqs if num_units is None else num_units
    table = torch.empty(num_units + num_ranges + 2, dtype=torch.int32, device=lens_B.device)
    launch(
        even_split_kernel,
        (1,),
        table,
        lens_B,
        query_start_loc,
        num_before,
        window,
        num_seqs,
        num_units,
        num_ranges,
        max(num_units, num_seqs).bit_length(),
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        MIN_TILES=1 if target() == INTERPRETER else max(1, MIN_RANGE_TOKENS // block_n),
        IS_TREE=is_tree,
        BLOCK=min(BLOCK_UNITS, max(16, triton.next_power_of_2(max(num_units, num_ranges)))),
        num_warps=4,
    )
    return EvenSplit(table, num_units, num_ranges)


def num_ranges_of(given: int | None, head_tiles: int, resident: int, device: torch.device) -> int:
    """Returns the given number of ranges, or that with which the programs of all head tiles fill the chip.

    resident: programs that a multiprocessor runs at once. Raises ValueError unless 1 <= given <= MAX_RANGES.
    """
    if given is None:
        return max(1, min(MAX_RANGES, sm_count(device) * resident // head_tiles))
    if not 1 <= given <= MAX_RANGES:
        raise ValueError(f"num_ranges of {given}: must be 1 to {MAX_RANGES}")
    return given


class Parts(NamedTuple):
    """Outputs of parts: two per range, of the unit that it continues and of its last one."""

    out: torch.Tensor
    """fp32 [2 G, rows of a unit, D]."""
    lse: torch.Tensor
    """Log2-sum-exps, fp32 [2 G, rows of a unit]; -inf: no key was visible."""


def make_parts(split: EvenSplit, rows_per_unit: int, value_dim: int) -> Parts:
    """Returns the buffers for the parts of a step."""
    device, num_parts = split.table.device, 2 * split.num_ranges
    out = torch.empty(num_parts, rows_per_unit, value_dim, dtype=torch.float32, device=device)
    return Parts(out, torch.empty(num_parts, rows_per_unit, dtype=torch.float32, device=device))


def combine_parts(
    out_THD: torch.Tensor,
    parts: Parts,
    split: EvenSplit,
    sinks_H: torch.Tensor | None = None,
    *,
    query_start_loc: torch.Tensor | None = None,
    block_q: int = 1,
) -> None:
    """Writes the rows of units with several parts to out_THD: parts weighted by their softmax, and sinks."""
    num_heads, value_dim = out_THD.shape[1:]
    rows_per_unit = block_q * num_heads
    # Most units of a step have one part, and their programs end at once: with many rows, few programs.
    rows_per_program = 1 if block_q == 1 else 8
    launch(
        combine_parts_kernel,
        (split.num_units, triton.cdiv(rows_per_unit, rows_per_program)),
        out_THD,
        *parts,
        split.table,
        sinks_H,
        query_start_loc,
        *out_THD.stride()[:2],
        0 if query_start_loc is None else len(query_start_loc) - 1,
        num_heads,
        split.num_units,
        split.num_ranges,
        BLOCK_Q=block_q,
        ROWS=rows_per_program,
        VALUE_DIM=value_dim,
        BLOCK_D=triton.next_power_of_2(value_dim),
        BLOCK_S=min(64, 4096 // triton.next_power_of_2(value_dim)),
        num_warps=4,
        num_stages=1,
    )


@triton.jit
def sequence_of(starts_ptr, tile, num_seqs, size):
    """Returns the sequence of a tile; sequence b's tiles start at starts[b] // size + b."""
    left = 0
    right = num_seqs
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(starts_ptr + middle) // size + middle <= tile:
            left = middle
        else:
            right = middle
    return left


@triton.jit
def sequences_of(starts_ptr, tiles, num_seqs, num_steps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sequences of BLOCK tiles; num_steps: steps of the binary search."""
    left = tl.zeros([BLOCK], tl.int32)
    right = tl.zeros([BLOCK], tl.int32) + num_seqs
    for _ in range(num_steps):
        middle = (left + right) // 2
        inside = right - left > 1
        at = tl.load(starts_ptr + middle, mask=inside, other=0) // SIZE + middle
        left = tl.where(inside & (at <= tiles), middle, left)
        right = tl.where(inside & (at > tiles), middle, right)
    return left


@triton.jit
def tiles_of_queries(
    first_query,
    num_queries,
    length,
    num_before,
    window,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_TREE: tl.constexpr,
):
    """Returns the first key tile that a tile of queries sees, and the number of its key tiles, at least 1.

    num_before: tokens before the chunk that the mask of a tree covers, too.
    """
    prefix = length - num_queries
    first_pos = prefix - num_before if IS_TREE else prefix + first_query
    end = length if IS_TREE else prefix + tl.minimum(first_query + BLOCK_Q, num_queries)
    first_tile = 0 * first_pos
    if window is not None:
        first_tile = tl.maximum(first_pos - window + 1, 0) // BLOCK_N
    return first_tile, tl.maximum(tl.cdiv(end, BLOCK_N) - first_tile, 1)


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def even_split_kernel(
    table_ptr,
    context_lens_ptr,
    query_start_loc_ptr,
    num_before,
    window,
    num_seqs,
    num_units,
    num_ranges,
    num_steps,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    IS_TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the table of a split. num_steps: steps of binary searches over sequences and units."""
    total = 0
    tl.store(table_ptr, total)
    for first in range(0, num_units, BLOCK):
        unit = first + tl.arange(0, BLOCK)
        there = unit < num_units
        if query_start_loc_ptr is None:
            seq = unit
            num_queries = 1
            first_query = 0
        else:
            seq = sequences_of(query_start_loc_ptr, unit, num_seqs, num_steps, BLOCK_Q, BLOCK)
            chunk_start = tl.load(query_start_loc_ptr + seq, mask=there, other=0)
            num_queries = tl.load(query_start_loc_ptr + seq + 1, mask=there, other=0) - chunk_start
            first_query = (unit - chunk_start // BLOCK_Q - seq) * BLOCK_Q
        length = tl.load(context_lens_ptr + seq, mask=there, other=0)
        _, tiles = tiles_of_queries(
            first_query, num_queries, length, num_before, window, BLOCK_Q, BLOCK_N, IS_TREE
        )
        tiles = tl.where(there, tl.where(first_query < num_queries, tiles, 1), 0)
        tl.store(table_ptr + 1 + unit, total + tl.cumsum(tiles), mask=there)
        total += tl.sum(tiles)
    size = tl.maximum(tl.cdiv(total, num_ranges), MIN_TILES)
    tl.store(table_ptr + num_units + 1 + num_ranges, size)
    tl.debug_barrier()  # the searches read what other threads have written
    for first in range(0, num_ranges, BLOCK):
        index = first + tl.arange(0, BLOCK)
        start = tl.minimum(index * size, total)
        left = tl.zeros([BLOCK], tl.int32)
        right = tl.zeros([BLOCK], tl.int32) + num_units + 1
        for _ in range(num_steps + 1):
            middle = (left + right) // 2
            inside = right - left > 1
            at = tl.load(table_ptr + middle, mask=inside, other=0)
            left = tl.where(inside & (at <= start), middle, left)
            right = tl.where(inside & (at > start), middle, right)
        tl.store(table_ptr + num_units + 1 + index, left, mask=index < num_ranges)


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def combine_parts_kernel(
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    sinks_ptr,
    query_start_loc_ptr,
    stride_ot,
    stride_oh,
    num_seqs,
    num_heads,
    num_units,
    num_ranges,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Combines the parts of ROWS rows of a unit; grid: units, blocks of rows (tokens times heads)."""
    unit = tl.program_id(0)
    start = tl.load(table_ptr + unit)
    end = tl.load(table_ptr + unit + 1)
    size = tl.load(table_ptr + num_units + 1 + num_ranges)
    first = start // size
    last = (end - 1) // size
    if first == last:
        return
    first_token = unit
    num_rows = num_heads
    if query_start_loc_ptr is not None:
        seq = sequence_of(query_start_loc_ptr, unit, num_seqs, BLOCK_Q)
        chunk_start = tl.load(query_start_loc_ptr + seq)
        first_query = (unit - chunk_start // BLOCK_Q - seq) * BLOCK_Q
        first_token = chunk_start + first_query
        num_queries = tl.load(query_start_loc_ptr + seq + 1) - chunk_start
        num_rows = num_heads * tl.minimum(num_queries - first_query, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    for place in range(ROWS):
        row = tl.program_id(1) * ROWS + place
        if row < num_rows:
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([BLOCK_D], tl.float32)
            if sinks_ptr is not None:
                top = tl.load(sinks_ptr + row % num_heads) * LOG2E
                total = 1.0
            for first_part in range(first, last + 1, BLOCK_S):
                index = first_part + tl.arange(0, BLOCK_S)
                # A range's second part is the last one, which does not begin with the range.
                part = 2 * index + ((index == first) & (start > first * size)).to(tl.int32)
                at = part.to(tl.int64) * (num_heads * BLOCK_Q) + row
                lse = tl.load(part_lse_ptr + at, mask=index <= last, other=float("-inf"))
                new_top = tl.maximum(top, tl.max(lse, 0))
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                share = tl.exp2(lse - base)
                shrink = tl.exp2(top - base)
                used = (lse > float("-inf"))[:, None] & (d < VALUE_DIM)[None, :]
                value = tl.load(part_ptr + at[:, None] * VALUE_DIM + d[None, :], mask=used, other=0.0)
                acc = acc * shrink + tl.sum(value * share[:, None], 0)
                total = total * shrink + tl.sum(share, 0)
                top = new_top
            token = (first_token + row // num_heads).to(tl.int64)
            out = acc / tl.where(total > 0, total, 1.0)
            out_row = token * stride_ot + (row % num_heads) * stride_oh
            tl.store(out_ptr + out_row + d, out.to(out_ptr.dtype.element_ty), mask=d < VALUE_DIM)
