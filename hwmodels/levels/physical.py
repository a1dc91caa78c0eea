"""Plausibility checks of measured profiles: refuses rows that are faster than the data sheet allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hwmodels.device import Device
from hwmodels.fitting.limits import TOO_SLOW, slowness
from hwmodels.levels.profile import ATTENTION_SIZES, Floats, Rows
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Ranks, share_of, weight_format

PHYSICAL_SHARE = 0.8
"""Rows faster than this share of the data sheet's limit are refused; boost clocks shorten limits slightly."""


def check_physical(rows: Rows, *, model: ModelSpec, device: Device, tensor_parallel_size: int = 1) -> None:
    """Raises ValueError for the first row of a profile that is faster than the device can be.

    A matrix product takes at least 2 m k n / peak, and at least the bytes of its weights beyond L2 divided by
    the memory bandwidth. Attention takes at least the time of its FLOPs, and of the keys and values that it
    reads (`least_attention_seconds`). Rows of the model's named matrices (qkv_proj, o_proj, gate_up_proj,
    down_proj; lm_head) and of attention are checked; other rows are not. The checks detect milliseconds or
    seconds in a column of microseconds, and also nanoseconds: operators with large rows that exceed
    `TOO_SLOW` times their lower bound.
    """
    names = np.asarray(rows["operator"])
    for name, (size, limit_s) in _limits(rows, model, device, tensor_parallel_size).items():
        own = np.flatnonzero(names == name)
        latency = np.asarray(rows["latency_us"], dtype=np.float64)[own]
        if (wrong := latency < PHYSICAL_SHARE * 1e6 * limit_s).any():
            first = int(np.argmax(wrong))
            raise ValueError(
                f"profile, row {own[first]} ({name}, {size[first]:g} rows): latency_us="
                f"{latency[first]:g}: {device.name} cannot do it in less than {1e6 * limit_s[first]:.3g} us; "
                "check the unit, the device and the model"
            )
        if (factor := slowness(1e-6 * latency, limit_s)) > TOO_SLOW:
            raise ValueError(
                f"profile, {name}: latency_us: large rows take {factor:,.0f} times as long as {device.name} "
                f"needs at the least (median; must be <= {TOO_SLOW:g}); "
                "check the unit, the device and the model"
            )


def least_attention_seconds(
    rows: Mapping[str, Any], *, model: ModelSpec, device: Device, tensor_parallel_size: int = 1
) -> Floats:
    """Returns the lower bound of one layer's attention for each row of a profile, on one rank.

        max(4 heads head_dim pairs / peak, (KV tokens x their bytes - L2) / memory bandwidth)

    Pairs are query-key pairs under the mask. With several kinds of layers the fastest counts. The bound of
    latent and linear attention is 0. KV in fp8 may be multiplied in fp8.
    """
    layers = [block.attention for block in model.blocks]
    chunk, cached, seqs, context = (np.asarray(rows[name], dtype=np.float64) for name in ATTENTION_SIZES)
    in_fp8 = model.kv_dtype == "fp8" and "fp8" in device.peak_flops_per_s
    peak = device.peak_flops_per_s["fp8" if in_fp8 else device.compute_dtype(model.dtype)]
    least_s = np.full(len(chunk), np.inf)
    for layer in layers:
        pair_flops = layer.least_pair_flops(tensor_parallel_size)
        if not pair_flops:
            return np.zeros(len(chunk))
        window = layer.window or np.inf
        decoded = seqs * np.minimum(context, window)
        pairs = decoded + _pairs(cached + chunk, window) - _pairs(cached, window)
        tokens = decoded + np.where(chunk > 0, np.minimum(cached + chunk, window), 0)
        kv_bytes = tokens * layer.kv_bytes_per_token(model.kv_dtype, tensor_parallel_size)
        from_memory_s = np.maximum(kv_bytes - device.l2_bytes, 0) / device.memory_bandwidth_bytes_per_s
        computed_s = pair_flops * pairs / peak
        least_s = np.minimum(least_s, np.maximum(computed_s, from_memory_s))
    return least_s


def _pairs(length: Floats, window: float) -> Floats:
    """Returns the attended pairs of the first `length` tokens; each token also attends to itself."""
    ramp = np.minimum(length, window)
    inside = ramp * (ramp + 1) / 2
    return np.asarray(inside if np.isinf(window) else inside + (length - ramp) * window)


def _limits(
    rows: Rows, model: ModelSpec, device: Device, tensor_parallel_size: int
) -> dict[str, tuple[Floats, Floats]]:
    """Returns, per operator, the size of each of its rows and the lower bounds of their times in seconds."""
    names, components = np.asarray(rows["operator"]), np.asarray(rows["component"])
    limits, head = {}, model.lm_head_weights or model.dtype
    matrices = model.blocks[0].layer_matrices(model.hidden_size, Ranks(tensor=tensor_parallel_size))
    shapes = {
        matrix.name: (matrix.k, matrix.n, matrix.stored or model.weights or model.dtype)
        for matrix in matrices
    }
    shapes["lm_head"] = (model.hidden_size, share_of(model.vocab_size, tensor_parallel_size), head)
    for name, (k, n, stored) in shapes.items():
        own = np.flatnonzero(names == name)
        if not len(own):
            continue
        size = np.asarray(rows["num_seqs" if name == "lm_head" else "num_tokens"], dtype=np.float64)[own]
        stored_as = weight_format(stored)
        peak = device.peak_flops_per_s[stored_as.compute_dtype(device, model.dtype)]
        from_memory = max(0.0, k * n * stored_as.bytes_per_weight - device.l2_bytes)
        limits[name] = (
            size,
            np.maximum(2 * size * k * n / peak, from_memory / device.memory_bandwidth_bytes_per_s),
        )
    for name in dict.fromkeys(names[components == "attention"].tolist()):
        own = np.flatnonzero(names == name)
        chosen = {column: np.asarray(rows[column], dtype=np.float64)[own] for column in ATTENTION_SIZES}
        least_s = least_attention_seconds(
            chosen, model=model, device=device, tensor_parallel_size=tensor_parallel_size
        )
        limits[name] = (chosen["prefill_tokens"] + chosen["decode_seqs"], least_s)
    return limits
