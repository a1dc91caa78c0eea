"""Operators on systolic arrays: matrix products, attention and experts, from data-sheet figures.

Arrays compute padded products (`hwmodels.device`) while weights, keys and values stream from memory;
compilers double-buffer both, so the longer hides the shorter:

    t = start + max(padded FLOPs / (peak share), 0.4 us + bytes / (bandwidth share))

    product x[m, k] w[k, n]     weights stay: 2 pad(k, rows) pad(n, columns) max(m, rows)
                                outputs stay: 2 pad(m, rows) pad(n, columns) k
    decode attention per key and KV head, two such products with the query rows of its heads as m prefill
    attention per query-key pair, with padded head dimensions; half a tile of masked keys

TPU v5e (128 x 128, 197e12 FLOP/s, 819e9 bytes/s), default shares, bf16, m = 16, n = 7168, k = 4096:
2 x 4096 x 7168 x 128 = 7.52e9 FLOPs at 0.84 of the peak take 45.4 us; 58.95e6 bytes (weights and outputs) at
0.82 of the bandwidth 87.8 us: t = 2.4 us + 88.2 us = 90.6 us.

No such device was measured here. Not included: the exponentials of the softmax, which vector units compute in
parallel, and quantisation of activations, which compilers fuse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hwmodels.device import Device, SystolicArray
from hwmodels.exact import Lines, highest, larger, smaller
from hwmodels.model.weights import WeightFormat
from hwmodels.operators.attention import AttentionCurve, HeadLayout
from hwmodels.operators.gemm import (
    MEMORY_START_S,
    Floats,
    GemmCurve,
    element_bytes,
    streamed_bytes,
)
from hwmodels.operators.moe import MoeCurve
from hwmodels.operators.moe_routing import ExpertLayer, Routing, rank_loads


def array_of(device: Device) -> SystolicArray:
    """Returns the device's arrays. Raises ValueError if it has none."""
    if device.systolic is None:
        raise ValueError(f"systolic=None: {device.name} has no systolic arrays; give their shape")
    return device.systolic


def padded(size: Any, unit: int) -> Any:
    """Returns the sizes, rounded up to whole units."""
    return np.ceil(np.asarray(size, dtype=np.float64) / unit) * unit


def padded_flops(m: Any, n: Any, k: Any, array: SystolicArray) -> Any:
    """Returns the FLOPs that the arrays spend on x[m, k] w[k, n], including padding.

    128 x 128, weights stay: m = 1, n = 200, k = 100 take 2 x 128 x 256 x 128 = 8.4e6 FLOPs, not 40,000.
    """
    if array.outputs_stay:
        return 2 * padded(m, array.rows) * padded(n, array.columns) * k
    return 2 * larger(m, array.rows) * padded(n, array.columns) * padded(k, array.rows)


def systolic_gemm_seconds(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    weights: WeightFormat,
    device: Device,
    curve: GemmCurve,
    *,
    dtype: str = "bf16",
) -> Floats:
    """Returns seconds of one call, like `gemm_seconds`; m = 0 takes 0 s.

    Raises ValueError for a device without arrays, or a dtype that it does not support.
    """
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
    elements = element_bytes(weights, device, dtype)
    moved = streamed_bytes(m, n, k, elements, device, repeated=False)
    stream_s = MEMORY_START_S + moved / (device.memory_bandwidth_bytes_per_s * curve.bandwidth_share)
    compute = weights.compute_dtype(device, dtype)
    share = curve.flops_share_8bit if compute in ("fp8", "int8") else curve.flops_share
    compute_s = padded_flops(m, n, k, array_of(device)) / (device.peak_flops_per_s[compute] * share)
    return np.where(m > 0, curve.start_s + np.maximum(compute_s, stream_s), 0.0)


def padded_width(heads: HeadLayout, array: SystolicArray) -> float:
    """Returns the widths of a key and a value of one head, each padded to the array's rows."""
    value_dim = heads.key_and_value_dim - heads.head_dim
    return float(padded(heads.head_dim, array.rows) + padded(value_dim, array.rows))


class SystolicDecode:
    """Decode attention of one layer; rows: query rows of each sequence, including its draft tokens."""

    def __init__(
        self, heads: HeadLayout, device: Device, curve: AttentionCurve, dtype: str, rows: int = 1
    ) -> None:
        array = array_of(device)
        width = padded_width(heads, array)
        query_rows = larger(heads.group_size * rows, array.rows)
        peak = device.peak_flops_per_s[dtype] * curve.flops_share
        compute_s = 2 * heads.num_kv_heads * width * query_rows / peak
        bandwidth = device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share
        self._start_s = curve.decode_start_s
        self._token_s = max(float(compute_s), heads.kv_bytes_per_token / bandwidth)

    def lines(self, num_seqs: Any) -> Lines:
        """Returns the only line: seconds, per KV token, pair and row; every key is multiplied by all rows."""
        return ((self._start_s * smaller(num_seqs, 1.0), self._token_s, 0.0, 0.0),)

    def seconds(self, num_seqs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs sequences with context_tokens in total, new tokens included."""
        return highest(self.lines(num_seqs), context_tokens, context_tokens, num_seqs)


class SystolicPrefill:
    """Prefill attention of one layer."""

    def __init__(self, heads: HeadLayout, device: Device, curve: AttentionCurve, dtype: str) -> None:
        array = array_of(device)
        width = padded_width(heads, array)
        peak = device.peak_flops_per_s[dtype] * curve.flops_share
        bandwidth = device.memory_bandwidth_bytes_per_s * curve.kv_bandwidth_share
        self.pair_s = float(2 * heads.num_heads * width / peak)
        """Seconds of a query-key pair, all heads."""
        self._token_s = self.pair_s * array.rows / 2
        self._context_s = heads.kv_bytes_per_token / bandwidth
        self._start_s = curve.prefill_start_s

    def seconds(self, num_seqs: Any, new_tokens: Any, pairs: Any, context_tokens: Any) -> Any:
        """Returns seconds of num_seqs chunks; new tokens, causal pairs, cached + new tokens are sums."""
        compute_s = self.pair_s * pairs + self._token_s * new_tokens
        return self._start_s * smaller(num_seqs, 1.0) + larger(compute_s, self._context_s * context_tokens)


def systolic_moe_seconds(
    num_tokens: ArrayLike,
    layer: ExpertLayer,
    weights: WeightFormat,
    device: Device,
    curve: MoeCurve,
    *,
    dtype: str,
    routing: Routing,
) -> Floats:
    """Returns seconds of the routed experts of one layer on the busiest rank; see `moe_seconds`.

    Each expert with tokens is a pair of products with the experts' mean number of tokens as m; all their
    weights are read once.
    """
    loads = rank_loads(np.asarray(num_tokens, dtype=np.float64), layer, routing)
    array, compute = array_of(device), weights.compute_dtype(device, dtype)
    each = loads.assignments / np.maximum(loads.active_experts, 1e-9)
    hidden, inter, in_up = layer.hidden_size, layer.intermediate_size, layer.num_matrices - 1
    flops = padded_flops(each, in_up * inter, hidden, array) + padded_flops(each, hidden, inter, array)
    compute_s = loads.active_experts * flops / (device.peak_flops_per_s[compute] * curve.flops_share)
    read = loads.active_experts * layer.expert_weights * weights.bytes_per_weight
    stream_s = read / (device.memory_bandwidth_bytes_per_s * curve.weight_bandwidth_share)
    return np.asarray(2 * curve.kernel_s + np.maximum(compute_s, stream_s))
