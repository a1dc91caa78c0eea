"""Paged prefill attention: packed chunks of queries over their cached prefix and themselves.

This is FlashAttention-2's tiling (Dao, 2023) over a paged cache. The rows of a tile are BLOCK_M // group
tokens times the query heads of one KV head, so that few tokens also fill a tile: a decode, or the drafts of a
speculative step. The tiles of all sequences are one grid dimension, and a program finds its sequence by a
binary search over query_start_loc, so the host need not read the lengths. Key tiles that are visible to all
rows use a loop without masks; only the diagonal and the edge of the window use masks. The kernel is
compute-bound: 4 * head_dim flops per head and visible (query, key) pair. With few queries per sequence, such
as those that verify drafts, it is memory-bound, and the contexts are split evenly over programs as in decode.

A tree mask [q, q] per sequence replaces the causal mask within the chunk: drafts of tree speculation
(SpecInfer, 2024). It may cover b tokens before the chunk, too: [q, b + q]. With a window or ALiBi it needs
positions, which branches share. Options and shapes are those of `kernels.attention`; T tokens of all chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kernels.attention import (
    PLAIN,
    AttentionOptions,
    Contexts,
    check_caches,
    check_options,
    check_sequences,
    padded,
    shared_split,
)
from kernels.attention_models import MODELS, made, made_cache, name_of, prefill_work
from kernels.attention_reference import attend, gather_tokens
from kernels.case import Case
from kernels.decode_attention import decode_attention_reference
from kernels.even_split import MIN_RANGE_TOKENS, combine_parts, make_parts, num_ranges_of
from kernels.launch import INTERPRETER, launch, nearest, sm_count, target
from kernels.paged_kv import INT4, PagedKv
from kernels.prefill_attention_kernels import prefill_attention_kernel

RESIDENT = 2  # programs of a multiprocessor between which contexts are split


class Tile(NamedTuple):
    """Rows (tokens times heads of a group) and keys of a tile, and launch parameters of its program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By target, then by head_dim: the first key that is at least the head_dim padded to a power of two. Of its
# tiles, the first with at least the rows of the longest chunk, or the last.
TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_80": {
        64: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(16, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 64, 8, 2)),
        256: (Tile(16, 32, 4, 3), Tile(64, 32, 8, 3)),
    },
    "sm_90": {
        64: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 3)),
        256: (Tile(16, 32, 4, 3), Tile(64, 32, 8, 3)),
    },
    "gfx942": {
        64: (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(128, 64, 4, 1)),
        128: (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(128, 32, 4, 1)),
        256: (Tile(16, 32, 4, 1), Tile(64, 32, 4, 1)),
    },
    INTERPRETER: {256: (Tile(16, 32, 4, 1), Tile(32, 32, 4, 1))},
}


class Chunks(NamedTuple):
    """Queries of a step.

    Rows start_loc[b] to start_loc[b + 1] are sequence b's, the last tokens of its context.
    """

    start_loc: torch.Tensor
    """First row of each sequence, and the end: int32 [B + 1], on the device."""
    max_len: int
    """Longest chunk, or its bucket, known to the host; it selects tiles, so an estimate suffices."""


class DraftTree(NamedTuple):
    """Tree of draft tokens: a mask instead of the causal one over the last m = num_before + q tokens."""

    mask: torch.Tensor
    """bool; at mask_start[b] + i * m + j: whether query i of sequence b's q sees key j of its m last ones."""
    mask_start_B: torch.Tensor
    """First element of each sequence in the flat mask, int32."""
    positions_T: torch.Tensor | None = None
    """Absolute positions of the m tokens of each sequence, int32; needed with a window or ALiBi."""
    num_before: int = 0
    """Tokens before each chunk that the mask covers, too."""


def prefill_attention(
    q_THD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    chunks: Chunks,
    options: AttentionOptions = PLAIN,
    *,
    tree: DraftTree | None = None,
    num_ranges: int | None = None,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns causal attention of each sequence's newest tokens over its context; their KV is in the cache.

    Rows that belong to no sequence are not written. num_ranges: programs per KV head between which contexts
    are split; None: as many as fill the chip if there are few queries, else contexts are not split. Other
    arguments: see decode_attention. Raises ValueError for unsupported arguments.
    """
    tables, lens, starts = contexts.block_tables_BM, contexts.lens_B, chunks.start_loc
    num_seqs = lens.shape[0]
    check_chunks(q_THD, kv, contexts, chunks, options)
    if tree is not None:
        _check_tree(tree, options)
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = kv.keys.shape[1:3]
    group = num_heads // num_kv_heads
    tile = _tile_for(q_THD, kv, chunks, options, tree)
    tokens_per_tile = tile.block_m // group
    num_units = num_tokens // tokens_per_tile + num_seqs
    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
    arguments = (
        q_THD,
        *kv,
        tables,
        starts,
        lens,
        options.sinks_H,
        options.alibi_slopes_H,
        None if tree is None else tree.mask.view(torch.uint8),
        None if tree is None else tree.mask_start_B,
        tree.positions_T if tree is not None and _needs_positions(options) else None,
        0 if tree is None else tree.num_before,
        options.scale_of(head_dim),
        options.softcap,
        options.window,
        num_seqs,
        num_units,
    )
    cache_strides = *kv.keys.stride()[:3], *kv.values.stride()[:3], tables.stride(0)
    strides = *out.stride()[:2], *q_THD.stride()[:2], *cache_strides
    meta = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_Q": tokens_per_tile,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": padded(head_dim),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    few = num_units * num_kv_heads < sm_count(q_THD.device) or chunks.max_len <= tokens_per_tile
    if num_ranges is None and not (few and contexts.max_len > MIN_RANGE_TOKENS):
        grid = num_units, num_kv_heads
        launch(prefill_attention_kernel, grid, out, None, None, None, *arguments, *strides, **meta)
        return out
    num_ranges = num_ranges_of(num_ranges, num_kv_heads, RESIDENT, q_THD.device)
    of_chunks = {"query_start_loc": starts, "block_q": tokens_per_tile}
    split = shared_split(
        contexts,
        num_ranges,
        tile.block_n,
        options.window,
        num_units=num_units,
        is_tree=tree is not None,
        num_before=0 if tree is None else tree.num_before,
        **of_chunks,
    )
    parts = make_parts(split, tokens_per_tile * num_heads, head_dim)
    grid = num_ranges, num_kv_heads
    launch(prefill_attention_kernel, grid, out, *parts, split.table, *arguments, *strides, **meta)
    combine_parts(out, parts, split, options.sinks_H, **of_chunks)
    return out


def prefill_attention_reference(
    q_THD: torch.Tensor,
    kv: PagedKv,
    contexts: Contexts,
    chunks: Chunks,
    options: AttentionOptions = PLAIN,
    *,
    tree: DraftTree | None = None,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the reference of `prefill_attention` in torch; sequences with one query as a batch."""
    out = torch.zeros_like(q_THD) if out_THD is None else out_THD
    starts, lengths = chunks.start_loc.tolist(), contexts.lens_B.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    single = [seq for seq, count in enumerate(counts) if count == 1] if tree is None else []
    if single:
        seqs = torch.tensor(single, device=q_THD.device)
        rows = chunks.start_loc[seqs].long()
        alone = Contexts(contexts.block_tables_BM[seqs], contexts.lens_B[seqs], contexts.max_len)
        out[rows] = decode_attention_reference(q_THD[rows], kv, alone, options)
    for seq, (length, num_queries) in enumerate(zip(lengths, counts, strict=True)):
        if num_queries == 0 or (num_queries == 1 and tree is None):
            continue
        tokens = slice(starts[seq], starts[seq + 1])
        prefix = length - num_queries - (0 if tree is None else tree.num_before)
        first = 0 if options.window is None else max(0, prefix - options.window + 1)
        if tree is not None and not _needs_positions(options):
            mask, distance = _seen_in_tree(seq, num_queries, length, tree, q_THD.device), None
        else:
            mask, distance = _seen(seq, tokens, first, length, tree, options.window, q_THD.device)
        table = contexts.block_tables_BM[seq]
        keys = gather_tokens(kv.keys, kv.key_scales, table, first, length, q_THD.dtype)
        values = gather_tokens(kv.values, kv.value_scales, table, first, length, q_THD.dtype)
        seen = mask[None], None if distance is None else distance[None]
        out[tokens] = attend(q_THD[None, tokens], keys[None], values[None], options, *seen)[0]
    return out


def _seen_in_tree(
    seq: int, num_queries: int, length: int, tree: DraftTree, device: torch.device
) -> torch.Tensor:
    """Returns the mask of keys that the queries of a tree see, [T, L]: all before it, and their ancestors."""
    num_masked = num_queries + tree.num_before
    mask = torch.ones(num_queries, length, dtype=torch.bool, device=device)
    of_tree = tree.mask.flatten()[int(tree.mask_start_B[seq]) :][: num_queries * num_masked]
    mask[:, length - num_masked :] = of_tree.view(num_queries, num_masked)
    return mask


def _seen(
    seq: int,
    tokens: slice,
    first: int,
    length: int,
    tree: DraftTree | None,
    window: int | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mask of keys from `first` on that a chunk's queries see, and their distances, [T, L]."""
    num_queries = tokens.stop - tokens.start
    key_pos = torch.arange(first, length, device=device)
    num_masked = num_queries + (0 if tree is None else tree.num_before)
    free = slice(0, length - num_masked - first)
    if tree is not None and tree.positions_T is not None:
        begin = tokens.start + seq * tree.num_before
        own_pos = tree.positions_T[begin : begin + num_masked].long()
        key_pos = torch.cat([key_pos[free], own_pos])
    distance = key_pos - key_pos[len(key_pos) - num_queries :, None]
    mask = distance <= 0
    if tree is not None:
        mask = _seen_in_tree(seq, num_queries, length, tree, device)[:, first:]
    if window is not None:
        mask &= distance > -window
    return mask, distance


def _tile_for(
    q_THD: torch.Tensor, kv: PagedKv, chunks: Chunks, options: AttentionOptions, tree: DraftTree | None
) -> Tile:
    """Returns the launch table's tile, or a smaller one if tree masks, scales or fp32 need registers."""
    # These chips have no tensor cores for fp32: products of more than 16 rows spill kilobytes per thread.
    by_threads = q_THD.dtype == torch.float32 and target().startswith("sm_")
    _, num_heads, head_dim = q_THD.shape
    group, max_len = num_heads // kv.keys.shape[2], 1 if by_threads else chunks.max_len
    if tree is not None:
        extra = kv.key_scales is not None or _needs_positions(options)
        return _tree_tile(head_dim, group, max_len, extra=extra, is_int4=kv.keys.dtype == INT4)
    chip, has_window = nearest(target(), TILES), options.window is not None
    # Rows are divided by the group, which takes registers unless it is a power of two.
    is_wide, divides = padded(head_dim) == 128, group & (group - 1) != 0
    if chip == "sm_80" and (divides or (is_wide and has_window)):  # 128 rows spill
        max_len = min(max_len, max(64 // group, 1))
    tile = tile_of(head_dim, group, max_len)
    if tile.block_m == 64 and chip == "sm_80" and (divides or (has_window and kv.key_scales is not None)):
        tile = tile._replace(num_warps=8)  # four warps spill
    if (
        chip == "sm_90"
        and tile.block_n > 64
        and (divides or has_window or options.alibi_slopes_H is not None or options.softcap is not None)
    ):
        tile = tile._replace(block_n=64)
    if tile.block_m == 64 and chip == "sm_90" and divides and is_wide:
        return tile._replace(block_n=32)
    # Tiles of 16 rows with scales have enough registers; with 32 keys, ptxas aims at more programs and spills
    if kv.key_scales is not None and tile.block_m > 16:
        return tile._replace(block_n=16 if chip == "sm_80" else 32)
    return tile


def _tree_tile(head_dim: int, group: int, max_query_len: int, *, extra: bool, is_int4: bool) -> Tile:
    """Returns the tile for tree masks: any larger ones spill. extra: whether there are scales or positions.

    With other keys and warps for 16 rows, ptxas aims at more programs per multiprocessor, and spills.
    """
    width, chip = padded(head_dim), nearest(target(), TILES)
    most_rows = 16 if width > 128 else 64
    tile = tile_of(head_dim, group, min(max_query_len, max(most_rows // group, 1)))
    if tile.block_m > 16:
        return tile._replace(block_n=16 if extra and chip in ("sm_80", "gfx942") else 32, num_warps=8)
    if width != 128:
        return tile
    is_small = chip == ("gfx942" if is_int4 else "sm_80")
    return tile._replace(block_n=32) if is_small else tile._replace(block_n=64, num_warps=8)


def tile_of(head_dim: int, group: int, max_query_len: int) -> Tile:
    """Returns the launch table's entry for the target, head_dim and chunks of up to max_query_len tokens."""
    by_head_dim = TILES[nearest(target(), TILES)]
    tiles = by_head_dim[min(key for key in by_head_dim if key >= padded(head_dim))]
    if group > tiles[-1].block_m:
        raise ValueError(
            f"{group} query heads per KV head: must be at most {tiles[-1].block_m} with head_dim {head_dim} "
            f"on {target()}"
        )
    return next((t for t in tiles if t.block_m >= group * max_query_len), tiles[-1])


def _needs_positions(options: AttentionOptions) -> bool:
    """Returns whether a tree needs its tokens' positions, because the options use distances."""
    return options.window is not None or options.alibi_slopes_H is not None


def check_chunks(
    q_THD: torch.Tensor, kv: PagedKv, contexts: Contexts, chunks: Chunks, options: AttentionOptions
) -> None:
    """Raises ValueError unless the kernels of prefill attention can compute these chunks."""
    tables, lens, starts = contexts.block_tables_BM, contexts.lens_B, chunks.start_loc
    check_caches(q_THD, kv)
    check_sequences(tables, starts, lens)
    check_options(q_THD, options)
    num_seqs = lens.shape[0]
    if tables.shape[0] != num_seqs or starts.shape[0] != num_seqs + 1:
        raise ValueError(
            f"{num_seqs} context lengths, {tables.shape[0]} block tables and query_start_loc of "
            f"{starts.shape[0]}: must be one table per sequence, and one start more than sequences"
        )


def _check_tree(tree: DraftTree, options: AttentionOptions) -> None:
    if tree.mask.dtype != torch.bool or not tree.mask.is_contiguous():
        raise ValueError("tree.mask: must be a contiguous torch.bool")
    if tree.mask_start_B.dtype != torch.int32:
        raise ValueError("tree.mask_start_B: must be torch.int32")
    if _needs_positions(options) and (tree.positions_T is None or tree.positions_T.dtype != torch.int32):
        raise ValueError("tree.positions_T: must be torch.int32 with a window or ALiBi, not None")


def cases() -> Iterator[Case]:
    """Yields prefill steps of several models: whole prompts, chunks, and the verification of drafts."""
    bf16 = torch.bfloat16
    for name, num_seqs, query_len, context_len, dtype in (
        ("llama_8b", 1, 8192, 8192, bf16),
        ("llama_8b", 4, 512, 4096, bf16),
        ("llama_8b", 2, 2048, 2048, torch.int8),
        ("llama_8b", 2, 2048, 2048, torch.float8_e4m3fn),
        ("llama_8b", 2, 2048, 2048, INT4),
        ("phi3_mini", 1, 2048, 2048, INT4),
        ("llama_8b", 1, 5, 32768, bf16),
        ("llama_8b", 16, 1, 4096, bf16),
        ("qwen3_0.6b", 4, 1024, 1024, bf16),
        ("smollm2_135m", 2, 256, 256, bf16),
        ("mistral_7b", 1, 8192, 8192, bf16),
        ("gpt_oss_20b", 1, 4096, 4096, bf16),
        ("gemma2_9b", 1, 4096, 4096, bf16),
        ("mpt_7b", 1, 2048, 2048, bf16),
        ("phi3_mini", 1, 2048, 2048, bf16),
        ("falcon_7b", 1, 2048, 2048, bf16),
    ):
        yield prefill_case(name, num_seqs, query_len, context_len, dtype)
    yield prefill_case("llama_8b", 8, 16, 2048, bf16, tree=True)
    yield prefill_case("mistral_7b", 8, 16, 8192, bf16, tree=True)
    yield prefill_case("mistral_7b", 1, 4, 32768, bf16, tree=True)
    yield prefill_case("llama_8b", 1, 4, 32768, torch.int8, tree=True)
    yield prefill_case("llama_8b", 1, 4, 32768, INT4, tree=True)
    yield prefill_case("gemma2_9b", 8, 16, 8192, bf16, tree=True)


def prefill_case(
    name: str, num_seqs: int, query_len: int, context_len: int, dtype: torch.dtype, *, tree: bool = False
) -> Case:
    """Returns the case of chunks of query_len tokens, or token trees, at the end of contexts."""
    model = MODELS[name]

    def make(device: torch.device) -> Callable[[], object]:
        kv, contexts = made_cache([context_len] * num_seqs, model, dtype, device)
        q = made((num_seqs * query_len, model.num_heads, model.head_dim), torch.bfloat16, device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        options, drafts = model.options(device), None
        if tree:
            own = torch.eye(query_len, dtype=torch.bool, device=device)
            own[:, 0] = True
            depth = torch.arange(query_len, dtype=torch.int32, device=device).clamp(max=1)
            positions = (depth + context_len - query_len).repeat(num_seqs)
            drafts = DraftTree(own.repeat(num_seqs, 1), starts[:-1] * query_len, positions)
        return lambda: prefill_attention(q, kv, contexts, Chunks(starts, query_len), options, tree=drafts)

    case = f"{name}-{name_of(dtype)}-batch{num_seqs}-{query_len}of{context_len}"
    work = prefill_work(model, num_seqs, query_len, context_len, dtype)
    return Case(f"{case}-tree" if tree else case, make, *work)
