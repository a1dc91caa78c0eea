"""Toy device and toy iteration times, which can be computed by hand."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np

from hwmodels.device import Device, Link
from hwmodels.iterations import COMPONENTS

TICK_S = 0.125
"""Tick in seconds, a binary fraction: sums are exact, so that arrivals and iteration ends can coincide."""
UNEVEN_S = 0.1 / np.pi
"""Tick in seconds whose sums are rounded, and depend on the order of summation."""


TOY = Device(
    name="toy",
    memory_bytes=1.0,
    memory_bandwidth_bytes_per_s=1.0,
    peak_flops_per_s={"bf16": 1.0},
    num_sms=1,
    l2_bytes=1.0,
    tdp_w=2.0,
    idle_w=1.0,
    pcie=Link(name="PCIe", bandwidth_bytes_per_s=1e9, latency_s=0.0),
    price_usd_per_hour=1.0,
    price_source="none",
    source="none",
)


class ToyModel:
    """`IterationModel` in whole ticks: one, one more per 4 tokens, and one more per 32 context tokens.

    With `flat`, every iteration takes one tick.
    """

    peak_flops_per_s = 1.0
    peak_bytes_per_s = 1.0

    def __init__(self, tick_s: float = TICK_S, flat: bool = False) -> None:
        self.tick_s = tick_s
        self.flat = flat

    def seconds(self, shape: Any) -> Any:
        num_tokens = shape.decode_seqs + shape.prefill_tokens
        num_context = shape.decode_context_tokens + shape.prefill_context_tokens
        if shape.drafts is not None:
            num_tokens = num_tokens + shape.drafts.tokens + shape.drafts.drafted
            num_context = num_context + shape.drafts.pairs
        if shape.adapters is not None:  # a rank counts as one context token
            num_context = num_context + shape.adapters.ranks
        return self.tick_s * (1 + (0 if self.flat else 1) * (num_tokens // 4 + num_context // 32))

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        growth = range(num_context_tokens, num_context_tokens + num_seqs * num_iterations, num_seqs)
        more = 0 if self.flat else 1
        times_s = [self.tick_s * (1 + more * (num_seqs // 4 + num_context // 32)) for num_context in growth]
        return list(accumulate(times_s, initial=start_s))[1:]

    def breakdown(self, shape: Any) -> dict[str, Any]:
        return dict.fromkeys(COMPONENTS, 0.0) | {"gemm": self.seconds(shape)}

    def flops(self, shape: Any) -> Any:
        return shape.decode_seqs + shape.prefill_tokens

    def bytes_moved(self, shape: Any) -> Any:
        return shape.decode_context_tokens + shape.prefill_context_tokens
