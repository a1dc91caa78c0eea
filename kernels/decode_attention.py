"""Paged decode attention: one query token a sequence against its blocks of KV cache.

Split-KV after Flash-Decoding (Dao et al., 2023): the programs of one sequence and KV head share its
context, each with a running softmax, and a second kernel adds the parts up by their log-sum-exp. The query
heads of a KV head are the rows of one tile (GQA), padded to 16 for the tensor cores, so that each key and
value is read once. Bound by the memory's bandwidth: 4 * head_dim bytes a token and KV head in bf16, for
4 * head_dim * group flops.

With a sliding window, attention sinks (a logit a head that only adds to the softmax's denominator: gpt-oss),
ALiBi (Press et al., 2022) and soft-capped scores (Gemma 2). The order of masks and biases: scores are scaled,
capped, ALiBi is added, then masked. Which tokens meet in one program depends on num_splits, thus the last
bits of a sequence's output on the size of its batch, unless num_splits is given.

Above 400 lines, as the checks, launch tables and reference that prefill and MLA share are here.

Shapes: B sequences, T tokens, H query heads, K KV heads, D head_dim, N blocks, P block_size, M most blocks of
a sequence, L tokens of one context, S splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.case import Case
from kernels.launch import INTERPRETER, launch, target

LOG2E = tl.constexpr(1.4426950408889634)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
SM_COUNTS = {"sm_80": 108, "sm_90": 132, "gfx942": 304, INTERPRETER: 4}
MAX_GATHERED = 8192  # tokens that the reference copies together, padding included
# Arguments that change from step to step: a kernel compiled for one step must serve the next.
STEP_ARGS = ["block_tables_ptr", "context_lens_ptr", "stride_tb", "num_splits"]
NO_FP8 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")


class Tile(NamedTuple):
    """Keys a step of the loop, how a program runs it, and how many programs a multiprocessor holds.

    The keys' addresses are loaded themselves, which takes two of num_stages: with 5 there are two tiles of
    keys and of values in flight, with 3 there is one.
    """

    block_n: int
    num_warps: int
    num_stages: int
    resident: int


# By target, then by the head_dim padded to a power of two: the first key at least as large.
TILES: dict[str, dict[int, Tile]] = {
    "sm_80": {64: Tile(64, 4, 5, 4), 128: Tile(64, 4, 3, 4), 256: Tile(32, 4, 3, 3)},
    "sm_90": {64: Tile(64, 4, 5, 6), 128: Tile(32, 4, 5, 4), 256: Tile(32, 4, 5, 2)},
    "gfx942": {64: Tile(64, 4, 2, 2), 128: Tile(64, 4, 1, 1), 256: Tile(32, 4, 1, 1)},
    INTERPRETER: {256: Tile(32, 4, 1, 1)},
}


def decode_attention(
    q_BHD: torch.Tensor,
    key_cache_NPKD: torch.Tensor,
    value_cache_NPKD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_context_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    key_scales_NPK: torch.Tensor | None = None,
    value_scales_NPK: torch.Tensor | None = None,
    num_splits: int | None = None,
    out_BHD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence's newest token over its context_lens tokens, that token's own KV included.

    q_BHD: fp32, fp16 or bf16, last dimension contiguous; head_dim a multiple of 16, at most 256. Caches: of
    q's dtype, or int8 or float8_e4m3fn (not before sm_89) with contiguous float32 scales by which a stored
    number is multiplied; the last dimension is contiguous. block_tables and context_lens: int32; a context of
    0 gives zeros. max_context_len: known to the host, the longest context or its bucket, from which
    num_splits is chosen. scale: 1 / sqrt(head_dim) if None. window: keys seen, the token's own counted.
    sinks, alibi_slopes: float32. Returns out_BHD, of q's dtype, made if None.
    Raises ValueError on what is not supported.
    """
    check_caches(q_BHD, key_cache_NPKD, value_cache_NPKD, key_scales_NPK, value_scales_NPK)
    check_sequences(block_tables_BM, context_lens_B)
    check_options(q_BHD, window, softcap, sinks_H, alibi_slopes_H)
    num_seqs, num_heads, head_dim = q_BHD.shape
    if block_tables_BM.shape[0] != num_seqs or context_lens_B.shape[0] != num_seqs:
        raise ValueError(
            f"{num_seqs} queries, but {block_tables_BM.shape[0]} block tables and "
            f"{context_lens_B.shape[0]} context lengths: one of each a sequence is needed"
        )
    block_size, num_kv_heads = key_cache_NPKD.shape[1:3]
    group = num_heads // num_kv_heads
    block_h = min(max(16, triton.next_power_of_2(group)), 64 if head_dim <= 128 else 32)
    head_tiles = num_kv_heads * triton.cdiv(group, block_h)
    tile = tile_of(TILES, head_dim)
    if q_BHD.dtype == torch.float32:  # no tensor cores on NVIDIA's: products take registers
        tile = tile._replace(block_n=32, num_warps=8)
    if num_splits is None:
        seen = max_context_len if window is None else min(max_context_len, window)
        num_splits = choose_num_splits(num_seqs * head_tiles, seen, sm_count(q_BHD.device) * tile.resident)
    check_num_splits(num_splits)

    out = torch.empty_like(q_BHD, memory_format=torch.contiguous_format) if out_BHD is None else out_BHD
    partial, partial_lse = make_partials(q_BHD, head_dim, num_splits)
    launch(
        decode_attention_kernel,
        (num_seqs, head_tiles, num_splits),
        out,
        partial,
        partial_lse,
        q_BHD,
        key_cache_NPKD,
        value_cache_NPKD,
        key_scales_NPK,
        value_scales_NPK,
        block_tables_BM,
        context_lens_B,
        sinks_H,
        alibi_slopes_H,
        head_dim**-0.5 if scale is None else scale,
        softcap,
        window,
        *out.stride()[:2],
        *q_BHD.stride()[:2],
        *key_cache_NPKD.stride()[:3],
        *value_cache_NPKD.stride()[:3],
        block_tables_BM.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_H=block_h,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded(head_dim),
        MIN_TILES=max(1, MIN_SPLIT_TOKENS // tile.block_n) if target() != INTERPRETER else 1,
        SPLIT=num_splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial is not None and partial_lse is not None:
        combine_splits(out, partial, partial_lse, sinks_H)
    return out


def decode_attention_reference(
    q_BHD: torch.Tensor,
    key_cache_NPKD: torch.Tensor,
    value_cache_NPKD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_context_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    key_scales_NPK: torch.Tensor | None = None,
    value_scales_NPK: torch.Tensor | None = None,
    num_splits: int | None = None,
    out_BHD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_attention` in torch: sequences of like lengths together, padded to the longest of them."""
    out = torch.zeros_like(q_BHD) if out_BHD is None else out_BHD.zero_()
    seen = [length if window is None else min(length, window) for length in context_lens_B.tolist()]
    for group in _alike(seen):
        # All of them: views, as indexing costs as much as a short context does.
        of = slice(None) if len(group) == len(seen) else torch.tensor(group, device=q_BHD.device)
        tokens_BL = torch.arange(seen[group[0]], device=q_BHD.device).unsqueeze(0)
        mask_BTL = distance_BTL = None
        is_padded = seen[group[-1]] < seen[group[0]]
        if is_padded or window is not None or alibi_slopes_H is not None:
            last_B1 = context_lens_B[of].unsqueeze(1) - 1
            if window is not None:
                tokens_BL = tokens_BL + (last_B1 - (window - 1)).clamp(min=0)
            distance_BTL = (tokens_BL - last_B1).unsqueeze(1)
            if is_padded:
                mask_BTL = distance_BTL <= 0
                # Padding reads the last token once more: memory that belongs to no token may hold NaN.
                tokens_BL = torch.minimum(tokens_BL, last_B1)
        slots_BL = slots_of(block_tables_BM[of], tokens_BL, key_cache_NPKD.shape[1])
        out[of] = attend(
            q_BHD[of].unsqueeze(1),
            gather_slots(key_cache_NPKD, key_scales_NPK, slots_BL, q_BHD.dtype),
            gather_slots(value_cache_NPKD, value_scales_NPK, slots_BL, q_BHD.dtype),
            scale=q_BHD.shape[-1] ** -0.5 if scale is None else scale,
            mask_TL=mask_BTL,
            distance_TL=distance_BTL,
            softcap=softcap,
            sinks_H=sinks_H,
            alibi_slopes_H=alibi_slopes_H,
        ).squeeze(1)
    return out


def choose_num_splits(num_programs: int, num_tokens: int, num_resident: int) -> int:
    """Parts to cut contexts of up to num_tokens into, where num_programs would read them whole.

    The fewest that fill waves of num_resident programs almost as well as any number does; none of them so
    short that adding up the parts costs more.
    """
    limit = max(1, min(MAX_SPLITS, triton.cdiv(num_tokens, MIN_SPLIT_TOKENS)))
    filled = []
    for num_splits in range(1, limit + 1):
        waves = max(1, num_programs) * num_splits / num_resident
        filled.append(waves / math.ceil(waves))
    return next(n for n, share in enumerate(filled, 1) if share >= 0.85 * max(filled))


def sm_count(device: torch.device) -> int:
    """Multiprocessors (compute units) of the device, or of the chip that is compiled for."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return SM_COUNTS[nearest(target(), SM_COUNTS)]


@cache
def _nearest(name: str, names: tuple[str, ...]) -> str:
    if name in names:
        return name
    if name.startswith("gfx"):
        return "gfx942"
    return "sm_90" if name.startswith("sm_") and int(name[3:]) >= 90 else "sm_80"


def nearest(name: str, table: Mapping[str, object]) -> str:
    """The key of a table by target that chip `name` uses: its own, or that of the chip most like it."""
    return _nearest(name, tuple(table))


def tile_of(tiles: dict[str, dict[int, Tile]], head_dim: int) -> Tile:
    """The launch table's entry for the target and the first head_dim that is large enough."""
    by_head_dim = tiles[nearest(target(), tiles)]
    return by_head_dim[min(key for key in by_head_dim if key >= padded(head_dim))]


def padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def make_partials(
    q_THD: torch.Tensor, value_dim: int, num_splits: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where splits leave their outputs [T, H, S, value_dim] and log2-sum-exps [T, H, S]; None without."""
    if num_splits == 1:
        return None, None
    num_tokens, num_heads = q_THD.shape[:2]
    shape = num_tokens, num_heads, num_splits
    partial = torch.empty(*shape, value_dim, dtype=torch.float32, device=q_THD.device)
    return partial, torch.empty(shape, dtype=torch.float32, device=q_THD.device)


def combine_splits(
    out_THD: torch.Tensor,
    partial_THSD: torch.Tensor,
    partial_lse_THS: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> None:
    """Second pass: the splits' outputs into out, each by its share of the softmax; sinks take theirs."""
    num_tokens, num_heads, num_splits, value_dim = partial_THSD.shape
    block_d = min(128 if num_splits <= 16 else 64, padded(value_dim))
    launch(
        combine_splits_kernel,
        (num_tokens, num_heads, triton.cdiv(value_dim, block_d)),
        out_THD,
        partial_THSD,
        partial_lse_THS,
        sinks_H,
        *out_THD.stride()[:2],
        num_heads,
        num_splits,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_S=triton.next_power_of_2(num_splits),
        num_warps=2,
        num_stages=1,
    )


def check_caches(
    q_THD: torch.Tensor,
    key_cache_NPKD: torch.Tensor,
    value_cache_NPKD: torch.Tensor,
    key_scales_NPK: torch.Tensor | None,
    value_scales_NPK: torch.Tensor | None,
) -> None:
    """ValueError unless the kernels can read these caches for these queries."""
    num_heads, head_dim = q_THD.shape[-2:]
    if q_THD.dim() != 3 or q_THD.stride(-1) != 1:
        raise ValueError("queries: [tokens, heads, head_dim] with a contiguous last dimension are supported")
    if q_THD.dtype not in DTYPES:
        raise ValueError(f"queries of {q_THD.dtype} are not supported; {', '.join(map(str, DTYPES))} are")
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim} is not supported; multiples of 16 up to {MAX_HEAD_DIM} are "
            "(powers of two without waste)"
        )
    if key_cache_NPKD.dim() != 4 or key_cache_NPKD.shape != value_cache_NPKD.shape:
        raise ValueError(
            f"key and value caches of {list(key_cache_NPKD.shape)} and {list(value_cache_NPKD.shape)}: "
            "both are to be [num_blocks, block_size, num_kv_heads, head_dim]"
        )
    if key_cache_NPKD.shape[3] != head_dim or num_heads % key_cache_NPKD.shape[2]:
        raise ValueError(
            f"caches of {key_cache_NPKD.shape[2]} KV heads of {key_cache_NPKD.shape[3]} do not fit queries "
            f"of {num_heads} heads of {head_dim}: the same head_dim and a multiple of the KV heads are needed"
        )
    if key_cache_NPKD.stride(-1) != 1 or value_cache_NPKD.stride(-1) != 1:
        raise ValueError("caches: the last dimension must be contiguous")
    _check_cache_dtype(q_THD.dtype, key_cache_NPKD, value_cache_NPKD)
    scales = (key_scales_NPK, value_scales_NPK)
    quantised = key_cache_NPKD.dtype in QUANTISED
    if any((s is not None) != quantised for s in scales):
        raise ValueError(
            f"KV of {key_cache_NPKD.dtype} goes {'with' if quantised else 'without'} key and value scales"
        )
    for s in scales:
        if s is not None and (
            s.shape != key_cache_NPKD.shape[:3] or s.dtype != torch.float32 or not s.is_contiguous()
        ):
            raise ValueError("scales: contiguous float32 [num_blocks, block_size, num_kv_heads] is supported")


def _check_cache_dtype(dtype: torch.dtype, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (dtype, *QUANTISED):
        raise ValueError(
            f"keys of {key_cache.dtype} and values of {value_cache.dtype} are not supported for queries of "
            f"{dtype}; both are to be of the queries' dtype, torch.int8 or torch.float8_e4m3fn"
        )
    if key_cache.dtype == torch.float8_e4m3fn and target() in NO_FP8:
        raise ValueError(
            f"KV of torch.float8_e4m3fn is not supported on {target()}; it is from sm_89 and on gfx942, "
            "and torch.int8 is everywhere"
        )


def check_sequences(block_tables_BM: torch.Tensor, *lens_B: torch.Tensor) -> None:
    """ValueError unless these are int32 block tables and lengths."""
    if block_tables_BM.dim() != 2 or any(lens.dim() != 1 for lens in lens_B):
        raise ValueError("block tables: [num_seqs, max_blocks] is supported; lengths: one dimension")
    if block_tables_BM.stride(1) != 1 or any(t.dtype != torch.int32 for t in (block_tables_BM, *lens_B)):
        raise ValueError("block tables and lengths: contiguous torch.int32 is supported")


def check_options(
    q_THD: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    alibi_slopes_H: torch.Tensor | None,
) -> None:
    """ValueError unless window and softcap are positive and there is one sink and one slope a head."""
    if window is not None and window < 1:
        raise ValueError(f"window of {window}: at least 1, the token's own, or None is supported")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap of {softcap}: above 0 or None is supported")
    for name, values in (("sinks", sinks_H), ("alibi_slopes", alibi_slopes_H)):
        if values is not None and (
            values.shape != (q_THD.shape[1],) or values.dtype != torch.float32 or not values.is_contiguous()
        ):
            raise ValueError(f"{name}: contiguous float32 [num_heads] is supported")


def check_num_splits(num_splits: int) -> None:
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits of {num_splits}: 1 to {MAX_SPLITS} are supported")


def _alike(lengths: list[int]) -> list[list[int]]:
    """Sequences in groups, longest first: none is half as long as its group's first; length 0 is in none."""
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


def slots_of(tables_BM: torch.Tensor, tokens_BL: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where the cache holds tokens [B, L], or [1, L] of every sequence: block * block_size + place in it."""
    places_BL = (tokens_BL // block_size).expand(len(tables_BM), -1)
    return tables_BM.gather(1, places_BL) * block_size + tokens_BL % block_size


def gather_slots(
    cache_NPKD: torch.Tensor, scales_NPK: torch.Tensor | None, slots: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Slots [...] of the cache, multiplied by their scales: [..., K, D]."""

    def rows(stored: torch.Tensor) -> torch.Tensor:
        return stored.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *stored.shape[2:])

    if scales_NPK is None:
        return rows(cache_NPKD)
    codes = rows(cache_NPKD.view(torch.uint8)).view(cache_NPKD.dtype)  # fp8 cannot be indexed everywhere
    return (codes.float() * rows(scales_NPK)[..., None]).to(dtype)


def gather_tokens(
    cache_NPKD: torch.Tensor,
    scales_NPK: torch.Tensor | None,
    table_M: torch.Tensor,
    start: int,
    end: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Tokens start to end of one sequence out of the cache, [L, K, D], multiplied by their scales."""
    tokens_L = torch.arange(start, end, device=table_M.device)
    slots_L = slots_of(table_M[None], tokens_L[None], cache_NPKD.shape[1])[0]
    return gather_slots(cache_NPKD, scales_NPK, slots_L, dtype)


def attend(
    q_THD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    *,
    scale: float,
    mask_TL: torch.Tensor | None,
    distance_TL: torch.Tensor | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
    alibi_slopes_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one sequence, or of several in a dimension before all others (torch's fused way wants it).

    mask: True where seen. distance: the key's position less the query's.
    """
    *seqs, num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, group = k_LKD.shape[-2], num_heads // k_LKD.shape[-2]

    def rows(of_tokens: torch.Tensor) -> torch.Tensor:
        """What holds for tokens [..., T, L] for the rows of every KV head; one token's is broadcast."""
        return (of_tokens if num_tokens == 1 else of_tokens.repeat_interleave(group, -2)).unsqueeze(-3)

    def rows_of_heads(of_heads: torch.Tensor) -> torch.Tensor:
        return of_heads.view(num_kv_heads, group).repeat(1, num_tokens)[..., None]

    # The heads of a KV head are rows, as in the kernels: row t * group + g.
    q = q_THD.reshape(*seqs, num_tokens, num_kv_heads, group, head_dim).transpose(-4, -3).flatten(-3, -2)
    k, v = k_LKD.transpose(-3, -2), v_LKD.transpose(-3, -2)
    mask = None if mask_TL is None else rows(mask_TL)
    if softcap is None and sinks_H is None and alibi_slopes_H is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(q.float(), k.float().transpose(-2, -1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes_H is not None and distance_TL is not None:
            scores = scores + rows_of_heads(alibi_slopes_H) * rows(distance_TL)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if sinks_H is not None:
            scores = torch.cat([scores, rows_of_heads(sinks_H).expand_as(scores[..., :1])], dim=-1)
        out = torch.matmul(scores.softmax(-1)[..., : k.shape[-2]], v.float()).to(q.dtype)
    out = out.view(*seqs, num_kv_heads, num_tokens, group, -1)
    return out.transpose(-4, -3).flatten(-3, -2)


class Dimensions(NamedTuple):
    """A model's attention, and the options that its layers use, for `cases()`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False

    def options(self, device: torch.device) -> dict[str, object]:
        """The launchers' keyword arguments."""
        return {
            "window": self.window,
            "softcap": self.softcap,
            "sinks_H": torch.zeros(self.num_heads, device=device) if self.sinks else None,
            "alibi_slopes_H": torch.full((self.num_heads,), 0.01, device=device) if self.alibi else None,
        }


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


def made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers on a GPU; on the CPU, where cases are only compiled, memory that is never touched."""
    if device.type == "cpu":
        return torch.empty(shape, dtype=dtype)
    if dtype in QUANTISED:
        return torch.randint(-96, 96, shape, dtype=torch.int8, device=device).view(dtype)
    return torch.empty(shape, dtype=dtype, device=device).normal_()


def made_cache(
    num_seqs: int, context_len: int, model: Dimensions, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Key cache, value cache, shuffled block tables, lengths, and the scales that a quantised cache takes."""
    max_blocks = triton.cdiv(context_len, 16)
    num_blocks = num_seqs * max_blocks + 1
    shape = num_blocks, 16, model.num_kv_heads, model.head_dim
    tables = torch.randperm(num_blocks - 1, device=device).view(num_seqs, max_blocks).int() + 1
    lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
    scales = {}
    if dtype in QUANTISED:
        names = "key_scales_NPK", "value_scales_NPK"
        scales = {name: made(shape[:3], torch.float32, device).abs_().mul_(0.02) for name in names}
    return made(shape, dtype, device), made(shape, dtype, device), tables, lens, scales


def cases() -> Iterator[Case]:
    """Decode at the engine's dimensions; block_size 16."""
    bf16 = torch.bfloat16
    for name, num_seqs, context_len, dtype in (
        ("llama_8b", 64, 1024, bf16),
        ("llama_8b", 16, 4096, bf16),
        ("llama_8b", 1, 32768, bf16),
        ("llama_8b", 16, 4096, torch.int8),
        ("llama_8b", 16, 4096, torch.float8_e4m3fn),
        ("qwen3_0.6b", 256, 512, bf16),
        ("smollm2_135m", 8, 256, bf16),
        ("mistral_7b", 16, 8192, bf16),
        ("gpt_oss_20b", 16, 4096, bf16),
        ("gemma2_9b", 16, 4096, bf16),
        ("mpt_7b", 16, 2048, bf16),
        ("phi3_mini", 16, 2048, bf16),
        ("falcon_7b", 16, 2048, bf16),
    ):
        model = MODELS[name]
        seen = min(context_len, model.window or context_len)
        kv_bytes = 2 * num_seqs * seen * model.num_kv_heads * model.head_dim * dtype.itemsize
        yield Case(
            f"{name}-{str(dtype).removeprefix('torch.')}-batch{num_seqs}-context{context_len}",
            _make(model, num_seqs, context_len, dtype),
            bytes_moved=kv_bytes + 4 * num_seqs * model.num_heads * model.head_dim,
            flops=4 * num_seqs * seen * model.num_heads * model.head_dim,
        )


def _make(
    model: Dimensions, num_seqs: int, context_len: int, dtype: torch.dtype
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        keys, values, tables, lens, scales = made_cache(num_seqs, context_len, model, dtype, device)
        q = made((num_seqs, model.num_heads, model.head_dim), torch.bfloat16, device)
        options: dict[str, Any] = {**model.options(device), **scales, "max_context_len": context_len}
        return lambda: decode_attention(q, keys, values, tables, lens, **options)

    return make


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), in base-2 logits."""
    return (2.0 * LOG2E) * softcap * (tl.sigmoid(scores * (2.0 / softcap)) - 0.5)


@triton.jit
def widened(tile, dtype: tl.constexpr):
    """Cached keys or values as an operand of the queries' dtype."""
    if tile.dtype == tl.int8:
        return tile.to(tl.float32).to(dtype)
    return tile.to(dtype)


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def decode_attention_kernel(
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: sequences, KV heads times tiles of their query heads, splits."""
    seq = tl.program_id(0)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    tiles_per_group: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(1) // tiles_per_group
    row = (tl.program_id(1) % tiles_per_group) * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + row
    head_ok = row < GROUP
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    row_ok = head_ok[:, None] & d_ok[None, :]
    lse_row = (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split

    length = tl.load(context_lens_ptr + seq)
    start = 0
    if window is not None:
        start = tl.maximum(length - window, 0)
    first_tile = start // BLOCK_N
    num_tiles = tl.cdiv(length, BLOCK_N) - first_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES) if SPLIT else num_tiles
    lo = (first_tile + split * tiles_per_split) * BLOCK_N
    hi = tl.minimum(lo + tiles_per_split * BLOCK_N, length)
    if SPLIT:  # noqa: SIM102  a constant: nested, so that nothing is compiled where it is false
        if lo >= hi:
            tl.store(partial_lse_ptr + lse_row, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=head_ok)
            return

    q = tl.load(
        q_ptr + seq.to(tl.int64) * stride_qb + head[:, None] * stride_qh + d[None, :], mask=row_ok, other=0.0
    )
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + head, mask=head_ok, other=0.0) * LOG2E
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    for first in tl.range(lo, hi, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        seen = n < hi
        if window is not None:
            seen = seen & (n >= start)
        block = tl.load(table_ptr + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        kv_ok = seen[:, None] if HEAD_DIM == BLOCK_D else seen[:, None] & d_ok[None, :]
        key_row = block * stride_kn + (n % BLOCK_SIZE) * stride_kp + kv_head * stride_kk
        k = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=kv_ok, other=0.0)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee") * scale
        if key_scales_ptr is not None:
            scale_row = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
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
        if value_scales_ptr is not None:
            p *= tl.load(value_scales_ptr + scale_row, mask=seen, other=0.0)[None, :]
        value_row = block * stride_vn + (n % BLOCK_SIZE) * stride_vp + kv_head * stride_vk
        v = tl.load(value_ptr + value_row[:, None] + d[None, :], mask=kv_ok, other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), widened(v, q.dtype), acc, input_precision="ieee")

    if SPLIT:
        tl.store(partial_lse_ptr + lse_row, top + tl.log2(total), mask=head_ok)
        tl.store(partial_ptr + lse_row[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=row_ok)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=head_ok, other=0.0) * LOG2E
            new_top = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - new_top)[:, None]
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_row = seq.to(tl.int64) * stride_ob + head * stride_oh
        tl.store(out_ptr + out_row[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_ok)


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def combine_splits_kernel(
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    sinks_ptr,
    stride_ot,
    stride_oh,
    num_heads,
    num_splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid: tokens, query heads, tiles of VALUE_DIM. A split whose log-sum-exp is -inf has no output."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, BLOCK_S)
    row = (token * num_heads + head) * num_splits + split
    lse = tl.load(partial_lse_ptr + row, mask=split < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp2(lse - top)
    total = tl.sum(share, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    used = (lse > float("-inf"))[:, None] & (d < VALUE_DIM)[None, :]
    partial = tl.load(partial_ptr + row[:, None] * VALUE_DIM + d[None, :], mask=used, other=0.0)
    out = tl.sum(partial * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    out_row = token * stride_ot + head * stride_oh
    tl.store(out_ptr + out_row + d, out.to(out_ptr.dtype.element_ty), mask=d < VALUE_DIM)
