"""Parts shared by the paged attention kernels: options, contexts, checks.

Shapes: B sequences, T tokens, H query heads, K KV heads, D head_dim, N blocks, P block_size, M largest number
of blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.even_split import LOG2E, EvenSplit, even_split
from kernels.launch import target
from kernels.paged_kv import QUANTISED, PagedKv, scales_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
# Arguments that change in every step: a kernel compiled for one step must serve the next.
STEP_ARGS = ["block_tables_ptr", "context_lens_ptr", "stride_tb", "num_units"]
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
    """Longest context, or its bucket, known to the host."""
    splits: dict[tuple[Any, ...], Any] | None = None
    """Splits and schedules that the layers of a step share; None: each call makes its own."""


def shared_split(
    contexts: Contexts, num_ranges: int, block_n: int, window: int | None, **chunks: Any
) -> EvenSplit:
    """Returns the even split of the contexts, made by the first layer that needs it; see `even_split`."""
    key = num_ranges, block_n, window, chunks.get("block_q", 0), chunks.get("num_before", 0)
    splits = {} if contexts.splits is None else contexts.splits
    if key not in splits:
        splits[key] = even_split(contexts.lens_B, num_ranges, block_n, window, **chunks)
    split: EvenSplit = splits[key]
    return split


def padded(head_dim: int) -> int:
    """Rounds a head dimension up to a power of two, at least 16, as `tl.dot` requires."""
    return max(16, triton.next_power_of_2(head_dim))


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
    if kv.head_dim != head_dim or num_heads % keys.shape[2]:
        raise ValueError(
            f"caches of {keys.shape[2]} KV heads of {kv.head_dim} do not fit queries of {num_heads} heads "
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
    shape, dtype = scales_of(tuple(keys.shape), keys.dtype)
    for s in scales:
        if s is not None and (s.shape != shape or s.dtype != dtype or not s.is_contiguous()):
            raise ValueError(f"scales of {s.dtype} {list(s.shape)}: must be contiguous {dtype} {list(shape)}")


def _check_cache_dtype(dtype: torch.dtype, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (dtype, *QUANTISED):
        raise ValueError(
            f"keys of {key_cache.dtype} and values of {value_cache.dtype}: both must be {dtype} like the "
            "queries, torch.int8, torch.float8_e4m3fn or torch.uint8 (4 bits)"
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
