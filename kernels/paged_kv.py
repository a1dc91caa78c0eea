"""Keys and values of a layer in blocks, as RoPE writes them and attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Types that store KV with scales, and the largest value that a code stands for."""


class PagedKv(NamedTuple):
    """Keys and values [N, P, K, D]: N blocks, P tokens per block, K KV heads, D head_dim.

    They have the queries' dtype, or int8 or float8_e4m3fn (from sm_89) with contiguous float32 scales [N, P,
    K], by which a stored number is multiplied.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
