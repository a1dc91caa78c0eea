"""Keys and values of a layer in blocks, or latent rows, as RoPE writes them and attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types of quantised KV, and the largest value of each type."""


class PagedKv(NamedTuple):
    """Keys and values [N, P, K, D]: N blocks, P tokens per block, K KV heads, D head_dim.

    They have the queries' dtype, or are quantised to int8 or float8_e4m3fn (from sm_89 on) with contiguous
    float32 scales [N, P, K], by which the stored numbers are multiplied.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class LatentKv(NamedTuple):
    """Rows of multi-head latent attention [N, P, C]: N blocks, P tokens per block, C numbers of a token."""

    rows: torch.Tensor
