"""Block formats of ggml: weights and bytes per block, and the dequantisation of its bytes.

A block is 32 weights (256 in the K formats) with their own scales. Each function takes uint8 [blocks, bytes]
and returns fp32 [blocks, weights]. d: scale, m: minimum, both fp16; q: the stored number; low nibbles come
first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _q4_0(blocks: Bytes) -> Floats:
    """Dequantises d, 16 bytes of nibbles: d (q - 8)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    """Dequantises d, m, 16 bytes of nibbles: d q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """Dequantises d, 4 bytes of fifth bits, 16 bytes of nibbles: d (q - 16)."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + 16 * _bits(blocks[:, 2:6]) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    """Dequantises d, m, 4 bytes of fifth bits, 16 bytes of nibbles: d q + m."""
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) + 16 * _bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """Dequantises d, 32 int8: d q."""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Bytes) -> Floats:
    """Dequantises d, m, 12 bytes of 6-bit scales and minima of 8 runs, 128 bytes of nibbles: d s q - m n."""
    return _with_scales(blocks, _nibbles_by_32(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    """Dequantises Q4_K's layout with 32 bytes of fifth bits before the nibbles.

    Bit j of byte l belongs to weight l of run j.
    """
    high = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1  # [blocks, l, j]
    return _with_scales(
        blocks, _nibbles_by_32(blocks[:, 48:]) + 16 * high.transpose(0, 2, 1).astype(np.float32)
    )


def _q6_k(blocks: Bytes) -> Floats:
    """Dequantises 128 bytes of nibbles, 64 of upper bit pairs, 16 int8 scales of 16 weights, d: d s (q - 32).

    Each half of a block has 4 runs of 32 weights: low nibbles of 64 bytes, then their high nibbles; run j's
    upper bits are pair j of the half's 32 bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * q).reshape(-1, 256)


class BlockFormat(NamedTuple):
    """Name, weights and bytes of a block, and its dequantisation (None: plain floats)."""

    name: str
    num_weights: int
    num_bytes: int
    dequantise: Callable[[Bytes], Floats] | None


FORMATS = {
    0: BlockFormat("F32", 1, 4, None),
    1: BlockFormat("F16", 1, 2, None),
    2: BlockFormat("Q4_0", 32, 18, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, None),
}
"""Block formats by their numbers in GGUF files."""

UNSUPPORTED = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Names of unsupported formats, for the error message."""


def _half(blocks: Bytes, start: int) -> Floats:
    """Returns the fp16 at byte `start` of each block as fp32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Floats:
    """Unpacks [blocks, n] to [blocks, 2 n]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _nibbles_by_32(packed: Bytes) -> Floats:
    """Unpacks [blocks, 128] to [blocks, 8, 32]: of each 32 bytes the low nibbles, then the high ones."""
    return _nibbles(packed.reshape(-1, 32)).reshape(-1, 8, 32)


def _bits(packed: Bytes) -> Floats:
    """Unpacks [blocks, n] to [blocks, 8 n], lowest bit first."""
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.float32)


def _with_scales(blocks: Bytes, q: Floats) -> Floats:
    """Computes d s q - m n for q [blocks, 8, 32]; scales s and minima n are 6 bits each, in bytes 4 to 15.

    Of those 12 bytes, 0-3 hold s of runs 0-3 and 4-7 their n; 8-11 hold the low four bits of runs 4-7 (s low,
    n high), whose upper two bits are the top bits of bytes 0-3 (s) and 4-7 (n).
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1).astype(np.float32)
    d, m = _half(blocks, 0) * scales, _half(blocks, 2) * minima  # [blocks, 8]
    return (d[:, :, None] * q - m[:, :, None]).reshape(-1, 256)
