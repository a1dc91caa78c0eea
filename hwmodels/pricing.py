"""Seconds of operators on a device.

`PricedOperator` is the definition: what one operator takes. `MergedPrices` is the sum over all of them with
the coefficients added up beforehand, for speed; tests hold the two equal, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device, Efficiency
from hwmodels.interconnect import Transfer, ring_all_gather, ring_all_reduce, tree_all_reduce
from hwmodels.iteration import IterationShape, Num
from hwmodels.ops import Collective, Operator

Counts = NDArray[np.float64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedOperator:
    """An operator with what its FLOPs, bytes and start cost on one device."""

    op: Operator
    s_per_flop: float
    s_per_byte: float
    start_s: float
    """Start and drain of the kernels of one call."""
    algorithms: tuple[Transfer, ...] = ()
    """Of a collective: the patterns it may use; the fastest for the message counts."""

    def seconds(self, shape: IterationShape, num_tokens: Num) -> Num:
        """All calls of an iteration that computes num_tokens (padding included).

        call = max(flops * s_per_flop, bytes * s_per_byte) + start; collective: min over algorithms + start.
        The LM head and what follows it are skipped where no row is sampled.
        """
        num_bytes = self.op.bytes_moved.of(shape, num_tokens)
        if self.algorithms:
            busy_s: Num = functools.reduce(
                np.minimum, (transfer.seconds(num_bytes) for transfer in self.algorithms)
            )
        else:
            flops = self.op.flops.of(shape, num_tokens)
            busy_s = np.maximum(self.s_per_flop * flops, self.s_per_byte * num_bytes)
        runs = np.minimum(shape.sampled_seqs, 1) if self.op.component == "lm_head" else 1
        return self.op.calls * (busy_s + self.start_s) * runs


def price_operators(
    operators: list[Operator], device: Device, dtype: str, num_ranks: int, efficiency: Efficiency
) -> list[PricedOperator]:
    """Data-sheet figures times the shares reached, per operator; one rank's work on one device."""
    peak, bandwidth = device.peak_flops_per_s[dtype], device.memory_bandwidth_bytes_per_s
    over_pcie = device.scale_up is None
    link_share = efficiency.pcie_bandwidth_share if over_pcie else efficiency.scale_up_bandwidth_share
    collective = device.link, num_ranks, link_share
    algorithms = {
        None: (),
        Collective.all_reduce: (ring_all_reduce(*collective), tree_all_reduce(*collective)),
        Collective.all_gather: (ring_all_gather(*collective),),
    }
    priced = []
    for op in operators:
        attends = op.component == "attention"
        flops_share = efficiency.attention_flops_share if attends else efficiency.gemm_flops_share
        bandwidth_share = efficiency.kv_bandwidth_share if attends else efficiency.stream_bandwidth_share
        kernel_s = efficiency.attention_kernel_s if attends else efficiency.kernel_s
        priced.append(
            PricedOperator(
                op=op,
                s_per_flop=1 / (peak * flops_share),
                s_per_byte=1 / (bandwidth * bandwidth_share),
                start_s=op.kernels * kernel_s,
                algorithms=algorithms[op.collective],
            )
        )
    return priced


class ByCount:
    """A function of a count, tabulated from 0 up: looking a number up takes 40 ns, computing it microseconds.

    Both answer with the float64 that the formula gives for an array of any length: equal to the last bit.
    """

    def __init__(self, formula: Callable[[Counts], Seconds], num_tabulated: int) -> None:
        self._formula = formula
        self._array = formula(np.arange(num_tabulated, dtype=np.float64))
        self._list: list[float] = self._array.tolist()

    def of(self, count: int) -> float:
        if count < len(self._list):
            return self._list[count]
        return float(self._formula(np.array([count], dtype=np.float64))[0])

    def of_many(self, counts: NDArray[np.intp]) -> Seconds:
        if counts.size and counts.max() >= len(self._list):
            return self._formula(counts.astype(np.float64))
        return self._array.take(counts)


class Roof(NamedTuple):
    """max(flops_s * x, fixed_s + bytes_s * x), x = tokens or sampled rows."""

    flops_s: float
    fixed_s: float
    bytes_s: float

    def seconds(self, count: Counts) -> Seconds:
        return np.maximum(self.flops_s * count, self.fixed_s + self.bytes_s * count)


class RingOrTree(NamedTuple):
    """min(ring_fixed_s + ring_s * tokens, tree_fixed_s + tree_s * tokens)."""

    ring_fixed_s: float
    ring_s: float
    tree_fixed_s: float
    tree_s: float

    def seconds(self, num_tokens: Counts) -> Seconds:
        ring_s = self.ring_fixed_s + self.ring_s * num_tokens
        return np.minimum(ring_s, self.tree_fixed_s + self.tree_s * num_tokens)


class MergedPrices:
    """The sum of `PricedOperator.seconds` over all operators.

    `tokens_s` and `sampled_s` depend on the numbers of tokens and of sampled rows. Attention comes on top:
    decode_context_s a context token of the decodes, and for chunks max(pair_s * pairs,
    prefill_context_s * context tokens).
    """

    def __init__(self, priced: list[PricedOperator]) -> None:
        self.fixed_s = 0.0
        self.token_s = 0.0
        self.roofs: list[Roof] = []
        self.all_reduces: list[RingOrTree] = []
        self.sampling_s = 0.0
        self.row_s = 0.0
        self.row_roofs: list[Roof] = []
        self.decode_context_s = 0.0
        self.pair_s = 0.0
        self.prefill_context_s = 0.0
        merge = {
            "gemm": self._merge_gemm,
            "attention": self._merge_attention,
            "communication": self._merge_all_reduce,
            "elementwise": self._merge_stream,
            "lm_head": self._merge_lm_head,
        }
        for operator in priced:
            merge[operator.op.component](operator, operator.op.calls)

    def tokens_s(self, num_tokens: Counts) -> Seconds:
        """GEMMs, elementwise operators, all-reduces, and the start of every kernel."""
        seconds = self.fixed_s + self.token_s * num_tokens
        for roof in self.roofs:
            seconds = seconds + roof.seconds(num_tokens)
        for reduction in self.all_reduces:
            seconds = seconds + reduction.seconds(num_tokens)
        return seconds

    def sampled_s(self, num_rows: Counts) -> Seconds:
        """LM head, gathering of logits, sampling."""
        seconds = self.sampling_s + self.row_s * num_rows
        for roof in self.row_roofs:
            seconds = seconds + roof.seconds(num_rows)
        return seconds * np.minimum(num_rows, 1)

    def _merge_gemm(self, priced: PricedOperator, calls: int) -> None:
        self.fixed_s += calls * priced.start_s
        self.roofs.append(
            Roof(
                calls * priced.s_per_flop * priced.op.flops.per_token,
                calls * priced.s_per_byte * priced.op.bytes_moved.fixed,
                calls * priced.s_per_byte * priced.op.bytes_moved.per_token,
            )
        )

    def _merge_stream(self, priced: PricedOperator, calls: int) -> None:
        self.fixed_s += calls * priced.start_s
        self.token_s += calls * priced.s_per_byte * priced.op.bytes_moved.per_token

    def _merge_attention(self, priced: PricedOperator, calls: int) -> None:
        flop_s, byte_s = calls * priced.s_per_flop, calls * priced.s_per_byte
        flops, num_bytes = priced.op.flops, priced.op.bytes_moved
        self.fixed_s += calls * priced.start_s
        self.decode_context_s += max(
            flop_s * flops.per_decode_context_token, byte_s * num_bytes.per_decode_context_token
        )
        self.pair_s += flop_s * flops.per_prefill_pair
        self.prefill_context_s += byte_s * num_bytes.per_prefill_context_token

    def _merge_all_reduce(self, priced: PricedOperator, calls: int) -> None:
        ring, tree = priced.algorithms
        num_bytes = calls * priced.op.bytes_moved.per_token
        self.fixed_s += calls * priced.start_s
        self.all_reduces.append(
            RingOrTree(
                calls * ring.fixed_s,
                ring.s_per_byte * num_bytes,
                calls * tree.fixed_s,
                tree.s_per_byte * num_bytes,
            )
        )

    def _merge_lm_head(self, priced: PricedOperator, calls: int) -> None:
        flops, num_bytes = priced.op.flops, priced.op.bytes_moved
        self.sampling_s += calls * priced.start_s
        if priced.op.collective is not None:
            (gather,) = priced.algorithms
            self.sampling_s += calls * gather.fixed_s
            self.row_s += calls * gather.s_per_byte * num_bytes.per_sampled_seq
        else:
            self.row_roofs.append(
                Roof(
                    calls * priced.s_per_flop * flops.per_sampled_seq,
                    calls * priced.s_per_byte * num_bytes.fixed,
                    calls * priced.s_per_byte * num_bytes.per_sampled_seq,
                )
            )
