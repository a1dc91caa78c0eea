"""Lower bounds of the time of each measured row, from the data sheet.

    t >= max(FLOPs / peak, (bytes - L2) / memory bandwidth, bytes on the link / link bandwidth)

Data that fits the L2 cache may never come from memory, because benchmarks repeat one call. Rows below the
bound are wrong, most often in their unit, and are not used. Bounds exclude everything that depends on the
kernel, so no kernel can beat them: for a module with projections they count only the attention, and for
expert parallelism a rank's even share. Columns are those of the fits of the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.fitting import gemm, moe
from hwmodels.fitting.attention import decode_context, windows
from hwmodels.fitting.robust import Floats
from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.mla import MlaHeads

Rows = Mapping[str, Any]

TOO_SLOW = 100.0
"""Factor on the lower bounds of large rows: a table that exceeds it is assumed to have a wrong unit.

Of the known tables (aiconfigurator's on five devices, LLMServingSim's, Vidur's) the worst, experts on an
H100, takes 14 times as long; milliseconds or nanoseconds are off by 1,000.
"""

LARGE_S = 10e-6
"""Lower bound in seconds above which a row is large: launches no longer dominate its time."""


def slowness(seconds: Floats, least_s: Floats) -> float:
    """Returns the median ratio of measured time to lower bound over the large rows; 1 if no row is large."""
    large = least_s >= LARGE_S
    return float(np.median(seconds[large] / least_s[large])) if large.any() else 1.0


def least_gemm_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of GEMMs: 2 m n k FLOPs; weights, activations and outputs moved once each."""
    m, n, k = (numbers(rows, name) for name in ("m", "n", "k"))
    formats = [WEIGHT_FORMATS[gemm.FORMATS.get(name, name)] for name in texts(rows, "dtype")]
    compute = [weights.compute_dtype(device, "bf16") for weights in formats]
    weight_bytes = np.array([weights.bytes_per_weight for weights in formats])
    input_bytes = np.array([DTYPE_BYTES[dtype] for dtype in compute])
    out_bytes = DTYPE_BYTES[device.compute_dtype("bf16")]
    moved = n * k * weight_bytes + m * k * input_bytes + m * n * out_bytes
    return np.maximum(at_peak(2 * m * n * k, compute, device), from_memory(moved, device))


def least_decode_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of decode: keys and values read once, tokens x KV heads x 2 head_dim elements."""
    width = 2 * numbers(rows, "num_kv_heads") * numbers(rows, "head_dim")
    return from_memory(decode_context(rows) * width * cache_bytes(rows), device)


def least_prefill_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of prefill: 4 head_dim FLOPs per head and attended query-key pair."""
    length = numbers(rows, "seq_len")
    seen = np.minimum(windows(rows), length)
    pairs = numbers(rows, "batch_size") * (seen * (seen + 1) / 2 + (length - seen) * seen)
    compute = attention_dtypes(rows, "attn_dtype", device)
    return at_peak(4 * numbers(rows, "num_heads") * numbers(rows, "head_dim") * pairs, compute, device)


def least_mla_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of MLA.

    Decode: latent vectors of all contexts read once. Prefill: 2 (d + R + v) FLOPs per head and pair.
    """
    heads = MlaHeads(num_heads=1)
    num_seqs, new, context = (numbers(rows, name) for name in ("batch_size", "seq_len", "kv_len"))
    latent = num_seqs * context * (heads.kv_lora_rank + heads.rope_head_dim) * cache_bytes(rows)
    pairs = num_seqs * new * (context - new + (new + 1) / 2)
    width = heads.nope_head_dim + heads.rope_head_dim + heads.v_head_dim
    compute = attention_dtypes(rows, "mla_dtype", device)
    prefill_s = at_peak(2 * numbers(rows, "num_heads") * width * pairs, compute, device)
    is_prefill = np.array([phase == "prefill" for phase in texts(rows, "phase")])
    return np.where(is_prefill, prefill_s, from_memory(latent, device))


def least_moe_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of fused MoE layers: FLOPs of the tokens' experts, an even share per rank."""
    compute = [moe.FORMATS[name].compute_dtype(device, "bf16") for name in texts(rows, "dtype")]
    gated = [
        pair not in moe.PLAIN_UP
        for pair in zip(numbers(rows, "hidden_size"), numbers(rows, "inter_size"), strict=True)
    ]
    weights = numbers(rows, "hidden_size") * numbers(rows, "inter_size") * np.where(gated, 3, 2)
    ranks = numbers(rows, "moe_tp_size") * numbers(rows, "moe_ep_size")
    return at_peak(2 * numbers(rows, "num_tokens") * numbers(rows, "topk") * weights / ranks, compute, device)


def least_collective_seconds(rows: Rows, device: Device) -> Floats:
    """Returns the bound of collectives: a rank receives (p - 1) / p of n bytes over its link."""
    ranks = numbers(rows, "num_gpus")
    return (ranks - 1) / ranks * numbers(rows, "bytes") / device.link.bandwidth_bytes_per_s


def at_peak(flops: Floats, compute: list[str], device: Device) -> Floats:
    """Returns seconds at the peak of each row's dtype."""
    return np.asarray(flops / np.array([device.peak_flops_per_s[dtype] for dtype in compute]))


def from_memory(num_bytes: Floats, device: Device) -> Floats:
    """Returns seconds at full memory bandwidth for the bytes that do not fit the L2 cache."""
    return np.maximum(num_bytes - device.l2_bytes, 0) / device.memory_bandwidth_bytes_per_s


def attention_dtypes(rows: Rows, name: str, device: Device) -> list[str]:
    """Returns the compute dtype of each row; fp8 if keys and values are fp8, because kernels may use it."""
    fp8 = "fp8" if "fp8" in device.peak_flops_per_s else device.compute_dtype("bf16")
    either = zip(texts(rows, name), texts(rows, "kv_dtype"), strict=True)
    return [fp8 if "fp8" in pair else device.compute_dtype("bf16") for pair in either]


def cache_bytes(rows: Rows) -> Floats:
    """Returns the bytes per element of the KV cache of each row."""
    return np.array([1.0 if name == "fp8" else 2.0 for name in texts(rows, "kv_dtype")])


def numbers(rows: Rows, name: str) -> Floats:
    """Returns a column as float64."""
    return np.asarray(rows[name], dtype=np.float64)


def texts(rows: Rows, name: str) -> list[str]:
    """Returns a column as strings."""
    return [str(value) for value in np.asarray(rows[name]).tolist()]
