"""Families of attention kernels: their differences, which are equal on every device.

Factors multiply the figures of a device (`AttentionCurve`), so that a device that was never measured can be
priced with the kernels that libraries choose for its compute capability. They were fitted in turns with those
figures, without validation head layouts, to rows of A100, H100, H200, B200 and RTX PRO 6000 (vLLM 0.14 and
0.24, TensorRT-LLM 1.0 and 1.3; the database of NVIDIA aiconfigurator, commit 095f58a), and rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


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
    """Share added to an item for every further 8 query heads that share the KV head."""
    bandwidth: float = 1.0
    """Factor on the device's kv_bandwidth_share."""
    sm_bytes_per_s: float | None = None
    """Bytes/s of keys and values that one SM converts (fp8 to bf16); None: conversion is hidden."""
    merge_s: float = 0.0
    """Seconds to merge the parts of split contexts."""
    max_splits: float = 32.0
    """Largest number of parts of one item's context, each on one SM; 1: not split."""
    overlap: float = 0.6
    """The factor k above: 0.5 if items and stream hide each other completely, 1 if not at all."""
    window_tiles: float = 1.0
    """Factor on an item of a sliding window: its start is not aligned, so one more tile is read."""
    window_merge_s: float = 0.0
    """Merge seconds of a window, at least one item per SM: split as if the whole context were attended to."""
    packs_windows: bool = True
    """True if the query heads of a group still share one pass over the keys under a window."""
    gather_s: float = 0.0
    """Seconds of a separate kernel that rearranges queries by KV head, for two sequences and more."""
    max_group_size: float = 1e9
    """Largest group that shares a pass over the keys."""
    single: DecodeKernels | None = None
    """Kernel for items and stream if no heads share a pass; None: the same kernel."""
    beside_prefill: float = 1.0
    """Factor on decodes in an iteration that also prefills: one call, neither packed nor split for them."""
    single_row: bool = False
    """True if heads share a pass and contexts are split only for sequences of one row, without drafts."""


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
"""Decode kernels of TensorRT-LLM on sm100; its operator does more around the same kernels."""
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
    """Tiles that a chunk costs beyond one per 128 queries, because its last one is not full."""
    kv_passes: float = 2.0
    """Number of moves of keys and values (in bf16) of the new tokens: into the cache, and out again."""
    chain: float = 0.75
    """Time of one tile and key, alone on its SM, over its time with all SMs busy."""
    window_keys: float = 128.0
    """Keys outside the window that a tile of queries reads, average per query."""
    score_bytes: float = 0.0
    """Bytes that each query-key pair of a head moves through memory: scores and probabilities. 0: none."""
    skips_masked: bool = True
    """Whether tiles of masked pairs are left out; false: every query is multiplied with the whole context."""


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
"""In fp8 arithmetic, from which sm89 gains what sm90 does; no row measures it."""


class Kernels(NamedTuple):
    """Kernels that a library runs on one kind of chip."""

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
    """Returns kernels that compute in 16 bits, whatever the type of the cache."""
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
"""Published kernels by name and compute capability, in place of those of a library; not fitted to rows.

Their ratios are those of the papers. FlashAttention-3 exists on sm90 only.
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

sm89 has the instructions of sm80 and the shared memory of sm120, so it runs FlashAttention-2 as sm120 does.
"""
KERNELS |= {(name, capability): kernels for name, of in CHOICES.items() for capability, kernels in of.items()}
