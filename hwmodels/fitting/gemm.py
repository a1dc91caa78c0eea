"""Fits the curve of dense matrix multiplication on one device to measured rows, and predicts rows.

Columns: framework (vllm, trtllm), kernel, dtype (bfloat16, fp8, fp8_block, nvfp4, int8_wo, int4_wo, sq),
m, n, k, latency_us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.device import Device
from hwmodels.fitting.robust import Fitted, Floats, fit_curve
from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.gemm import GemmCurve, gemm_seconds

Rows = Mapping[str, Any]

GROUP_BY = ("n", "k")
"""Validation holds out complete matrices; other values of m of a fitted matrix would show little."""

FORMATS = {"bfloat16": "bf16", "sq": "int8"}
"""Weight format by dtype of the rows, where names differ."""

HOST_BOUND_KERNELS = (
    "CutlassFp8BlockScaledMMKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "FlashInferFp8BlockScaledMMKernel",
)
"""Kernels measured outside a CUDA graph: their calls take 60 us to 230 us of host time for any shape. Rows
show the longer of host and GPU time. Engines replay graphs, so such rows are irrelevant for them, and
`modelled_rows` excludes them. TensorRT-LLM's rows time the same kind of kernels on the GPU.
"""

CAPABILITY_OF_KERNEL = {
    "FlashInferFp8BlockScaledMMKernel": "sm90",
    "FlashInferCuteDslNvFp4LinearKernel": "sm100",
    "FlashInferCutlassNvFp4LinearKernel": "sm120",
}
"""Compute capability by vLLM kernels that run on only one kind of chip."""

STAGES: tuple[tuple[tuple[str, ...], dict[str, tuple[float, float]]], ...] = (
    (
        ("bfloat16",),
        {
            "start_s": (0.5e-6, 10e-6),
            "bandwidth_share": (0.3, 1.0),
            "flops_share": (0.2, 1.0),
            "l2_bytes_per_sm_s": (20e9, 500e9),
            "store_bytes_per_sm_s": (5e9, 500e9),
            "wave_share": (0.0, 1.0),
        },
    ),
    (("fp8", "fp8_block", "sq"), {"flops_share_8bit": (0.2, 1.0)}),
    (("nvfp4",), {"flops_share_4bit": (0.2, 1.0)}),
)
"""Dtypes of rows, and the parameters fitted to these rows, with their bounds."""


def modelled_rows(rows: Rows) -> NDArray[np.bool_]:
    """Returns a mask of rows that time the GPU."""
    return ~np.isin(np.asarray(rows["kernel"], dtype=str), HOST_BOUND_KERNELS)


def predict_gemm(rows: Rows, device: Device, curve: GemmCurve) -> Floats:
    """Returns the predicted seconds of each row on that device, for repeated calls as in a benchmark."""
    return gemm_prices(rows, device)(curve)


def gemm_prices(rows: Rows, device: Device) -> Callable[[GemmCurve], Floats]:
    """Returns the seconds of each row as a function of the curve."""
    frameworks, dtypes = np.asarray(rows["framework"], dtype=str), np.asarray(rows["dtype"], dtype=str)
    groups = []
    for framework, dtype in sorted(set(zip(frameworks.tolist(), dtypes.tolist(), strict=True))):
        chosen = np.flatnonzero((frameworks == framework) & (dtypes == dtype))
        sizes = [np.asarray(rows[name], dtype=np.float64)[chosen] for name in ("m", "n", "k")]
        groups.append((chosen, *sizes, WEIGHT_FORMATS[FORMATS.get(dtype, dtype)], framework))

    def price(curve: GemmCurve) -> Floats:
        seconds = np.empty(len(frameworks))
        for chosen, m, n, k, weights, framework in groups:
            seconds[chosen] = gemm_seconds(m, n, k, weights, device, curve, kernels=framework, repeated=True)
        return seconds

    return price


def fit_gemm(
    rows: Rows, device: Device, *, compute_capability: str | None = None, seed: int = 0
) -> Fitted[GemmCurve]:
    """Returns the curve fitted to the rows of one device, stage by stage (`STAGES`).

    A parameter without rows keeps its default. compute_capability None: derived from the rows.
    """
    fitted = Fitted(
        GemmCurve(compute_capability=compute_capability or capability_of(rows["kernel"])), 0.0, {}
    )
    modelled, dtypes = modelled_rows(rows), np.asarray(rows["dtype"], dtype=str)
    for stage_dtypes, ranges in STAGES:
        chosen = modelled & np.isin(dtypes, stage_dtypes)
        if chosen.any():
            used = {name: np.asarray(rows[name])[chosen] for name in rows}
            measured_s = np.asarray(used["latency_us"], dtype=np.float64) * 1e-6
            prices = gemm_prices(used, device)
            fitted = fitted.then(fit_curve(fitted.curve, ranges, prices, measured_s, seed=seed))
    return fitted


def capability_of(kernels: Any) -> str:
    """Returns the compute capability of the rows' chip: sm80 if no kernel belongs to a later one.

    Raises ValueError if the kernels match several.
    """
    found = {CAPABILITY_OF_KERNEL[name] for name in set(map(str, kernels)) & CAPABILITY_OF_KERNEL.keys()}
    if len(found) > 1:
        raise ValueError(f"kernel: rows name kernels of {', '.join(sorted(found))}; give rows of one device")
    return found.pop() if found else "sm80"
