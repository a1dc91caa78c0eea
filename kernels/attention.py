"""Parts shared by the paged attention kernels: options, checks, and the split of a context over programs.

The second pass of split-KV is defined here, too: it combines the splits of `decode_attention`,
`prefill_attention` and `mla_decode` by their log-sum-exp.

Shapes: B sequences, T tokens, H query heads, K KV heads, D head_dim, N blocks, P block_size, M largest number
of blocks of a sequence, S splits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target
from kernels.paged_kv import QUANTISED, PagedKv

LOG2E = tl.constexpr(1.4426950408889634)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256
SM_COUNTS = {"sm_80": 108, "sm_90": 132, "gfx942": 304, INTERPRETER: 4}
# Arguments that change in every step: a kernel compiled for one step must serve the next.
STEP_ARGS = ["block_tables_ptr", "context_lens_ptr", "stride_tb", "num_splits"]
NO_FP8 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionOptions:
    """Options of a layer's attention. Scores are scaled and capped, ALiBi is added, and they are masked."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    window: int | None = None
    """Number of keys that a token attends to, its own included; None: all."""
    softcap: float | None = None
    """Soft cap: scores become softcap * tanh(score / softcap) (Gemma 2)."""
    sinks_H: torch.Tensor | None = None
    """Attention sinks: one float32 logit per head that is added to the softmax's denominator (gpt-oss)."""
    alibi_slopes_H: torch.Tensor | None = None
    """ALiBi slope per head, float32 (Press et al., 2022)."""

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor of the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionOptions()
"""Options of causal attention without any extras."""


class Contexts(NamedTuple):
    """Sequences of a step and their KV blocks; int32 tensors on the device."""

    block_tables_BM: torch.Tensor
    lens_B: torch.Tensor
    """Tokens that each sequence attends to, its newest ones included; 0 gives zeros."""
    max_len: int
    """Longest context, or its bucket, known to the host; it determines the number of splits."""


def choose_num_splits(num_programs: int, num_tokens: int, num_resident: int) -> int:
    """Returns the number of splits of contexts of up to num_tokens tokens.

    num_programs: programs without splits. num_resident: programs that the chip runs at once. It is the
    smallest number that fills waves of num_resident programs almost as well as any other number, and splits
    have at least MIN_SPLIT_TOKENS tokens.
    """
    limit = max(1, min(MAX_SPLITS, triton.cdiv(num_tokens, MIN_SPLIT_TOKENS)))
    filled = []
    for num_splits in range(1, limit + 1):
        waves = max(1, num_programs) * num_splits / num_resident
        filled.append(waves / math.ceil(waves))
    return next(n for n, share in enumerate(filled, 1) if share >= 0.85 * max(filled))


def sm_count(device: torch.device) -> int:
    """Returns the number of multiprocessors (compute units) of the device, or of the compilation target."""
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
    """Returns the key that chip `name` uses in a table by target: its own, or the most similar chip's."""
    return _nearest(name, tuple(table))


def padded(head_dim: int) -> int:
    """Rounds a head dimension up to a power of two, at least 16, as `tl.dot` requires."""
    return max(16, triton.next_power_of_2(head_dim))


def make_partials(
    q_THD: torch.Tensor, value_dim: int, num_splits: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns buffers for the splits' outputs [T, H, S, value_dim] and log2-sum-exps [T, H, S], or None.

    Both are None for one split.
    """
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
    """Combines the splits' outputs into out_THD, weighted by their shares of the softmax, sinks included."""
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


def min_tiles_of_a_split(block_n: int) -> int:
    """Returns the smallest number of key tiles of a split; combining shorter splits is not worth it."""
    return max(1, MIN_SPLIT_TOKENS // block_n) if target() != INTERPRETER else 1


def check_caches(q_THD: torch.Tensor, kv: PagedKv) -> None:
    """Raises ValueError unless the kernels can read these caches for these queries."""
    keys, values, *scales = kv
    num_heads, head_dim = q_THD.shape[-2:]
    if q_THD.dim() != 3 or q_THD.stride(-1) != 1:
        raise ValueError("queries: must be [tokens, heads, head_dim] with a contiguous last dimension")
    if q_THD.dtype not in DTYPES:
        raise ValueError(f"queries of {q_THD.dtype}: must be one of {', '.join(map(str, DTYPES))}")
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim {head_dim}: must be a multiple of 16 up to {MAX_HEAD_DIM} (others than powers of two "
            "are padded)"
        )
    if keys.dim() != 4 or keys.shape != values.shape:
        raise ValueError(
            f"key and value caches of {list(keys.shape)} and {list(values.shape)}: "
            "both must be [num_blocks, block_size, num_kv_heads, head_dim]"
        )
    if keys.shape[3] != head_dim or num_heads % keys.shape[2]:
        raise ValueError(
            f"caches of {keys.shape[2]} KV heads of {keys.shape[3]} do not fit queries of {num_heads} heads "
            f"of {head_dim}: must have the same head_dim, and the heads must be a multiple of the KV heads"
        )
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("caches: the last dimension must be contiguous")
    _check_cache_dtype(q_THD.dtype, keys, values)
    quantised = keys.dtype in QUANTISED
    if any((s is not None) != quantised for s in scales):
        raise ValueError(
            f"KV of {keys.dtype}: key and value scales {'are needed' if quantised else 'must be None'}"
        )
    for s in scales:
        if s is not None and (s.shape != keys.shape[:3] or s.dtype != torch.float32 or not s.is_contiguous()):
            raise ValueError("scales: must be contiguous float32 [num_blocks, block_size, num_kv_heads]")


def _check_cache_dtype(dtype: torch.dtype, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (dtype, *QUANTISED):
        raise ValueError(
            f"keys of {key_cache.dtype} and values of {value_cache.dtype}: both must be {dtype} like the "
            "queries, torch.int8 or torch.float8_e4m3fn"
        )
    if key_cache.dtype == torch.float8_e4m3fn and target() in NO_FP8:
        raise ValueError(
            f"KV of torch.float8_e4m3fn is not supported on {target()}, only from sm_89 on and on gfx942; "
            "use torch.int8"
        )


def check_sequences(block_tables_BM: torch.Tensor, *lens_B: torch.Tensor) -> None:
    """Raises ValueError unless these are int32 block tables and lengths."""
    if block_tables_BM.dim() != 2 or any(lens.dim() != 1 for lens in lens_B):
        raise ValueError("block tables: must be [num_seqs, max_blocks]; lengths: must have one dimension")
    if block_tables_BM.stride(1) != 1 or any(t.dtype != torch.int32 for t in (block_tables_BM, *lens_B)):
        raise ValueError("block tables and lengths: must be contiguous torch.int32")


def check_options(q_THD: torch.Tensor, options: AttentionOptions) -> None:
    """Raises ValueError unless window and softcap are positive, and there is one sink and slope per head."""
    window, softcap = options.window, options.softcap
    if window is not None and window < 1:
        raise ValueError(f"window of {window}: must be >= 1 (the token's own key), or None")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap of {softcap}: must be > 0, or None")
    for name, values in (("sinks", options.sinks_H), ("alibi_slopes", options.alibi_slopes_H)):
        if values is not None and (
            values.shape != (q_THD.shape[1],) or values.dtype != torch.float32 or not values.is_contiguous()
        ):
            raise ValueError(f"{name}: must be contiguous float32 [num_heads]")


def check_num_splits(num_splits: int) -> None:
    """Raises ValueError unless 1 <= num_splits <= MAX_SPLITS."""
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits of {num_splits}: must be 1 to {MAX_SPLITS}")


@triton.jit
def capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap), in base-2 logits."""
    return (2.0 * LOG2E) * softcap * (tl.sigmoid(scores * (2.0 / softcap)) - 0.5)


@triton.jit
def widened(tile, dtype: tl.constexpr):
    """Returns cached keys or values as an operand in the queries' dtype."""
    if tile.dtype == tl.int8:
        return tile.to(tl.float32).to(dtype)
    return tile.to(dtype)


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
    """Combines splits; grid: tokens, query heads, tiles of VALUE_DIM.

    A split with a log-sum-exp of -inf has no output.
    """
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
