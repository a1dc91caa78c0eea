"""Keys and values of a layer in blocks, or latent rows, as RoPE writes them and attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

INT4 = torch.uint8
"""Type of a cache of 4-bit codes, two in each byte; see `kernels.int4_kv`."""
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, INT4: 15.0}
"""Types of quantised KV, and the largest value of each type."""


class PagedKv(NamedTuple):
    """Keys and values [N, P, K, D]: N blocks, P tokens per block, K KV heads, D head_dim.

    They have the queries' dtype, or are quantised to int8 or float8_e4m3fn (from sm_89 on) with contiguous
    float32 scales [N, P, K], by which the stored numbers are multiplied, or to 4 bits: uint8 [N, P, K, D / 2]
    with contiguous float16 [N, P, K, 2], see `kernels.int4_kv`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def head_dim(self) -> int:
        """Returns the elements of a head, of which 4-bit caches have two in a byte."""
        return self.keys.shape[3] * (2 if self.keys.dtype == INT4 else 1)

    @classmethod
    def zeros(cls, shape_NPKD: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PagedKv:
        """Returns caches of zeros for keys and values of this shape, with the scales of their dtype."""
        stored = (*shape_NPKD[:3], shape_NPKD[3] // 2) if dtype == INT4 else shape_NPKD
        caches = (torch.zeros(stored, dtype=dtype, device=device) for _ in range(2))
        if dtype not in QUANTISED:
            return cls(*caches)
        shape, scale_dtype = scales_of(shape_NPKD, dtype)
        return cls(*caches, *(torch.zeros(shape, dtype=scale_dtype, device=device) for _ in range(2)))


class LatentKv(NamedTuple):
    """Rows of multi-head latent attention [N, P, C]: N blocks, P tokens per block, C numbers of a token."""

    rows: torch.Tensor


def scales_of(shape_NPKD: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Returns the shape and the dtype of the scales of a quantised cache."""
    if dtype == INT4:
        return (*shape_NPKD[:3], 2), torch.float16
    return shape_NPKD[:3], torch.float32


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a token's key or value of one head, its scale included."""
    if dtype == INT4:
        return head_dim // 2 + 4
    return head_dim * dtype.itemsize + (4 if dtype in QUANTISED else 0)
