"""Fits `AttentionCurve` of one device to measured rows, and predicts rows.

Columns of both tables: framework (vllm, trtllm), kernel, kv_dtype (bfloat16, fp8), batch_size, num_heads,
num_kv_heads, head_dim, window_size (0 or missing: full attention), latency_us. Decode: kv_len, cached tokens
per sequence. Prefill: attn_dtype, and seq_len, new tokens per sequence, with nothing cached before.

Rows were timed by repeating one call, so data in the L2 cache is still there from the previous call. In an
engine other layers run in between. Predictions of rows account for this; the operator does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.fitting.robust import Fitted, Floats, fit_curve
from hwmodels.operators.attention import (
    AttentionCurve,
    DecodeAttention,
    HeadLayout,
    PrefillAttention,
    kernels_of,
)

Rows = Mapping[str, Any]
Prices = Callable[[AttentionCurve], Floats]

GROUP_BY = ("num_heads", "num_kv_heads", "head_dim")
"""Columns with the same values in all rows of a validation group (`robust.validation_rows`)."""

CAPABILITY_OF_KERNEL = {
    "vllm_flash_attn": "sm80",
    "vllm_flash_attn_fa3": "sm90",
    "vllm_flashinfer_trtllmdecode": "sm100",
    "vllm_flash_attn_fa2": "sm120",
}
"""Compute capability by vLLM's choice of bf16 decode kernel."""

FALL_BACKS = ("vllm_triton_attn", "vllm_flash_attn_fa4", "torch_flow_flashinfer")
"""Kernels for head dimensions that the usual kernels do not support: predicted like the usual ones, not
fitted.
"""

L2_BYTES_PER_SM_S = 19e9
"""L2 bandwidth per SM: on RTX PRO 6000 2.2 times its share of memory bandwidth, on others less."""

DECODE_RANGES = {
    "decode_start_s": (1e-6, 50e-6),
    "decode_item_s": (0.1e-6, 50e-6),
    "kv_bandwidth_share": (0.2, 1.0),
}
PREFILL_RANGES = {"prefill_start_s": (1e-6, 50e-6), "flops_share": (0.1, 1.0), "tile_s": (0.2e-6, 50e-6)}
"""Fitted parameters of `AttentionCurve`, with their bounds."""


def fit_attention(
    decode: Rows, prefill: Rows, device: Device, *, compute_capability: str | None = None, seed: int = 0
) -> Fitted[AttentionCurve]:
    """Returns the curve of the device on which all rows were measured, jointly for all libraries.

    compute_capability None: derived from vLLM's decode kernels. Raises ValueError if there are none.
    """
    capability = compute_capability or capability_of(decode["kernel"])
    fitted = Fitted(AttentionCurve(compute_capability=capability), 0.0, {})
    for rows, ranges, prices in (
        (decode, DECODE_RANGES, decode_prices),
        (prefill, PREFILL_RANGES, prefill_prices),
    ):
        used = chosen_rows(rows, fitted_rows(rows, device))
        measured_s = np.asarray(used["latency_us"], dtype=np.float64) * 1e-6
        price = prices(used, device, fitted.curve)
        fitted = fitted.then(fit_curve(fitted.curve, ranges, price, measured_s, seed=seed))
    return fitted


def capability_of(kernels: Any) -> str:
    """Returns the compute capability of the chip on which vLLM chose these kernels.

    Raises ValueError if the kernels match no chip, or several.
    """
    found = {
        CAPABILITY_OF_KERNEL[name] for name in set(np.asarray(kernels).tolist()) & set(CAPABILITY_OF_KERNEL)
    }
    if len(found) != 1:
        raise ValueError(
            f"compute_capability: rows name kernels of {sorted(found) or 'no'} chip; give the one to fit"
        )
    return found.pop()


def fitted_rows(rows: Rows, device: Device) -> NDArray[np.bool_]:
    """Returns a mask of rows that run the usual kernels and are slower than memory bandwidth allows.

    TensorRT-LLM 1.0 on A100 decodes contexts far beyond the L2 cache at up to 1.4 times the bandwidth of
    memory: the timed kernel cannot have read those bytes from memory.
    """
    usual = ~np.isin(np.asarray(rows["kernel"]), FALL_BACKS)
    if "kv_len" not in rows:
        return usual
    measured_s = np.asarray(rows["latency_us"], dtype=np.float64) * 1e-6
    num_bytes = np.empty(len(measured_s))
    for heads, _, _, chosen in layouts(rows, lambda framework: True):
        num_bytes[chosen] = heads.kv_bytes_per_token * decode_context(rows)[chosen]
    too_fast = num_bytes > 1.05 * measured_s * device.memory_bandwidth_bytes_per_s
    return np.asarray(usual & ~(too_fast & (num_bytes > 2 * device.l2_bytes)))


def predict_decode(rows: Rows, device: Device, curve: AttentionCurve) -> Floats:
    """Returns the predicted seconds of each decode row."""
    return decode_prices(rows, device, curve)(curve)


def predict_prefill(rows: Rows, device: Device, curve: AttentionCurve) -> Floats:
    """Returns the predicted seconds of each prefill row."""
    return prefill_prices(rows, device, curve)(curve)


def decode_prices(rows: Rows, device: Device, curve: AttentionCurve) -> Prices:
    """Returns the seconds of each decode row as a function of a curve with the given one's kernels."""
    num_seqs = np.asarray(rows["batch_size"], dtype=np.float64)
    context_tokens = decode_context(rows)

    def packs_windows(framework: str) -> bool:
        return kernels_of(framework, curve).decode.packs_windows

    groups = [
        (heads, framework, memory_tokens(context_tokens[chosen], heads, device), chosen)
        for heads, framework, _, chosen in layouts(rows, packs_windows)
    ]

    def price(curve: AttentionCurve) -> Floats:
        seconds = np.empty(len(num_seqs))
        for heads, framework, from_memory, chosen in groups:
            attention = DecodeAttention(heads, device, curve, framework)
            seconds[chosen] = attention.seconds(num_seqs[chosen], from_memory)
        return seconds

    return price


def prefill_prices(rows: Rows, device: Device, curve: AttentionCurve) -> Prices:
    """Returns the seconds of each prefill row as a function of a curve with the given one's kernels."""
    num_seqs = np.asarray(rows["batch_size"], dtype=np.float64)
    tokens = num_seqs * np.asarray(rows["seq_len"], dtype=np.float64)
    new_tokens = np.asarray(rows["seq_len"], dtype=np.float64)
    seen = np.minimum(windows(rows), new_tokens)
    pairs = num_seqs * (seen * (seen + 1) / 2 + (new_tokens - seen) * seen)
    groups = layouts(rows, lambda framework: True)

    def price(curve: AttentionCurve) -> Floats:
        seconds = np.empty(len(num_seqs))
        for heads, framework, compute_dtype, chosen in groups:
            attention = PrefillAttention(heads, device, curve, framework, compute_dtype)
            n = tokens[chosen]
            seconds[chosen] = attention.seconds(num_seqs[chosen], n, pairs[chosen], n)
        return seconds

    return price


def decode_context(rows: Rows) -> Floats:
    """Returns the attended context tokens of each row, summed over its sequences."""
    kv_len = np.asarray(rows["kv_len"], dtype=np.float64)
    return np.asarray(np.asarray(rows["batch_size"], dtype=np.float64) * np.minimum(kv_len, windows(rows)))


def memory_tokens(context_tokens: Floats, heads: HeadLayout, device: Device) -> Floats:
    """Returns the token count that takes as long from memory as these tokens with possible L2 hits.

    Contexts up to 0.7 of the cache size stay in it; from 1.5 on each repeat has evicted the next one's data.
    """
    gain = max(1.0, device.num_sms * L2_BYTES_PER_SM_S / device.memory_bandwidth_bytes_per_s)
    size = context_tokens * heads.kv_bytes_per_token / device.l2_bytes
    missed = np.clip((size - 0.7) / 0.8, 0.0, 1.0)
    return np.asarray(context_tokens * (missed + (1 - missed) / gain))


def layouts(
    rows: Rows, packs_windows: Callable[[str], bool]
) -> list[tuple[HeadLayout, str, str, NDArray[np.intp]]]:
    """Returns head layout, framework, compute dtype, and indices of the rows that share them.

    A window longer than the context counts as no window, unless it changes the choice of kernels
    (packs_windows False).
    """
    frameworks = np.asarray(rows["framework"]).tolist()
    lengths = np.asarray(rows["kv_len"] if "kv_len" in rows else rows["seq_len"])
    limited = windows(rows)
    packs = {framework: packs_windows(framework) for framework in set(frameworks)}
    windowed = [
        bool(window < length or (np.isfinite(window) and not packs[framework]))
        for window, length, framework in zip(limited, lengths, frameworks, strict=True)
    ]
    dtypes = np.asarray(rows["attn_dtype"]).tolist() if "attn_dtype" in rows else [""] * len(windowed)
    shapes = [
        np.asarray(rows[name]).tolist() for name in ("num_heads", "num_kv_heads", "head_dim", "kv_dtype")
    ]
    found: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(frameworks, dtypes, windowed, *shapes, strict=True)):
        found.setdefault(key, []).append(row)
    return [
        (
            HeadLayout(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                kv_bytes_per_element=1.0 if kv_dtype == "fp8" else 2.0,
                windowed=inside,
            ),
            framework,
            "fp8" if dtype == "fp8" else "bf16",
            np.array(indices, dtype=np.intp),
        )
        for (framework, dtype, inside, num_heads, num_kv_heads, head_dim, kv_dtype), indices in found.items()
    ]


def windows(rows: Rows) -> Floats:
    """Returns the maximum number of tokens a query attends to; infinite if window_size is 0 or missing."""
    sizes = np.asarray(rows["window_size"]).tolist()
    return np.array(
        [size if isinstance(size, int | float) and size > 0 else np.inf for size in sizes], dtype=np.float64
    )


def chosen_rows(rows: Rows, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """Returns the columns restricted to the chosen rows."""
    return {name: np.asarray(rows[name])[chosen] for name in rows}
