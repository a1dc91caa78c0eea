"""Families of attention kernels: how each differs from the others, on every device alike.

Factors multiply the figures of a device (`AttentionCurve`), so that a device that was never measured can be
priced with the kernels that libraries choose for its compute capability. They were fitted in turns with those
figures, validation head layouts left out, to rows of A100, H100, H200, B200 and RTX PRO 6000 (vLLM 0.14 and
0.24, TensorRT-LLM 1.0 and 1.3; the database of NVIDIA aiconfigurator, commit 095f58a), and rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeKernels:
    """One family of decode kernels; for the terms see `hwmodels.operators.attention`."""

    start: float = 1.0
    """Times the device's decode_start_s."""
    item: float = 1.0
    """Times the device's decode_item_s."""
    fixed_share: float = 0.6
    """Of item_s at head dimension 128, what does not grow with the head dimension."""
    group_share: float = 0.1
    """Added to an item, as a share, for every further 8 query heads that share the KV head."""
    bandwidth: float = 1.0
    """Times the device's kv_bandwidth_share."""
    sm_bytes_per_s: float | None = None
    """Of keys and values that one SM converts (fp8 to bf16); None: conversion hides."""
    merge_s: float = 0.0
    """Merging the parts of split contexts."""
    max_splits: float = 32.0
    """Parts that one item's context is cut into at most, each on one SM; 1: not split."""
    overlap: float = 0.6
    """k above: 0.5 where items and stream hide each other fully, 1 not at all."""
    window_tiles: float = 1.0
    """Times an item of a sliding window: its start is not aligned, and one tile more is met."""
    window_merge_s: float = 0.0
    """Of a window, at least one item an SM: split as though the whole context were attended to."""
    packs_windows: bool = True
    """Whether the query heads of a group still share one pass over the keys under a window."""
    gather_s: float = 0.0
    """Rearranging queries by KV head in a kernel of its own, for two sequences and more."""
    max_group_size: float = 1e9
    """Larger groups do not share a pass over the keys."""
    single: DecodeKernels | None = None
    """Items and stream where no heads share a pass, if that is another kernel."""
    beside_prefill: float = 1.0
    """Times decodes in an iteration that prefills too: one call, neither packed nor split for them."""


FLASH_ATTENTION_2 = DecodeKernels(
    fixed_share=0.8, max_splits=11, gather_s=6e-6, packs_windows=False, beside_prefill=1.6
)
"""vLLM on sm80. beside_prefill: layers timed inside vLLM on RTX 4090 and RTX PRO 6000, 1.2 to 2.2."""
FLASH_ATTENTION_2_SM120 = replace(FLASH_ATTENTION_2, item=1.45, fixed_share=1.0, max_splits=32)
"""vLLM on sm120: half the shared memory, so fewer items an SM at a time."""
FLASH_ATTENTION_3 = DecodeKernels(merge_s=2.5e-6, overlap=0.85, window_tiles=1.6)
"""vLLM on sm90."""
FLASH_ATTENTION_3_FP8 = replace(
    FLASH_ATTENTION_3, start=1.2, fixed_share=0.35, overlap=0.95, sm_bytes_per_s=18e9
)
"""The same over fp8 keys and values, which it transposes and scales on the way in."""
FLASHINFER_FP8 = DecodeKernels(start=1.35, max_splits=75)
"""vLLM on sm120, fp8 keys and values."""
TRTLLM_GEN = DecodeKernels(item=0.5, group_share=0.3)
"""sm100: vLLM, through FlashInfer."""
TRTLLM_GEN_FP8 = replace(TRTLLM_GEN, item=0.4)
TRTLLM_GEN_IN_TRTLLM = replace(TRTLLM_GEN, start=1.2, group_share=0.6)
"""sm100: TensorRT-LLM, whose operator does some more around the same kernels."""
TRTLLM_GEN_IN_TRTLLM_FP8 = replace(TRTLLM_GEN_IN_TRTLLM, item=0.4)
MASKED_MULTI_HEAD = DecodeKernels(item=0.39, fixed_share=0.9, overlap=0.72, bandwidth=1.1, max_splits=130)
"""TensorRT-LLM before sm100: every query head on its own."""
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
"""TensorRT-LLM before sm100: grouped heads."""
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
"""The same in fp8 arithmetic, on sm90 only."""
XQA_SM120_FP8 = replace(XQA, max_splits=1.5, overlap=0.8, window_merge_s=1e-6, window_tiles=1.3)
"""The same over fp8 on sm120: contexts are hardly split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillKernels:
    """One family of prefill kernels; for the terms see `hwmodels.operators.attention`."""

    start: float = 1.0
    """Times the device's prefill_start_s."""
    flops: float = 1.0
    """Times the device's flops_share."""
    tile: float = 1.0
    """Times the device's tile_s."""
    tile_fixed_share: float = 0.6
    """Of tile_s at head dimension 128, what does not grow with the head dimension."""
    part_tile: float = 0.3
    """Tiles that a chunk costs beyond one for each 128 queries: its last one is not full."""
    kv_passes: float = 2.0
    """Times that keys and values (in bf16) of the new tokens are moved: into the cache, and out again."""
    chain: float = 0.75
    """Time of one tile and key, alone on its SM, over what it would be with all SMs busy."""
    window_keys: float = 128.0
    """Keys outside the window that a tile of queries meets, on average a query."""


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
"""In fp8 arithmetic; the passes stand for the conversions around the call too."""
FMHA_SM80_PREFILL = PrefillKernels(
    start=1.12, flops=0.56, tile=1.25, kv_passes=1.5, chain=1.0, window_keys=270.0
)
"""TensorRT-LLM, as all below."""
FMHA_SM90_PREFILL = replace(FMHA_SM80_PREFILL, start=1.5, flops=0.78)
FMHA_SM90_FP8_PREFILL = replace(FMHA_SM90_PREFILL, flops=1.15, kv_passes=0.8, window_keys=700.0)
FMHA_SM100_PREFILL = PrefillKernels(
    start=1.42, flops=0.82, tile=0.88, part_tile=0.4, chain=1.4, window_keys=210.0
)
FMHA_SM100_FP8_PREFILL = replace(FMHA_SM100_PREFILL, flops=1.06, kv_passes=0.75)
FMHA_SM120_PREFILL = PrefillKernels(
    start=1.1, flops=0.53, tile=1.65, tile_fixed_share=0.0, kv_passes=1.7, chain=0.46, window_keys=80.0
)


class Kernels(NamedTuple):
    """What a library runs on one kind of chip."""

    decode: DecodeKernels
    decode_fp8: DecodeKernels
    """fp8 keys and values."""
    prefill: PrefillKernels
    prefill_fp8: PrefillKernels


KERNELS = {
    ("vllm", "sm80"): Kernels(
        FLASH_ATTENTION_2, FLASH_ATTENTION_2, FLASH_ATTENTION_2_PREFILL, FLASH_ATTENTION_2_PREFILL
    ),
    ("vllm", "sm90"): Kernels(
        FLASH_ATTENTION_3, FLASH_ATTENTION_3_FP8, FLASH_ATTENTION_3_PREFILL, FLASH_ATTENTION_3_FP8_PREFILL
    ),
    ("vllm", "sm100"): Kernels(TRTLLM_GEN, TRTLLM_GEN_FP8, TRTLLM_GEN_PREFILL, TRTLLM_GEN_FP8_PREFILL),
    ("vllm", "sm120"): Kernels(
        FLASH_ATTENTION_2_SM120, FLASHINFER_FP8, FLASH_ATTENTION_2_SM120_PREFILL, FLASHINFER_FP8_PREFILL
    ),
    ("trtllm", "sm80"): Kernels(XQA, XQA, FMHA_SM80_PREFILL, FMHA_SM80_PREFILL),
    ("trtllm", "sm90"): Kernels(XQA, XQA_SM90_FP8, FMHA_SM90_PREFILL, FMHA_SM90_FP8_PREFILL),
    ("trtllm", "sm100"): Kernels(
        TRTLLM_GEN_IN_TRTLLM, TRTLLM_GEN_IN_TRTLLM_FP8, FMHA_SM100_PREFILL, FMHA_SM100_FP8_PREFILL
    ),
    ("trtllm", "sm120"): Kernels(XQA, XQA_SM120_FP8, FMHA_SM120_PREFILL, FMHA_SM120_PREFILL),
}
"""By library and compute capability. sm80 has no fp8 arithmetic; sm120 gains nothing from it on average."""
