"""Attention over cached keys and values: one query token per sequence (decode), or prompt chunks (prefill).

Times are seconds of one call (one layer) on one device. Decode reads every key and value once; with few
sequences, contexts are split so that all SMs work (FlashDecoding: Dao et al., 2023), and the parts are
merged:

    decode   t = start + max(items, merge + stream, merge + k (items + stream))
             items   one KV head of one sequence occupies an SM for item_s, however short its context; in
             waves over the SMs, the first of which is part of the start
             stream  bytes of keys and values / (bandwidth share busy); k: how well the two overlap busy share
             of the SMs with a part of a context: min(1, items max_splits / SMs)

Draft tokens that a pass verifies are additional query rows of their sequence: keys and values are read once,
the rows of all heads that share a pass over the keys fill tiles of 128, and every query-key pair is
multiplied as in prefill, on the SMs with a part of a context.

Prefill is compute-bound. Tiles of 128 queries are distributed over the SMs (FlashAttention-2: Dao, 2023);
each starts up, loads its queries and computes the masked half of its diagonal. A pair costs its products and
an exponential, which tensor cores do not compute (FlashAttention-3: Shah et al., 2024, section 3.1). The tile
of the last queries of a prompt processes all its keys in sequence on one SM: half of that chain is the tail
effect.

    prefill  t = start + max(work + chain / 2, chain)
             work = pairs heads (4 head_dim / (peak share) + 1 / exponentials per second)
                    + heads tiles tile_s / SMs + bytes of keys and values / (bandwidth share)

`AttentionCurve` holds the parameters of a device; `KERNELS` holds the differences between kernel families,
which are equal on every device. With the defaults of both, vLLM on an H100, 32 query and 8 KV heads of 128 in
bf16, 64 sequences of 4,096 tokens: 1.074e9 bytes at 0.82 x 3.35e12 bytes/s take 391 us; with a start of 9.5
us and a merge of 2.5 us, 403 us. Numbers and arrays give bit-identical results (`hwmodels.exact`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from hwmodels.checks import check_curve, check_finite
from hwmodels.device import Device
from hwmodels.exact import Lines, highest, larger, smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeKernels:
    """One family of decode kernels; for the terms see `hwmodels.operators.attention`."""

    start: float = 1.0
    """Factor on the device's decode_start_s."""
    item: float = 1.0
    """Factor on the device's decode_item_s."""
    fixed_share: float = 0.6
    """Share of item_s at head dimension 128 that does not grow with the head dimension."""
    group_share: float = 0.1
    """Relative increase of item_s for every 8 additional query heads that share the KV head."""
    bandwidth: float = 1.0
    """Factor on the device's kv_bandwidth_share."""
    sm_bytes_per_s: float | None = None
    """Rate at which one SM converts keys and values (fp8 to bf16), bytes/s; None: conversion is hidden."""
    merge_s: float = 0.0
    """Seconds to merge the parts of split contexts."""
    max_splits: float = 32.0
    """Maximum number of parts of one item's context, each on one SM; 1: not split."""
    overlap: float = 0.6
    """The factor k above: 0.5 if items and stream overlap completely, 1 if not at all."""
    window_tiles: float = 1.0
    """Factor on an item of a sliding window: its start is unaligned, so one more tile is read."""
    window_merge_s: float = 0.0
    """Merge seconds of a window with at least one item per SM: it is split as if the whole context were
    attended to.
    """
    packs_windows: bool = True
    """True if the query heads of a group share one pass over the keys with a window as well."""
    gather_s: float = 0.0
    """Seconds of a separate kernel that rearranges queries by KV head, for two or more sequences."""
    max_group_size: float = 1e9
    """Maximum size of a group of query heads that shares a pass over the keys."""
    single: DecodeKernels | None = None
    """Kernel for items and stream if no heads share a pass; None: the same kernel."""
    beside_prefill: float = 1.0
    """Factor on decodes in an iteration that also prefills: one call, without packing or splitting for
    decodes.
    """
    single_row: bool = False
    """True if heads share a pass and contexts are split only for single-row sequences, without drafts."""


FLASH_ATTENTION_2 = DecodeKernels(
    fixed_share=0.8,
    max_splits=11,
    gather_s=6e-6,
    packs_windows=False,
    beside_prefill=1.6,
    single_row=True,
)
"""vLLM on sm80. beside_prefill: layers timed inside vLLM on RTX 4090 and RTX PRO 6000, 1.2 to 2.2."""
FLASH_ATTENTION_2_SM120 = replace(FLASH_ATTENTION_2, item=1.45, fixed_share=1.0, max_splits=32)
"""vLLM on sm89 and sm120: 100 KiB of shared memory per SM, so fewer concurrent items."""
FLASH_ATTENTION_3 = DecodeKernels(merge_s=2.5e-6, overlap=0.85, window_tiles=1.6)
"""Decode kernels of vLLM on sm90."""
FLASH_ATTENTION_3_FP8 = replace(
    FLASH_ATTENTION_3, start=1.2, fixed_share=0.35, overlap=0.95, sm_bytes_per_s=18e9
)
"""Decode kernels of vLLM on sm90 over fp8 keys and values, which they transpose and scale on load."""
FLASHINFER_FP8 = DecodeKernels(start=1.35, max_splits=75)
"""Decode kernels of vLLM on sm89 and sm120 over fp8 keys and values."""
TRTLLM_GEN = DecodeKernels(item=0.5, group_share=0.3)
"""Decode kernels of vLLM on sm100, through FlashInfer."""
TRTLLM_GEN_FP8 = replace(TRTLLM_GEN, item=0.4)
TRTLLM_GEN_IN_TRTLLM = replace(TRTLLM_GEN, start=1.2, group_share=0.6)
"""Decode kernels of TensorRT-LLM on sm100; its operator does additional work around the same kernels."""
TRTLLM_GEN_IN_TRTLLM_FP8 = replace(TRTLLM_GEN_IN_TRTLLM, item=0.4)
MASKED_MULTI_HEAD = DecodeKernels(item=0.39, fixed_share=0.9, overlap=0.72, bandwidth=1.1, max_splits=130)
"""Decode kernels of TensorRT-LLM before sm100 that process every query head separately."""
MASKED_MULTI_HEAD_FP8 = replace(MASKED_MULTI_HEAD, bandwidth=1.0, merge_s=5e-6, sm_bytes_per_s=20e9)
XQA = DecodeKernels(
    item=1.3,
    group_share=0.2,
    merge_s=1e-6,
    window_merge_s=26e-6,
    max_splits=50,
    max_group_size=32,
    single=MASKED_MULTI_HEAD,
)
"""Decode kernels of TensorRT-LLM before sm100 for grouped heads."""
XQA_SM90_FP8 = replace(
    XQA,
    start=0.5,
    item=0.42,
    fixed_share=0.2,
    group_share=0.7,
    merge_s=3.5e-6,
    window_merge_s=5e-6,
    single=MASKED_MULTI_HEAD_FP8,
)
"""Decode kernels of TensorRT-LLM in fp8 arithmetic, on sm90 only."""
XQA_SM120_FP8 = replace(XQA, max_splits=1.5, overlap=0.8, window_merge_s=1e-6, window_tiles=1.3)
"""Decode kernels of TensorRT-LLM over fp8 on sm120: contexts are hardly split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillKernels:
    """One family of prefill kernels; for the terms see `hwmodels.operators.attention`."""

    start: float = 1.0
    """Factor on the device's prefill_start_s."""
    flops: float = 1.0
    """Factor on the device's flops_share."""
    tile: float = 1.0
    """Factor on the device's tile_s."""
    tile_fixed_share: float = 0.6
    """Share of tile_s at head dimension 128 that does not grow with the head dimension."""
    part_tile: float = 0.3
    """Additional tiles of a chunk beyond one per 128 queries, because its last tile is not full."""
    kv_passes: float = 2.0
    """Number of times that the new tokens' keys and values (in bf16) are moved: into the cache and out again.
    """
    chain: float = 0.75
    """Time of one tile and key alone on its SM, divided by its time with all SMs busy."""
    window_keys: float = 128.0
    """Average number of keys outside the window that a tile of queries reads, per query."""
    score_bytes: float = 0.0
    """Bytes that each query-key pair of a head moves through memory: scores and probabilities. 0: none."""
    skips_masked: bool = True
    """Whether tiles of masked pairs are skipped; False: every query is multiplied with the whole context."""


FLASH_ATTENTION_2_PREFILL = PrefillKernels(flops=0.72)
FLASH_ATTENTION_2_SM120_PREFILL = PrefillKernels(
    start=0.75, flops=0.76, tile_fixed_share=1.0, part_tile=0.4, chain=0.43
)
FLASH_ATTENTION_3_PREFILL = PrefillKernels(
    start=1.2, tile=0.8, tile_fixed_share=0.4, part_tile=0.05, kv_passes=4.0, chain=0.7, window_keys=40.0
)
FLASH_ATTENTION_3_FP8_PREFILL = replace(
    FLASH_ATTENTION_3_PREFILL, start=1.35, tile=1.1, tile_fixed_share=0.2, kv_passes=5.7, chain=1.4
)
FLASHINFER_FP8_PREFILL = PrefillKernels(
    start=0.9, flops=0.69, tile=0.5, tile_fixed_share=0.0, part_tile=0.15, chain=1.25, window_keys=60.0
)
TRTLLM_GEN_PREFILL = PrefillKernels(
    flops=1.08, tile=0.48, tile_fixed_share=0.8, part_tile=0.6, kv_passes=5.1, chain=2.1, window_keys=180.0
)
TRTLLM_GEN_FP8_PREFILL = replace(TRTLLM_GEN_PREFILL, flops=1.55, tile=0.52, part_tile=0.4, kv_passes=12.5)
"""Prefill kernels in fp8 arithmetic; the passes include the conversions around the call."""
FMHA_SM80_PREFILL = PrefillKernels(
    start=1.12, flops=0.56, tile=1.25, kv_passes=1.5, chain=1.0, window_keys=270.0
)
"""Prefill kernels of TensorRT-LLM, like all below."""
FMHA_SM90_PREFILL = replace(FMHA_SM80_PREFILL, start=1.5, flops=0.78)
FMHA_SM90_FP8_PREFILL = replace(FMHA_SM90_PREFILL, flops=1.15, kv_passes=0.8, window_keys=700.0)
FMHA_SM100_PREFILL = PrefillKernels(
    start=1.42, flops=0.82, tile=0.88, part_tile=0.4, chain=1.4, window_keys=210.0
)
FMHA_SM100_FP8_PREFILL = replace(FMHA_SM100_PREFILL, flops=1.06, kv_passes=0.75)
FMHA_SM120_PREFILL = PrefillKernels(
    start=1.1, flops=0.53, tile=1.65, tile_fixed_share=0.0, kv_passes=1.7, chain=0.46, window_keys=80.0
)
FMHA_SM89_FP8_PREFILL = replace(FMHA_SM120_PREFILL, flops=0.78, kv_passes=0.8)
"""In fp8 arithmetic, assuming the gain of sm90 for sm89; no measured row covers it."""


class Kernels(NamedTuple):
    """Kernels that a library runs on one kind of chip.

    Factors multiply the parameters of a device (`AttentionCurve`), so an unmeasured device can be priced with
    the kernels that libraries choose for its compute capability. They were fitted in alternation with those
    parameters, without the validation head layouts, to rows of A100, H100, H200, B200 and RTX PRO 6000 (vLLM
    0.14 and 0.24, TensorRT-LLM 1.0 and 1.3; the database of NVIDIA aiconfigurator, commit 095f58a), and
    rounded.
    """

    decode: DecodeKernels
    decode_fp8: DecodeKernels
    """Decode kernels for fp8 keys and values."""
    prefill: PrefillKernels
    prefill_fp8: PrefillKernels


STANDARD_PREFILL = PrefillKernels(flops=0.72, tile=0.0, part_tile=0.0, score_bytes=8.0, skips_masked=False)
"""Attention as three kernels: scores are written, read, written and read in 16 bits."""
STANDARD = DecodeKernels(item=0.5, merge_s=10e-6, packs_windows=False)
FLASH_ATTENTION_1_PREFILL = PrefillKernels(flops=0.36)
"""FlashAttention (Dao et al., 2022): half of FlashAttention-2's rate (Dao, 2023: 1.7 to 3.0 times slower)."""
FLASH_ATTENTION_1_SM90_PREFILL = PrefillKernels(flops=0.21)
FLASH_ATTENTION_2_SM90_PREFILL = PrefillKernels(flops=0.42)
"""FlashAttention-2 without Hopper's instructions: 1.5 to 2.0 times slower than 3 (Shah et al., 2024)."""
UNSPLIT = DecodeKernels(fixed_share=0.8, max_splits=1, max_group_size=1, packs_windows=False, single_row=True)
"""FlashAttention 1 and 2 as published: one SM processes the whole context of one query head."""
FLASH_DECODING = replace(UNSPLIT, max_splits=32, max_group_size=1e9, merge_s=2.5e-6)
"""Flash-Decoding (Dao et al., 2023): contexts are split over the SMs; another kernel merges the parts."""


def _named(decode: DecodeKernels, prefill: PrefillKernels) -> Kernels:
    """Returns kernels that compute in 16 bits, regardless of the cache dtype."""
    return Kernels(decode, decode, prefill, prefill)


CAPABILITIES = ("sm80", "sm89", "sm90", "sm100", "sm120")
CHOICES = {
    "standard": dict.fromkeys(CAPABILITIES, _named(STANDARD, STANDARD_PREFILL)),
    "flash_attention_1": {
        capability: _named(
            UNSPLIT, FLASH_ATTENTION_1_SM90_PREFILL if capability == "sm90" else FLASH_ATTENTION_1_PREFILL
        )
        for capability in CAPABILITIES
    },
    "flash_attention_2": {
        capability: _named(
            UNSPLIT, FLASH_ATTENTION_2_SM90_PREFILL if capability == "sm90" else FLASH_ATTENTION_2_PREFILL
        )
        for capability in CAPABILITIES
    },
    "flash_decoding": {
        capability: _named(
            FLASH_DECODING,
            FLASH_ATTENTION_2_SM90_PREFILL if capability == "sm90" else FLASH_ATTENTION_2_PREFILL,
        )
        for capability in CAPABILITIES
    },
    "flash_attention_3": {"sm90": _named(FLASH_ATTENTION_3, FLASH_ATTENTION_3_PREFILL)},
}
"""Published kernels by name and compute capability, used instead of a library's; not fitted to rows. Their
ratios come from the papers. FlashAttention-3 exists on sm90 only.
"""

KERNELS = {
    ("vllm", "sm80"): Kernels(
        FLASH_ATTENTION_2, FLASH_ATTENTION_2, FLASH_ATTENTION_2_PREFILL, FLASH_ATTENTION_2_PREFILL
    ),
    ("vllm", "sm89"): Kernels(
        FLASH_ATTENTION_2_SM120, FLASHINFER_FP8, FLASH_ATTENTION_2_SM120_PREFILL, FLASHINFER_FP8_PREFILL
    ),
    ("vllm", "sm90"): Kernels(
        FLASH_ATTENTION_3, FLASH_ATTENTION_3_FP8, FLASH_ATTENTION_3_PREFILL, FLASH_ATTENTION_3_FP8_PREFILL
    ),
    ("vllm", "sm100"): Kernels(TRTLLM_GEN, TRTLLM_GEN_FP8, TRTLLM_GEN_PREFILL, TRTLLM_GEN_FP8_PREFILL),
    ("vllm", "sm120"): Kernels(
        FLASH_ATTENTION_2_SM120, FLASHINFER_FP8, FLASH_ATTENTION_2_SM120_PREFILL, FLASHINFER_FP8_PREFILL
    ),
    ("trtllm", "sm80"): Kernels(XQA, XQA, FMHA_SM80_PREFILL, FMHA_SM80_PREFILL),
    ("trtllm", "sm89"): Kernels(XQA, XQA, FMHA_SM120_PREFILL, FMHA_SM89_FP8_PREFILL),
    ("trtllm", "sm90"): Kernels(XQA, XQA_SM90_FP8, FMHA_SM90_PREFILL, FMHA_SM90_FP8_PREFILL),
    ("trtllm", "sm100"): Kernels(
        TRTLLM_GEN_IN_TRTLLM, TRTLLM_GEN_IN_TRTLLM_FP8, FMHA_SM100_PREFILL, FMHA_SM100_FP8_PREFILL
    ),
    ("trtllm", "sm120"): Kernels(XQA, XQA_SM120_FP8, FMHA_SM120_PREFILL, FMHA_SM120_PREFILL),
}
"""Kernels by library and compute capability. sm80 has no fp8 arithmetic; sm120 gains nothing from it.

sm89 has the instructions of sm80 and the shared memory of sm120, so it runs FlashAttention-2 like sm120.
"""
KERNELS |= {(name, capability): kernels for name, of in CHOICES.items() for capability, kernels in of.items()}


TILE_QUERIES = 128
"""Queries of one tile of prefill attention."""

EXPONENTIALS_PER_SM_S = 45e9
"""Visible exponentials per SM and second: the unit computes 16 per clock, 29e9 at 1.8 GHz; products hide
some.
"""

UNPACK_OPERATIONS = 5
"""Operations of CUDA cores per 4-bit element of keys and values: mask, shift, convert, subtract, scale.

QServe: Lin et al., MLSys 2025, section on KV4 attention.
"""

L2_OVER_MEMORY = 1.5
"""Ratio of L2 to memory bandwidth, for query heads that read the same keys one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadLayout:
    """Attention heads of one rank."""

    num_heads: float
    num_kv_heads: float
    head_dim: int
    kv_bytes_per_element: float = 2.0
    """Bytes per element of the cache; 2: bf16; 1: fp8 (with other kernels); less: priced as fp8."""
    v_head_dim: int | None = None
    """Width of the values; None: the width of the keys."""
    windowed: bool = False
    """True for a sliding window: the caller passes the tokens and pairs inside it."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "kv_bytes_per_element"):
            check_finite(name, getattr(self, name))
        if self.num_heads < self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: must be <= num_heads={self.num_heads}; "
                "several query heads share a KV head, never the reverse"
            )

    @property
    def group_size(self) -> float:
        """Number of query heads per KV head."""
        return self.num_heads / self.num_kv_heads

    @property
    def key_and_value_dim(self) -> int:
        return self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.num_kv_heads * self.key_and_value_dim * self.kv_bytes_per_element

    @property
    def flops_per_pair(self) -> float:
        """FLOPs per query and key token, all heads: 4 heads head_dim for keys and values of equal width."""
        return 2.0 * self.num_heads * self.key_and_value_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCurve:
    """Performance of tuned attention kernels on one device.

    Defaults are medians over A100, H100, H200, B200 and RTX PRO 6000, with the kernels of an H100.
    """

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    decode_start_s: float = 9.5e-6
    """Seconds of a call with few short sequences: launch, start and drain."""
    decode_item_s: float = 3.65e-6
    """Seconds of one KV head (128 wide, bf16) of one sequence on one SM, with a context of at most one tile.
    """
    kv_bandwidth_share: float = 0.82
    """Share of the data-sheet bandwidth reached when streaming keys and values of long contexts."""
    prefill_start_s: float = 10e-6
    """Seconds of a call with one short prompt."""
    flops_share: float = 0.9
    """Share of the peak that the multiplications reach; exponentials are counted separately."""
    tile_s: float = 6.4e-6
    """Seconds of one tile of 128 queries of one head (128 wide) on one SM, in addition to its useful pairs.
    """

    def __post_init__(self) -> None:
        known = sorted({capability for _, capability in KERNELS})
        check_curve(self, capabilities=known, most_share=inf)


def kernels_of(library: str, curve: AttentionCurve) -> Kernels:
    """Returns the kernels that the library runs on such a chip. Raises ValueError for an unknown library."""
    if (library, curve.compute_capability) in KERNELS:
        return KERNELS[library, curve.compute_capability]
    known = sorted({name for name, _ in KERNELS} - CHOICES.keys())
    if library not in known and library not in CHOICES:
        raise ValueError(f"kernels={library}: must be one of {', '.join(known)}")
    able = sorted(capability for name, capability in KERNELS if name == library)
    raise ValueError(
        f"attention_kernels={library}: runs on {', '.join(able)} only, not on "
        f"{curve.compute_capability}; choose flash_attention_2 or flash_decoding"
    )


class DecodeAttention:
    """Decode attention of one layer; everything independent of the batch is computed once.

    rows: query rows of each sequence, including its draft tokens. Several rows add the time of their pairs,
    at the prefill rate: on an H100 with defaults, 32 query and 8 KV heads of 128, 64 sequences with 4,096
    tokens and 5 rows each take the 391 us of a decode for 1.075e9 bytes, plus 31 us for 1.31e6 pairs.
    """

    def __init__(
        self,
        heads: HeadLayout,
        device: Device,
        curve: AttentionCurve,
        kernels: str = "vllm",
        rows: int = 1,
        compute_dtype: str = "bf16",
    ) -> None:
        """Raises ValueError for an unknown kernel library, or, as `PrefillAttention`, for a dtype."""
        chosen = kernels_of(kernels, curve)
        call = chosen.decode if heads.kv_bytes_per_element >= 2 else chosen.decode_fp8
        splits = rows == 1 or not call.single_row
        packed = splits and heads.group_size <= call.max_group_size
        packed = packed and (call.packs_windows or not heads.windowed)
        alone = rows == 1 and (heads.group_size == 1 or not packed)
        item = call.single if alone and call.single is not None else call

        width = heads.key_and_value_dim / 256
        item_s = curve.decode_item_s * item.item * (item.fixed_share + (1 - item.fixed_share) * width)
        rows_per_pass = rows * (heads.group_size if packed else 1.0)
        if packed:
            item_s *= 1 + item.group_share * (min(ceil(rows_per_pass / 8), 4) - 1)
        if heads.windowed:
            item_s *= item.window_tiles
        tiles = ceil(rows_per_pass / TILE_QUERIES)
        self._item_s = item_s
        self._items_per_sm = tiles * (heads.num_kv_heads if packed else heads.num_heads) / device.num_sms
        self._parts_per_sm = self._items_per_sm * (item.max_splits if splits else 1.0)

        share = min(1.0, curve.kv_bandwidth_share * item.bandwidth)
        heads_per_pass = 1.0 if packed else heads.group_size
        passes = max(1.0, tiles * heads_per_pass / L2_OVER_MEMORY)
        token_s = passes * heads.kv_bytes_per_token / (device.memory_bandwidth_bytes_per_s * share)
        # Elements that are converted; fp8 elements take a byte each.
        converted = heads.num_kv_heads * heads.key_and_value_dim * (1.0 if packed else heads.group_size)
        if item.sm_bytes_per_s is not None:
            token_s = max(token_s, converted / (item.sm_bytes_per_s * device.num_sms))
        if heads.kv_bytes_per_element < 1 and "fp32" in device.peak_flops_per_s:
            operations_per_s = device.peak_flops_per_s["fp32"] / 2  # a multiply-add is one
            token_s = max(token_s, UNPACK_OPERATIONS * converted / operations_per_s)
        self._token_s = token_s

        self._start_s = curve.decode_start_s * call.start
        gathers = packed and rows == 1 and heads.group_size > 1 and heads.num_kv_heads > 1
        self._gather_s = call.gather_s if gathers else 0.0
        self._merge_s = item.merge_s
        self._window_merge_s = item.window_merge_s
        self._windowed = heads.windowed
        self._overlap = item.overlap
        self._pair_s = 0.0
        if rows > 1:
            self._pair_s = PrefillAttention(heads, device, curve, kernels, compute_dtype).pair_s
        self.beside_prefill = call.beside_prefill
        """Factor on the time of decodes in an iteration that also prefills (1: no slowdown)."""

    def lines(self, num_seqs: Any) -> Lines:
        """Returns lines (seconds, per KV token, per query-key pair, per row); the largest is the time."""
        some = smaller(num_seqs, 1.0)  # 0 sequences: 0 seconds
        waves = self._items_per_sm * num_seqs
        # The first wave is part of the start; on average half a wave is added for the last one.
        items_s = self._item_s * larger(waves - 0.5, 0.0)
        start_s = self._start_s * some
        if self._gather_s:
            start_s = start_s + self._gather_s * smaller(larger(num_seqs - 1.0, 0.0), 1.0)
        merged_s = start_s + self._merge_s * some
        whole_s = start_s + items_s
        if self._windowed:
            whole_s = larger(merged_s + items_s, merged_s + self._window_merge_s * smaller(waves, 1.0))
        token_s = self._token_s / self.busy_share(num_seqs)
        of_keys = (
            (whole_s, 0.0, 0.0, 0.0),
            (merged_s, token_s, 0.0, 0.0),
            (merged_s + self._overlap * items_s, self._overlap * token_s, 0.0, 0.0),
        )
        if not self._pair_s:
            return of_keys
        return (*of_keys, (merged_s, 0.0, self._pair_s / self.busy_share(num_seqs), 0.0))

    def busy_share(self, num_seqs: Any) -> Any:
        """Returns the share of the SMs with a part of a context."""
        return smaller(self._parts_per_sm * larger(num_seqs, 1.0), 1.0)

    def seconds(self, num_seqs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs sequences with context_tokens in total, new tokens included."""
        return highest(self.lines(num_seqs), context_tokens, context_tokens, num_seqs)


class PrefillAttention:
    """Prefill attention of one layer; everything independent of the batch is computed once."""

    def __init__(
        self,
        heads: HeadLayout,
        device: Device,
        curve: AttentionCurve,
        kernels: str = "vllm",
        compute_dtype: str = "bf16",
    ) -> None:
        """Chooses the kernels; fp8 kernels run if compute_dtype is fp8, or if keys and values are fp8.

        Raises ValueError for an unknown library of kernels, or a dtype that the device does not support.
        """
        chosen = kernels_of(kernels, curve)
        fp8 = compute_dtype == "fp8" or heads.kv_bytes_per_element < 2
        family = chosen.prefill_fp8 if fp8 else chosen.prefill
        # The gain of fp8 arithmetic is in the family's factor, relative to the peak of bf16.
        peak = device.peak_flops_per_s[
            device.compute_dtype("bf16" if compute_dtype == "fp8" else compute_dtype)
        ]
        share = curve.flops_share * family.flops
        pair_s = 2.0 * heads.key_and_value_dim / (peak * share) + 1 / (device.num_sms * EXPONENTIALS_PER_SM_S)
        pair_s += family.score_bytes / (device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share)
        self._skips_masked = family.skips_masked
        self.pair_s = heads.num_heads * pair_s
        """Seconds of a query-key pair, all heads, with all SMs busy."""
        self._key_s = family.chain * TILE_QUERIES * device.num_sms * pair_s

        width = heads.key_and_value_dim / 256
        tile_s = (
            curve.tile_s * family.tile * (family.tile_fixed_share + (1 - family.tile_fixed_share) * width)
        )
        tiles_s = heads.num_heads * tile_s / device.num_sms
        self._seq_s = family.part_tile * tiles_s

        bandwidth = device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share
        moved_s = family.kv_passes * 2.0 * heads.num_kv_heads * heads.key_and_value_dim / bandwidth
        self._context_s = heads.kv_bytes_per_token / bandwidth
        # The context includes the new tokens; their passes are already counted.
        self._token_s = tiles_s / TILE_QUERIES + moved_s - self._context_s
        if heads.windowed:
            self._token_s += family.window_keys * self.pair_s
        self._start_s = curve.prefill_start_s * family.start

    def seconds(self, num_seqs: Any, new_tokens: Any, pairs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs chunks; new tokens, causal pairs, cached + new tokens are sums."""
        are_many = ndarray in (type(num_seqs), type(new_tokens), type(pairs), type(context_tokens))
        smallest: Any = np.minimum if are_many else min
        largest: Any = np.maximum if are_many else max
        some = smallest(num_seqs, 1.0)  # 0 chunks: 0 seconds
        if not self._skips_masked:
            pairs = new_tokens * context_tokens / (num_seqs + 1.0 - some)
        # Keys of the last tile: the context, or with a window twice what a query sees on average.
        last_keys = smallest(context_tokens / (num_seqs + 1.0 - some), 2.0 * pairs / largest(new_tokens, 1.0))
        chain_s = self._key_s * last_keys
        work_s = (
            self._seq_s * num_seqs
            + self._token_s * new_tokens
            + self._context_s * context_tokens
            + self.pair_s * pairs
        )
        return self._start_s * some + largest(work_s + 0.5 * chain_s, chain_s)
